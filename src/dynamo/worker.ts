import { randomBytes } from "node:crypto";
import { accessSync, constants, statSync } from "node:fs";
import type { DynamoConfig } from "../config/engine-config.ts";
import { UsageError } from "../config/flags.ts";
import { VERSION } from "../config/version.ts";
import type { EngineError } from "../engine/errors.ts";
import type { EngineInfo, KvEvent } from "../engine/types.ts";
import type { LoadedModel } from "../model/types.ts";
import { logger } from "../telemetry/log.ts";
import { EngineMetrics, type MetricsSource } from "../telemetry/metrics.ts";
import { Detokenizer } from "../tokenizer/detokenizer.ts";
import { StopMatcher } from "../tokenizer/stop-matcher.ts";
import type { Tokenizer } from "../tokenizer/tokenizer.ts";
import { onStopSignal, type StopSignal } from "../util/signals.ts";
import { type Discovery, DiscoveryError } from "./discovery/discovery.ts";
import { FileDiscovery } from "./discovery/file.ts";
import { MemoryDiscovery } from "./discovery/memory.ts";
import { type EndpointName, endpointKey, endpointPath, hexId, instance, instanceRecord, modelRecord } from "./discovery/records.ts";
import { KvEventPlane } from "./event-plane/kv-event-plane.ts";
import { generateHandler, type GeneratingEngine, type StopDetector } from "./handler.ts";
import { modelCard } from "./registration/card.ts";
import { refuseConflict } from "./registration/conflict.ts";
import { slug } from "./registration/slug.ts";
import { localAddress } from "./request-plane/local-address.ts";
import { TcpRequestPlane } from "./request-plane/tcp-server.ts";
import { WorkHandler } from "./request-plane/work-handler.ts";
import { DynamoMetrics } from "./system-server/metrics.ts";
import { SystemServer } from "./system-server/server.ts";
import { refuseUnbuilt } from "./unbuilt.ts";

/** What a worker needs of the engine. */
export interface WorkerEngine extends GeneratingEngine, MetricsSource {
  readonly info: EngineInfo;
  onFailure(listener: (error: EngineError) => void): () => void;
  onKvEvents(listener: (events: KvEvent[]) => void): () => void;
  drain(timeoutMs: number): Promise<boolean>;
  stop(): Promise<void>;
}

export interface LoadedWorker {
  engine: WorkerEngine;
  model: LoadedModel;
  tokenizer: Tokenizer;
  servedName: string;
}

/** Time for the last items of streams that end at a stop, and for the engine to give its pages back. */
const DRAIN_MS = 5_000;
const ENGINE_STOP_MS = 10_000;
/** Path segment of the base model's files on the system server. */
const BASE_MODEL = "_base";

const log = logger("layerscale::dynamo::worker");

/** A start that cannot go on, in one line for people. */
class StartError extends Error {
  override name = "StartError";
}

/**
 * Runs a worker until SIGTERM or SIGINT, or until its engine fails.
 * @returns the exit code: 0 after a graceful stop, 1 after a failure
 * @throws UsageError for a choice this build does not serve; ModelError, EngineError from loading
 */
export async function runDynamo(config: DynamoConfig): Promise<number> {
  refuseUnbuilt(config);
  const stop = onStopSignal();
  try {
    // Loaded here, not above: a refused choice must not need the native library.
    const { loadEngine } = await import("../runtime/load-engine.ts");
    return await runWorker(config, stop, () => loadEngine(config.engine));
  } finally {
    stop.dispose();
  }
}

/** The lifecycle around any engine; `load` resolves when weights are loaded and warm-up has run. */
export async function runWorker(config: DynamoConfig, stop: StopSignal, load: () => Promise<LoadedWorker>): Promise<number> {
  const worker = new DynamoWorker(config, stop);
  try {
    return await worker.run(load);
  } catch (error) {
    if (!(error instanceof StartError || error instanceof DiscoveryError)) throw error;
    console.error(`error: ${error.message}`);
    return 1;
  } finally {
    await worker.release();
  }
}

const randomId = (): bigint => randomBytes(8).readBigUInt64BE() || 1n;

/** Waits for a promise; false when the time is over, or the signal is raised, first. */
async function within(promise: Promise<unknown>, ms: number, also?: AbortSignal): Promise<boolean> {
  let timer: ReturnType<typeof setTimeout> | undefined;
  const late = new Promise<boolean>((resolve) => {
    timer = setTimeout(() => resolve(false), also?.aborted ? 0 : ms);
    also?.addEventListener("abort", () => resolve(false), { once: true });
  });
  const result = await Promise.race([promise.then(() => true), late]);
  clearTimeout(timer);
  return result;
}

