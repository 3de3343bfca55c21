import { isIPv6 } from "node:net";
import { logger } from "../../telemetry/log.ts";
import { localAddress } from "../request-plane/local-address.ts";

export interface SystemServerOptions {
  host: string;
  /** 0 = any free port. */
  port: number;
  healthPath: string;
  livePath: string;
  /** Name of the endpoint whose readiness the body shows. */
  endpoint: string;
  /** Prometheus text: Dynamo's families, then the engine's. */
  metrics: () => Promise<string>;
}

const TEXT = { "content-type": "text/plain; charset=utf-8" };
const log = logger("layerscale::dynamo::system_server");

/** The worker's own HTTP surface (DYN_SYSTEM_PORT): health, metrics and the files of the model card. Answers 503 until ready. */
export class SystemServer {
  readonly #server: ReturnType<typeof Bun.serve>;
  readonly #startedAt = performance.now();
  readonly #files = new Map<string, string>();
  #state: "starting" | "ready" | "stopping" = "starting";

  /** @throws Error when the address cannot be bound */
  constructor(readonly options: SystemServerOptions) {
    this.#server = Bun.serve({
      // Else a second process could bind the same port without an error and take half of the probes.
      reusePort: false,
      hostname: options.host,
      port: options.port,
      development: false,
      fetch: (request) => this.#answer(request),
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
  set state(state: "starting" | "ready" | "stopping") {
    this.#state = state;
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
    const file = this.#files.get(pathname);
    const known = pathname === healthPath || pathname === livePath || pathname === "/metrics" || pathname === "/metadata" || file !== undefined;
    if (!known) return new Response("Route not found", { status: 404, headers: TEXT });
    if (request.method !== "GET" && request.method !== "HEAD") return new Response("Method not allowed", { status: 405, headers: { ...TEXT, allow: "GET, HEAD" } });
    if (file !== undefined) return new Response(Bun.file(file), { headers: { "content-type": "application/octet-stream" } });
    if (pathname === "/metrics") return new Response(await this.options.metrics(), { headers: TEXT });
    if (pathname === "/metadata") return new Response("Discovery metadata not available", { status: 404, headers: TEXT });
    return this.#health();
  }

  #health(): Response {
    const ready = this.#state === "ready";
    const ms = performance.now() - this.#startedAt;
    const secs = Math.floor(ms / 1000);
    const status = ready ? "ready" : "notready";
    const body = { status, uptime: { secs, nanos: Math.floor((ms - secs * 1000) * 1e6) }, endpoints: this.#state === "starting" ? {} : { [this.options.endpoint]: status } };
    return new Response(JSON.stringify(body), { status: ready ? 200 : 503, headers: TEXT });
  }
}
