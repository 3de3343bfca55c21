import type { DynamoConfig } from "../config/engine-config.ts";
import type { EndpointName } from "./discovery/records.ts";
import { Canary, defaultPayload } from "./health/canary.ts";
import type { Health } from "./health/health.ts";
import type { Membership } from "./membership.ts";
import { type Work, WorkHandler } from "./request-plane/work-handler.ts";
import { RlAdmin } from "./rl/admin.ts";
import { rlWork } from "./rl/endpoint.ts";
import { modelTaintRoute } from "./rl/model-taints.ts";
import { ReloadableEngine } from "./rl/reloadable-engine.ts";
import type { EngineRoutes } from "./system-server/engine-routes.ts";
import type { DynamoMetrics } from "./system-server/metrics.ts";
import type { SystemServer } from "./system-server/server.ts";
import type { LoadedWorker, WorkerEngine } from "./worker-engine.ts";

export interface ServingOptions {
  config: DynamoConfig;
  endpoint: EndpointName;
  loaded: LoadedWorker;
  engine: WorkerEngine;
  work: Work;
  handler: WorkHandler;
  metrics: DynamoMetrics;
  membership: Membership;
  /** The model's record as registered. */
  card: Record<string, unknown>;
  system: SystemServer;
  health: Health;
  routes: EngineRoutes;
}

/** A prompt for the canary when the tokenizer has no first token. */
const ANY_TOKEN = 0;

/** What a registered worker shows on its system server: readiness, the canary's where it is on, and administrative calls. */
export class Serving {
  readonly #options: ServingOptions;
  readonly #canary: Canary | null;
  #rl: WorkHandler | null = null;
  readonly #undo: (() => void)[] = [];

  private constructor(options: ServingOptions) {
    this.#options = options;
    const { config, health, endpoint, loaded, work, engine } = options;
    const { healthCheckEnabled, healthCheckPayload, canaryWaitSeconds, healthCheckTimeoutSeconds } = config.environment;
    this.#canary = !healthCheckEnabled
      ? null
      : new Canary({
          work,
          payload: healthCheckPayload ?? defaultPayload(loaded.tokenizer.bosTokenId ?? ANY_TOKEN),
          waitMs: canaryWaitSeconds * 1000,
          timeoutMs: healthCheckTimeoutSeconds * 1000,
          onHealth: (ready) => health.set(endpoint.endpoint, ready),
        });
    let steps = engine.stats().steps;
    const canary = this.#canary;
    if (canary === null) return;
    this.#undo.push(
      engine.onStep(({ stats }) => {
        if (stats.steps === steps) return;
        steps = stats.steps;
        canary.sign();
      }),
    );
  }

  /** Ready when this resolves, unless the canary got no token. */
  static async open(options: ServingOptions): Promise<Serving> {
    const self = new Serving(options);
    const { routes, membership, config, health, endpoint } = options;
    let { card } = options;
    routes.register("update/model_taints", modelTaintRoute(() => card, (next) => ((card = next), membership.updateCard(next))));
    health.set(endpoint.endpoint, false);
    if (config.worker.enableRl) await self.#openRl();
    routes.phase = "running";
    await self.#ready();
    health.phase = "ready";
    return self;
  }

  /** From now on nothing is ready, and administrative calls are refused. */
  stop(): void {
    const { health, routes } = this.#options;
    health.phase = "stopping";
    routes.phase = "shutting down";
    this.#canary?.stop();
    for (const undo of this.#undo.splice(0)) undo();
    this.#rl?.close("the worker is shutting down");
  }

  async #ready(): Promise<void> {
    if (this.#canary !== null) await this.#canary.start();
    else this.#options.health.set(this.#options.endpoint.endpoint, true);
  }

  async #openRl(): Promise<void> {
    const { engine, loaded, handler, routes, system, endpoint, config, membership, metrics, health } = this.#options;
    if (engine instanceof ReloadableEngine && loaded.weights !== undefined) {
      const setServing = async (serving: boolean) => {
        if (serving) {
          await membership.setRoutable(true);
          return this.#ready();
        }
        await membership.setRoutable(false);
        this.#canary?.stop();
        health.set(endpoint.endpoint, false);
      };
      new RlAdmin({ engine, weights: loaded.weights, model: loaded.model, handler, setServing }).register(routes);
    }
    const name = { ...endpoint, endpoint: config.environment.rlEndpoint };
    this.#rl = new WorkHandler(rlWork(routes, system.baseUrl), metrics.endpoint(name.endpoint));
    await membership.addEndpoint(name, this.#rl.accept);
  }
}