class DynamoWorker {
  readonly #endpoint: EndpointName;
  #discovery: Discovery | null = null;
  #system: SystemServer | null = null;
  #plane: TcpRequestPlane | null = null;
  #events: KvEventPlane | null = null;
  #engine: WorkerEngine | null = null;

  constructor(
    readonly config: DynamoConfig,
    readonly stop: StopSignal,
  ) {
    const { worker, environment } = config;
    const namespace = environment.namespaceSuffix === null ? worker.namespace : `${worker.namespace}-${environment.namespaceSuffix}`;
    this.#endpoint = { namespace, component: worker.component, endpoint: worker.endpoint };
  }

  async run(load: () => Promise<LoadedWorker>): Promise<number> {
    this.#checkTemplate();
    const discovery = (this.#discovery = this.#openDiscovery());
    const engineMetrics = new EngineMetrics({ version: VERSION });
    const metrics = new DynamoMetrics(this.#endpoint, discovery.instanceId);
    this.#system = this.#openSystemServer(async () => (await metrics.render()) + (await engineMetrics.render()));
    log.info("worker starts", { version: VERSION, instance: hexId(discovery.instanceId), ...this.#endpoint });

    const startedAt = performance.now();
    const loading = load();
    const loaded = await Promise.race([loading, this.stop.requested.then(() => null)]);
    if (loaded === null) {
      log.info("stopped while loading");
      void loading.then((late) => late.engine.stop()).catch(() => {});
      return 0;
    }
    const { engine, model, servedName } = loaded;
    this.#engine = engine;
    const failed = Promise.withResolvers<string>();
    let failure: string | null = null;
    engine.onFailure((error) => {
      failure = error.message;
      failed.resolve(error.message);
    });
    engineMetrics.setModel(servedName);
    engineMetrics.attach(engine);
    const names = { model: model.path, modelName: servedName };
    const loadSeconds = (performance.now() - startedAt) / 1000;
    metrics.attach(engine, names, { slots: engine.info.maxNumSeqs, loadSeconds, prefixCache: engine.info.prefixCache });

    const handler = new WorkHandler(
      generateHandler({
        engine,
        defaults: model.generation,
        stopDetector: (stops, skipSpecialTokens) => stopDetector(loaded.tokenizer, stops, skipSpecialTokens),
        metrics: engineMetrics,
        engineFailed: () => failure,
      }),
      metrics.endpoint(this.#endpoint.endpoint),
      () => metrics.rejected(),
    );
    await this.#join(loaded, handler, metrics);

    const ended = await Promise.race([this.stop.requested.then(() => null), failed.promise]);
    return ended === null ? this.#leave(handler, metrics) : this.#fail(handler, ended);
  }

  /** Closes what is still open; safe at any point, after any failure. */
  async release(): Promise<void> {
    await this.#discovery?.close().catch((error: unknown) => log.warn("discovery did not close", { error }));
    this.#events?.close();
    this.#plane?.close();
    if (this.#engine && !(await within(this.#engine.stop().catch((error: unknown) => log.warn("engine did not stop", { error })), ENGINE_STOP_MS)))
      log.warn("engine did not stop in time", { seconds: ENGINE_STOP_MS / 1000 });
    await this.#system?.close();
  }

  #checkTemplate(): void {
    const path = this.config.worker.customJinjaTemplate;
    if (path === null) return;
    const source = "--custom-jinja-template / DYN_CUSTOM_JINJA_TEMPLATE";
    try {
      accessSync(path, constants.R_OK);
    } catch (error) {
      throw new UsageError(`${source}: cannot read "${path}": ${(error as Error).message}`);
    }
    // Reading a fifo would wait for a writer, through any signal.
    if (!statSync(path).isFile()) throw new UsageError(`${source}: expected a regular file, got "${path}"`);
  }

  #openDiscovery(): Discovery {
    const { discoveryBackend, fileKv } = this.config.environment;
    return discoveryBackend === "file" ? new FileDiscovery(fileKv, randomId()) : new MemoryDiscovery(randomId());
  }

  #openSystemServer(metrics: () => Promise<string>): SystemServer | null {
    const { systemPort: port, systemHost: host, systemHealthPath: healthPath, systemLivePath: livePath } = this.config.environment;
    if (port === null) return null;
    try {
      return new SystemServer({ host, port, healthPath, livePath, endpoint: this.#endpoint.endpoint, metrics });
    } catch (error) {
      throw new StartError(`DYN_SYSTEM_PORT: cannot listen on ${host}:${port}: ${(error as Error).message}`);
    }
  }

  async #listen(): Promise<TcpRequestPlane> {
    const { tcpRpcHost, tcpRpcPort: port, tcpMaxMessageSize: maxMessageSize } = this.config.environment;
    const host = (tcpRpcHost ?? localAddress()).replace(/^\[(.*)\]$/, "$1");
    try {
      return await TcpRequestPlane.listen({ host, port, maxMessageSize });
    } catch (error) {
      throw new StartError(`DYN_TCP_RPC_HOST, DYN_TCP_RPC_PORT: cannot listen on ${host}:${port}: ${(error as Error).message}`);
    }
  }

  /** Listens, then registers; the instance record, which makes the worker routable, comes last. */
  async #join(loaded: LoadedWorker, handler: WorkHandler, metrics: DynamoMetrics): Promise<void> {
    const discovery = this.#discovery!;
    const { engine, model, servedName } = loaded;
    const { worker, environment } = this.config;
    const id = discovery.instanceId;
    const device = engine.info.device.startsWith("cuda") ? "cuda" : "cpu";
    const plane = (this.#plane = await this.#listen());
    const at = (name: EndpointName) => instance(name, id, plane.address(endpointPath(name, id)), device, environment.requestPlaneCodec);
    plane.register(endpointPath(this.#endpoint, id), handler.accept);

    this.#events = await KvEventPlane.start({ engine, plane, host: plane.host, endpoint: this.#endpoint, workerId: id, metrics, instance: at });
    for (const record of this.#events.records) await discovery.add(record);
    const filesPath = ["/v1/metadata", this.#endpoint.namespace, this.#endpoint.component, this.#endpoint.endpoint, slug(servedName), BASE_MODEL].join("/");
    const base = environment.selfHostMetadata && this.#system ? `${this.#system.baseUrl}${filesPath}` : null;
    const { card, served } = await modelCard({
      servedName,
      sourcePath: model.path,
      files: model.assets.materialize(""),
      architecturalContext: model.spec.maxContext,
      engine: engine.info,
      options: worker,
      publishesKvEvents: engine.info.prefixCache,
      url: base === null ? null : (name) => `${base}/${encodeURIComponent(name)}`,
    });
    this.#system?.serveFiles(filesPath, served);
    const key = endpointKey(this.#endpoint, id);
    await refuseConflict(discovery, this.#endpoint, key, card);
    await discovery.add(modelRecord(this.#endpoint, id, card));
    // Again, now that others see the record: of two that start together at least one notices.
    await refuseConflict(discovery, this.#endpoint, key, card);
    await discovery.add(instanceRecord(this.#endpoint, at(this.#endpoint)));
    if (this.#system) this.#system.state = "ready";
    log.info("worker ready", { model: servedName, address: plane.address(endpointPath(this.#endpoint, id)), contextLength: engine.info.contextLength, pages: engine.info.pages });
  }

  /** Leaves discovery first, serves what is open and what still arrives through the grace time, then ends the rest. */
  async #leave(handler: WorkHandler, metrics: DynamoMetrics): Promise<number> {
    const discovery = this.#discovery!;
    if (this.#system) this.#system.state = "stopping";
    const key = endpointKey(this.#endpoint, discovery.instanceId);
    await discovery.remove("v1/instances", key);
    await discovery.remove("v1/mdc", key);
    await discovery.close();
    const graceMs = this.config.environment.gracePeriodSeconds * 1000;
    log.info("worker left discovery", { graceSeconds: graceMs / 1000, inFlight: handler.inFlight });
    await within(new Promise<never>(() => {}), graceMs, this.stop.hurry);
    const drainAt = performance.now();
    const cut = handler.inFlight;
    const ended = await handler.stop("the worker is shutting down", DRAIN_MS);
    const drained = await this.#engine!.drain(DRAIN_MS);
    metrics.drained((performance.now() - drainAt) / 1000);
    log.info("worker stopped", { cutStreams: cut, streamsEnded: ended, engineIdle: drained });
    return 0;
  }

  /** The engine is gone: every stream ends with an error that another worker may continue from. */
  async #fail(handler: WorkHandler, reason: string): Promise<number> {
    log.error("engine failed, worker exits", { reason });
    if (this.#system) this.#system.state = "stopping";
    await this.#discovery!.close();
    await handler.stop(`engine failure: ${reason}`, DRAIN_MS);
    return 1;
  }
}

/** Text of an answer, as the frontend will make it, watched for stop strings. */
function stopDetector(tokenizer: Tokenizer, stops: readonly string[], skipSpecialTokens: boolean): StopDetector {
  const detokenizer = new Detokenizer(tokenizer, { skipSpecialTokens });
  const matcher = new StopMatcher(stops);
  return { push: (ids) => matcher.push(detokenizer.push(ids)).matched !== null };
}
