import type { LoadedModel } from "../../model/types.ts";
import { logger } from "../../telemetry/log.ts";
import { ProtocolError, shutdown } from "../protocol/errors.ts";
import type { WorkHandler } from "../request-plane/work-handler.ts";
import { type EngineRoutes, refusal } from "../system-server/engine-routes.ts";
import type { WeightSource } from "../worker-engine.ts";
import type { ReloadableEngine } from "./reloadable-engine.ts";

export interface RlAdminOptions {
  engine: ReloadableEngine;
  weights: WeightSource;
  /** What runs now; what is started again when a reload fails. */
  model: LoadedModel;
  handler: Pick<WorkHandler, "inFlight" | "idle" | "abortAll" | "abortRequest">;
  /** Takes the worker out of routing and back: the instance record and readiness. */
  setServing: (serving: boolean) => Promise<void>;
}

type Body = Record<string, unknown>;
type Answer = Record<string, unknown>;

const MODES = ["keep", "wait", "abort"] as const;
/** Seconds that running requests get to finish before a pause gives up. */
const WAIT_SECONDS = 300;
const MAX_WAIT_SECONDS = 86_400;
/** Ended streams get this long to say so. */
const ABORT_MS = 5_000;

/** Calls of other workers of Dynamo that have no meaning here, and why. */
const UNSUPPORTED: Record<string, string> = {
  update_weights_from_distributed: "there is no collective transport between trainer and worker; write a checkpoint and call update_weights_from_disk",
  update_weights_from_tensor: "weights come from files only; write a checkpoint and call update_weights_from_disk",
  init_weights_update_group: "there is no collective transport between trainer and worker; write a checkpoint and call update_weights_from_disk",
  destroy_weights_update_group: "there is no collective transport between trainer and worker",
  sleep: "memory is not given back while the worker runs; stop the worker instead",
  wake_up: "the worker does not sleep",
  release_memory_occupation: "memory is not given back while the worker runs; stop the worker instead",
  resume_memory_occupation: "memory is never given back while the worker runs",
  start_profile: "there is no profiler; /metrics has latencies and steps",
  stop_profile: "there is no profiler; /metrics has latencies and steps",
  load_lora: "there are no LoRA adapters",
  unload_lora: "there are no LoRA adapters",
  list_loras: "there are no LoRA adapters",
  scale_elastic_ep: "there is no expert parallelism",
};

const log = logger("layerscale::dynamo::rl");

/** Reinforcement-learning calls (--enable-rl): pause and resume, flush, weight version, reload from disk. Changes follow each other. */
export class RlAdmin {
  readonly #options: RlAdminOptions;
  #model: LoadedModel;
  #paused = false;
  #version = "initial";
  #work: Promise<unknown> = Promise.resolve();

  constructor(options: RlAdminOptions) {
    this.#options = options;
    this.#model = options.model;
  }

