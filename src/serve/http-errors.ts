import { EngineError } from "../engine/errors.ts";

export type ErrorType =
  | "invalid_request_error"
  | "authentication_error"
  | "not_found_error"
  | "request_too_large"
  | "timeout_error"
  | "overloaded_error"
  | "api_error";

export interface HttpErrorDetails {
  /** The request field at fault. */
  param?: string | null;
  /** Machine-readable cause. */
  code?: string | null;
  headers?: Record<string, string>;
}

/** A refusal with its status and envelope content. Thrown by handlers, turned into a response in one place. */
export class HttpError extends Error {
  override name = "HttpError";
  constructor(
    readonly status: number,
    readonly type: ErrorType,
    message: string,
    readonly details: HttpErrorDetails = {},
  ) {
    super(message);
  }
}

export const badRequest = (message: string, param: string | null = null, code: string | null = null): HttpError =>
  new HttpError(400, "invalid_request_error", message, { param, code });

export const unavailable = (message: string): HttpError => new HttpError(503, "overloaded_error", message);

/** Sessions do not exist here, so a request that names one cannot be part of it. @throws HttpError 404 */
export function refuseSession(headers: Headers): void {
  const session = headers.get("x-layerscale-session-id");
  if (session !== null) throw new HttpError(404, "not_found_error", `x-layerscale-session-id: no session ${JSON.stringify(session.slice(0, 128))}`);
}

/** The client has gone: nobody reads the answer. Never a response of its own. */
export class ClientGone extends Error {
  override name = "ClientGone";
}

/** Names what a client may do about it: EngineError by kind, HttpError as it is, anything else a 500 without inner detail. */
export function toHttpError(error: unknown, promptParam: string): HttpError {
  if (error instanceof HttpError) return error;
  if (error instanceof EngineError) {
    if (error.kind === "invalid") {
      const param = error.code === "context_length_exceeded" || error.code === "vocabulary" || error.code === "empty_prompt" || error.code === "pool" ? promptParam : error.param;
      return badRequest(error.message, param, error.code);
    }
    if (error.kind === "unavailable") return unavailable(error.message);
    return new HttpError(500, "api_error", `engine failure: ${error.message}`);
  }
  return new HttpError(500, "api_error", "internal error");
}

/** The `error` object of both envelopes; param and code only where there is something to say. */
export function errorObject(error: HttpError): Record<string, unknown> {
  const { param, code } = error.details;
  return {
    message: error.message,
    type: error.type,
    ...(param !== undefined && param !== null && { param }),
    ...(code !== undefined && code !== null && { code }),
  };
}

/** Routes under /v1/messages answer in Anthropic's envelope, all others in OpenAI's. */
export const usesAnthropicEnvelope = (path: string): boolean => path === "/v1/messages" || path.startsWith("/v1/messages/");

export function errorResponse(error: HttpError, path: string, requestId: string): Response {
  const body = usesAnthropicEnvelope(path)
    ? { type: "error", error: { type: error.type, message: error.message }, request_id: requestId }
    : { error: errorObject(error) };
  return Response.json(body, { status: error.status, headers: error.details.headers ?? {} });
}
