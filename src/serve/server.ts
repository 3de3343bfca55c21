import { randomUUID } from "node:crypto";
import type { Server } from "bun";
import { logger } from "../telemetry/log.ts";
import { requestFields } from "../telemetry/trace.ts";
import type { App, Handler, RequestContext } from "./app.ts";
import { health } from "./health.ts";
import { ClientGone, errorResponse, HttpError, toHttpError } from "./http-errors.ts";
import { metricsRoute } from "./metrics-route.ts";
import { getModel, listModels, MODEL_PREFIX } from "./models.ts";
import { chatCompletions } from "./openai/chat.ts";
import { completions } from "./openai/completions.ts";

const log = logger("layerscale::serve");

const IDLE_SECONDS = 30;
/** Above any Content-Length, so that refusing a large body is ours to do, with an envelope. */
const RUNTIME_BODY_LIMIT = Number.MAX_SAFE_INTEGER;

interface Route {
  methods: Partial<Record<"GET" | "POST" | "DELETE", Handler>>;
  /** Needs no key. */
  open?: boolean;
}

const ROUTES: Record<string, Route> = {
  "/health": { methods: { GET: health }, open: true },
  "/healthz": { methods: { GET: health }, open: true },
  "/metrics": { methods: { GET: metricsRoute } },
  "/v1/models": { methods: { GET: listModels } },
  "/v1/chat/completions": { methods: { POST: chatCompletions } },
  "/v1/completions": { methods: { POST: completions } },
};
const MODEL_ROUTE: Route = { methods: { GET: getModel } };
/** Routes that run the model: their request counters exist from the start. */
export const GENERATION_ROUTES = ["chat", "completions"] as const;

export interface ListenOptions {
  host: string;
  /** 0 = any free port. */
  port: number;
  /** Seconds after which a kept-alive connection without a request is closed. */
  idleSeconds?: number;
}

/** Starts to listen. @throws the runtime's error when the address cannot be bound */
export function listen(app: App, { host, port, idleSeconds = IDLE_SECONDS }: ListenOptions): Server<undefined> {
  return Bun.serve({
    hostname: host,
    port,
    idleTimeout: idleSeconds,
    maxRequestBodySize: RUNTIME_BODY_LIMIT,
    development: false,
    // Without it, development: false lets a second process bind the same port and take half of the connections.
    reusePort: false,
    fetch: (request, server) => handle(app, request, server, idleSeconds),
    error: () => errorResponse(new HttpError(500, "api_error", "internal error"), "", newRequestId()),
  });
}

const newRequestId = (): string => `req_${randomUUID().replaceAll("-", "")}`;

async function handle(app: App, request: Request, server: Server<undefined>, idleSeconds: number): Promise<Response> {
  const requestId = newRequestId();
  const path = pathOf(request.url);
  const context: RequestContext = {
    request,
    path,
    requestId,
    app,
    connections: server.pendingRequests,
    idleLimit: (on) => server.timeout(request, on ? idleSeconds : 0),
  };
  let response: Response;
  try {
    response = await dispatch(context);
  } catch (error) {
    response = failure(error, context);
  }
  log.debug("request", { ...requestFields(requestId, request.headers.get("traceparent")), method: request.method, path, status: response.status });
  response.headers.set("x-request-id", requestId);
  response.headers.set("request-id", requestId);
  response.headers.set("access-control-allow-origin", "*");
  response.headers.set("access-control-expose-headers", "x-request-id, request-id");
  return response;
}

function dispatch(context: RequestContext): Response | Promise<Response> {
  const { app, request, path } = context;
  if (request.method === "OPTIONS") return preflight(request.headers);
  const route = Object.hasOwn(ROUTES, path) ? ROUTES[path] : path.length > MODEL_PREFIX.length && path.startsWith(MODEL_PREFIX) ? MODEL_ROUTE : undefined;
  if (!route?.open) app.keyCheck?.require(request.headers);
  if (!route) throw new HttpError(404, "not_found_error", `no route ${request.method} ${path.slice(0, 200)}`);
  const method = request.method === "HEAD" ? "GET" : request.method;
  const handler = Object.hasOwn(route.methods, method) ? route.methods[method as keyof Route["methods"]] : undefined;
  if (handler) return handler(context);
  const allow = Object.keys(route.methods).join(", ");
  throw new HttpError(405, "invalid_request_error", `${path} does not take ${request.method}; expected ${allow}`, { headers: { allow } });
}

/** CORS preflight: any origin, any route, no key. */
function preflight(headers: Headers): Response {
  return new Response(null, {
    status: 204,
    headers: {
      "access-control-allow-methods": "GET, POST, DELETE, OPTIONS",
      "access-control-allow-headers": headers.get("access-control-request-headers") ?? "authorization, content-type, x-api-key",
      "access-control-max-age": "86400",
    },
  });
}

function failure(error: unknown, context: RequestContext): Response {
  // 499: the client closed the connection; nobody reads this.
  if (error instanceof ClientGone) return new Response(null, { status: 499 });
  const known = toHttpError(error, "");
  if (known !== error) log.error("unexpected error", { ...requestFields(context.requestId, context.request.headers.get("traceparent")), path: context.path, error: error as Error, stack: (error as Error).stack });
  return errorResponse(known, context.path, context.requestId);
}

/** Path of an absolute URL, percent-encoded as sent, without query and fragment. */
function pathOf(url: string): string {
  const start = url.indexOf("/", url.indexOf("://") + 3);
  if (start < 0) return "/";
  const end = url.slice(start).search(/[?#]/);
  return end < 0 ? url.slice(start) : url.slice(start, start + end);
}
