import { DiscoveryError } from "../discovery.ts";

/** What a request to the API server came to when it did not succeed. */
export class ApiError extends DiscoveryError {
  override name = "ApiError";
  constructor(
    message: string,
    /** null = no answer. */
    readonly status: number | null,
    /** The same request may succeed later without anyone's help. */
    readonly transient: boolean,
    /** The server's own wish, in milliseconds. */
    readonly retryAfterMs: number | null = null,
  ) {
    super(message);
  }
}

/** Restarting servers, overload and lost races pass by themselves; refusals do not. */
const TRANSIENT = new Set([408, 409, 410, 429, 500, 502, 503, 504]);
/** Codes of a certificate that is not trusted, or not the server's: waiting does not change it. */
const CERTIFICATE = /CERT|SIGNATURE|ISSUER|ALTNAME|PEM|X509/i;
const MAX_RETRY_AFTER_MS = 10_000;
const RIGHTS = "get, list, watch, create, patch and delete on dynamoworkermetadatas.nvidia.com, and get, list and watch on endpointslices.discovery.k8s.io (pods with DYN_KUBE_DISCOVERY_MODE=container)";

/** What to do about an answer, beside what the server says. */
function advice(status: number, isObject: boolean): string {
  if (status === 401) return "; the token or client certificate is not accepted (expired, or of another cluster)";
  if (status === 403) return `; the pod's service account needs ${RIGHTS}`;
  if (status === 404 && !isObject) return "; the cluster has no DynamoWorkerMetadata resource (nvidia.com/v1alpha1): install Dynamo's custom resource definitions";
  return "";
}

/** @param text body of the answer: a Status object, or plain text when there is no such route */
export function refusal(what: string, status: number, text: string, retryAfter: string | null): ApiError {
  let message = text.trim().slice(0, 500);
  let isObject = false;
  try {
    const body = JSON.parse(text) as { message?: unknown };
    if (typeof body.message === "string") [message, isObject] = [body.message.slice(0, 500), true];
  } catch {
    // Plain text is shown as it came.
  }
  const seconds = retryAfter !== null && /^\d+$/.test(retryAfter) ? Number(retryAfter) : null;
  return new ApiError(`${what}: ${status}${message ? ` ${message}` : ""}${advice(status, isObject)}`, status, TRANSIENT.has(status), seconds === null ? null : Math.min(seconds * 1000, MAX_RETRY_AFTER_MS));
}

/** A request without an answer. */
export function unreachable(what: string, error: unknown): ApiError {
  const { code, message: whole, name } = error as { code?: unknown; message?: string; name?: string };
  // Hints of the HTTP client for programmers.
  const message = whole?.replace(/\.? (For more information|Is the computer)[^]*$/, "");
  const certificate = typeof code === "string" && CERTIFICATE.test(code);
  const cause = name === "TimeoutError" ? "no answer in time" : `${message ?? String(error)}${typeof code === "string" && !message?.includes(code) ? ` (${code})` : ""}`;
  return new ApiError(`${what}: ${certificate ? "the server's certificate is not accepted: " : ""}${cause}`, null, !certificate);
}