  /** Under control/ as Dynamo's backend framework names them, and by their plain names as its engines do. */
  register(routes: EngineRoutes): void {
    const calls: Record<string, (body: Body) => Promise<Answer>> = {
      liveness_probe: async () => ({ status: "ok", alive: true }),
      get_weight_version: async () => ({ status: "ok", version: this.#version }),
      abort_request: async (body) => this.#abortRequest(body),
      pause_generation: (body) => this.#serially(() => this.#pause(body)),
      resume_generation: () => this.#serially(() => this.#resume()),
      flush_cache: () => this.#serially(() => this.#flush()),
      update_weights_from_disk: (body) => this.#serially(() => this.#reload(body)),
    };
    for (const [name, call] of Object.entries(calls)) {
      const route = async (body: unknown) => {
        if (typeof body !== "object" || body === null || Array.isArray(body)) return refusal("engine control request body must be a JSON object");
        return call(body as Body);
      };
      routes.register(name, route);
      routes.register(`control/${name}`, route);
    }
    for (const [name, reason] of Object.entries(UNSUPPORTED)) for (const path of [name, `control/${name}`, `update/${name}`]) routes.refuse(path, reason);
  }

  get paused(): boolean {
    return this.#paused;
  }

  #serially<T>(body: () => Promise<T>): Promise<T> {
    const run = this.#work.then(body);
    this.#work = run.catch(() => {});
    return run;
  }

  /**
   * Out of routing first. keep: running requests stand still until resume; wait: they finish; abort: they end with an error that another
   * worker may continue from. A request that still arrives waits.
   */
  async #pause(body: Body): Promise<Answer> {
    const { engine, handler, setServing } = this.#options;
    const mode = MODES.find((name) => name === (body.mode ?? "keep"));
    const clear = body.clear_cache ?? false;
    const seconds = body.timeout_s ?? WAIT_SECONDS;
    if (mode === undefined) return refusal(`mode: expected ${MODES.join(", ")}, got ${JSON.stringify(body.mode)}`);
    if (typeof clear !== "boolean") return refusal(`clear_cache: expected true or false, got ${JSON.stringify(clear)}`);
    if (typeof seconds !== "number" || !(seconds > 0 && seconds <= MAX_WAIT_SECONDS)) return refusal(`timeout_s: expected a number above 0 and up to ${MAX_WAIT_SECONDS}, got ${JSON.stringify(seconds)}`);
    await setServing(false);
    if (mode === "wait" && !this.#paused && !(await handler.idle(seconds * 1000)))
      return refusal(`${handler.inFlight} requests still run after ${seconds} s; the worker is out of routing, and generation goes on`);
    if (mode === "abort") await handler.abortAll(shutdown("generation is paused"), ABORT_MS);
    await engine.pause();
    this.#paused = true;
    if (clear) await engine.clearCache();
    log.info("generation paused", { mode, clearCache: clear, inFlight: handler.inFlight });
    return { status: "ok", message: "Engine paused", mode, clear_cache: clear };
  }

  async #resume(): Promise<Answer> {
    await this.#options.engine.resume();
    this.#paused = false;
    await this.#options.setServing(true);
    log.info("generation resumed");
    return { status: "ok", message: "Engine resumed" };
  }

  async #flush(): Promise<Answer> {
    await this.#options.engine.clearCache();
    return { status: "ok", message: "Cache flushed" };
  }

  async #reload(body: Body): Promise<Answer> {
    const { engine, weights } = this.#options;
    const path = body.model_path;
    const version = body.weight_version ?? "unknown";
    if (!this.#paused) return refusal("Worker must be paused via pause_generation() before updating weights. Call pause_generation() first, then update, then resume_generation().");
    if (typeof path !== "string" || path === "") return refusal(`model_path: expected the path of a model directory or .gguf file, got ${JSON.stringify(path)}`);
    if (typeof version !== "string") return refusal(`weight_version: expected a string, got ${JSON.stringify(version)}`);
    const { running, waiting } = engine.stats();
    if (running + waiting > 0)
      return refusal(`${running + waiting} requests stand still and would go on over other weights: resume, then pause with mode "wait" or "abort" before a reload`);
    try {
      const next = await weights.check(path);
      await engine.exchange(() => weights.start(next), () => weights.start(this.#model));
      this.#model = next;
    } catch (error) {
      log.error("weights were not reloaded", { path, error });
      return refusal(`weights were not reloaded: ${(error as Error).message}`);
    }
    this.#version = version;
    log.info("weights reloaded", { path, version });
    return { status: "ok", version };
  }

  #abortRequest(body: Body): Answer {
    const id = body.request_id;
    if (typeof id !== "string" || id === "") return refusal(`request_id: expected the id of a request, got ${JSON.stringify(id)}`);
    if (!this.#options.handler.abortRequest(id, new ProtocolError("Cancelled", "aborted by abort_request"))) return refusal(`request_id: no request "${id}" runs here`);
    return { status: "ok", request_id: id };
  }
}
