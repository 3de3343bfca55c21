import { isIPv6 } from "node:net";
import { logger } from "../../telemetry/log.ts";
import type { Health } from "../health/health.ts";
import { localAddress } from "../request-plane/local-address.ts";
import type { EngineRoutes } from "./engine-routes.ts";

export interface SystemServerOptions {
  host: string;
  /** 0 = any free port. */
  port: number;
  healthPath: string;
  livePath: string;
  health: Health;
  routes: EngineRoutes;
  /** Prometheus text: Dynamo's families, then the engine's. */
  metrics: () => Promise<string>;
  /** Own discovery records as JSON; without it /metadata answers 404. */
  metadata?: () => string;
}

const TEXT = { "content-type": "text/plain; charset=utf-8" };
const ENGINE = "/engine/";
/** Bytes of a call to /engine/. */
const MAX_BODY = 1 << 20;

const log = logger("layerscale::dynamo::system_server");

/** The worker's own HTTP surface (DYN_SYSTEM_PORT): health, metrics, the files of the model card and administrative calls. Answers 503 until ready. */
export class SystemServer {
  readonly #server: ReturnType<typeof Bun.serve>;
  readonly #files = new Map<string, string>();

  /** @throws Error when the address cannot be bound */
  constructor(readonly options: SystemServerOptions) {
    this.#server = Bun.serve({
      // Else a second process could bind the same port without an error and take half of the probes.
      reusePort: false,
      hostname: options.host,
      port: options.port,
      development: false,
      maxRequestBodySize: MAX_BODY,
      // Seconds; a reload of weights answers when it is done, so its own limits hold for it.
      idleTimeout: 30,
      fetch: (request, server) => {
        if (new URL(request.url).pathname.startsWith(ENGINE)) server.timeout(request, 0);
        return this.#answer(request);
      },
      error: (error) => {
        log.error("system server request failed", { error });
        return new Response("Internal Server Error", { status: 500, headers: TEXT });
      },
    });
    log.info("system server listens", { host: options.host, port: this.port });
  }

  get port(): number {
    return this.#server.port ?? this.options.port;
  }

  /** Where others reach this server; a wildcard bind is advertised by the machine's address. */
  get baseUrl(): string {
    const wildcard = ["0.0.0.0", "::", ""].includes(this.options.host);
    const host = wildcard ? localAddress() : this.options.host;
    return `http://${isIPv6(host) ? `[${host}]` : host}:${this.port}`;
  }

  /** Serves exactly these files below a path; nothing else of the disk is reachable. */
  serveFiles(path: string, files: ReadonlyMap<string, string>): void {
    for (const [name, file] of files) this.#files.set(`${path}/${encodeURIComponent(name)}`, file);
  }

  /** Open connections are cut. */
  async close(): Promise<void> {
    await this.#server.stop(true);
  }

  async #answer(request: Request): Promise<Response> {
    const { pathname } = new URL(request.url);
    const { healthPath, livePath } = this.options;
    if (pathname.startsWith(ENGINE)) return this.#engineCall(request, pathname.slice(ENGINE.length));
    const file = this.#files.get(pathname);
    const known = pathname === healthPath || pathname === livePath || pathname === "/metrics" || pathname === "/metadata" || file !== undefined;
    if (!known) return new Response("Route not found", { status: 404, headers: TEXT });
    if (request.method !== "GET" && request.method !== "HEAD") return new Response("Method not allowed", { status: 405, headers: { ...TEXT, allow: "GET, HEAD" } });
    if (file !== undefined) return new Response(Bun.file(file), { headers: { "content-type": "application/octet-stream" } });
    if (pathname === "/metrics") return new Response(await this.options.metrics(), { headers: TEXT });
    if (pathname === "/metadata") {
      const { metadata } = this.options;
      return metadata ? new Response(metadata(), { headers: TEXT }) : new Response("Discovery metadata not available", { status: 404, headers: TEXT });
    }
    const { health } = this.options;
    return new Response(JSON.stringify(health.body()), { status: health.ready ? 200 : 503, headers: TEXT });
  }

  /** Any method; an empty body is an empty object. Texts and codes are those of Dynamo 1.5.0. */
  async #engineCall(request: Request, route: string): Promise<Response> {
    const say = (status: number, body: unknown) => new Response(JSON.stringify(body), { status, headers: TEXT });
    let body: unknown = {};
    const text = await request.text();
    if (text !== "") {
      try {
        body = JSON.parse(text);
      } catch (error) {
        return say(400, { error: "Invalid JSON", message: (error as Error).message });
      }
    }
    try {
      const answer = await this.options.routes.call(route, body);
      return answer === null ? say(404, { error: "Route not found", message: `Route /engine/${route} not found` }) : say(200, answer);
    } catch (error) {
      log.error("engine route failed", { route, error });
      return say(500, { error: "Handler error", message: (error as Error).message });
    }
  }
}
