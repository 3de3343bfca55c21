import { EngineMetrics } from "../telemetry/metrics.ts";
import type { KeyCheck } from "./auth.ts";
import { BodyReader, type BodyLimits } from "./body.ts";
import { unavailable } from "./http-errors.ts";
import { RequestRegistry } from "./requests.ts";
import type { Serving } from "./serving.ts";

/** loading → ready → stopping; failed when the engine is gone. */
export type Phase = "loading" | "ready" | "stopping" | "failed";

/** What /v1/models says; known before weights are loaded. */
export interface ModelIdentity {
  name: string;
  contextLength: number;
}

export interface AppOptions {
  version: string;
  /** null = open API. */
  keyCheck: KeyCheck | null;
  bodyLimits?: BodyLimits;
}

/** State that all routes share. */
export class App {
  readonly metrics: EngineMetrics;
  readonly bodies: BodyReader;
  readonly requests: RequestRegistry;
  readonly keyCheck: KeyCheck | null;
  /** Unix seconds; creation time of the model entry. */
  readonly created = Math.floor(Date.now() / 1000);
  phase: Phase = "loading";
  serving: Serving | null = null;
  identity: ModelIdentity | null = null;

  constructor(options: AppOptions) {
    this.metrics = new EngineMetrics({ version: options.version });
    this.bodies = new BodyReader(options.bodyLimits);
    this.requests = new RequestRegistry(this.metrics);
    this.keyCheck = options.keyCheck;
  }

  /** Names the model before its weights are loaded. */
  identify(identity: ModelIdentity): void {
    this.identity = identity;
    this.metrics.setModel(identity.name);
  }

  /** The model is warm: requests are admitted from now on, unless a stop came first. */
  start(serving: Serving): void {
    this.identify({ name: serving.name, contextLength: serving.contextLength });
    this.serving = serving;
    if (this.phase === "loading") this.phase = "ready";
  }

  /** @throws HttpError 503 while no request can be admitted */
  admit(): Serving {
    if (this.phase === "ready" && this.serving) return this.serving;
    if (this.phase === "loading") throw unavailable("the model is still loading");
    throw unavailable(this.phase === "stopping" ? "the server is stopping" : "the engine has failed");
  }
}

/** One HTTP request on its way through a route. */
export interface RequestContext {
  request: Request;
  /** Percent-encoded, without query. */
  path: string;
  requestId: string;
  app: App;
  /** Requests in flight on all connections, this one included. */
  connections: number;
  /** Lifts the idle limit of this connection (a long prefill sends no bytes), or puts it back for what comes after the answer. */
  idleLimit(on: boolean): void;
}

export type Handler = (context: RequestContext) => Response | Promise<Response>;
