import type { DynamoConfig } from "../config/engine-config.ts";
import type { TransferReport } from "../engine/types.ts";
import { VERSION } from "../config/version.ts";
import { logger, setLogFilter } from "../telemetry/log.ts";
import { EngineMetrics } from "../telemetry/metrics.ts";
import { onStopSignal, type StopSignal } from "../util/signals.ts";
import { within } from "../util/within.ts";
import { type Discovery, DiscoveryError } from "./discovery/discovery.ts";
import { openDiscovery } from "./discovery/open.ts";
import { type EndpointName, hexId } from "./discovery/records.ts";
import { refuseRecurrent } from "./disaggregation/recurrent.ts";
import { openRole } from "./disaggregation/role.ts";
import { copiesGone, logTransfer, transferOptions } from "./disaggregation/transfer.ts";
import { openEventPlane } from "./event-plane/open.ts";
import type { EventPlane } from "./event-plane/topic-publisher.ts";
import { generateHandler, ROUTE } from "./handler.ts";
import { Health } from "./health/health.ts";
import { Membership } from "./membership.ts";
import { modelCard } from "./registration/card.ts";
import { checkTemplate } from "./registration/custom-template.ts";
import { slug } from "./registration/slug.ts";
import { openRequestPlane } from "./request-plane/open.ts";
import { PlaneError, type RequestPlane } from "./request-plane/request-plane.ts";
import { MAX_IN_FLIGHT, WorkHandler } from "./request-plane/work-handler.ts";
import { ReloadableEngine } from "./rl/reloadable-engine.ts";
import { Serving } from "./serving.ts";
import { stopDetector } from "./stop-detector.ts";
import { EngineRoutes } from "./system-server/engine-routes.ts";
import { DynamoMetrics } from "./system-server/metrics.ts";
import { SystemServer } from "./system-server/server.ts";
import { refuseUnbuilt } from "./unbuilt.ts";
import type { ControlledEngine, LoadedWorker, WorkerEngine } from "./worker-engine.ts";

export type { LoadedWorker, WorkerEngine } from "./worker-engine.ts";

/** Time for the last items of streams that end at a stop, and for the engine to give its pages back. */
const DRAIN_MS = 5_000;
const ENGINE_STOP_MS = 10_000;
/** From SIGTERM until a prefill worker gives up copies that nobody has fetched: it has left within the 30 s that stop timeouts allow. */
const COPIES_MS = 28_000;
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
  setLogFilter(config.environment.log.filter);
  refuseUnbuilt(config);
  refuseRecurrent(config, config.engine.model);
  const stop = onStopSignal();
  try {
    // Loaded here, not above: a refused choice must not need the native library.
    const { loadEngine, openConfiguredModel } = await import("../runtime/load-engine.ts");
    return await runWorker(config, stop, async () => {
      const opened = await openConfiguredModel(config.engine, stop.asked, (directory) => refuseRecurrent(config, directory));
      // A .gguf file has no settings to look at before it is there.
      refuseRecurrent(config, opened.model.path);
      return loadEngine(config.engine, opened, transferOptions(config));
    });
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
    if (!(error instanceof StartError || error instanceof DiscoveryError || error instanceof PlaneError)) throw error;
    console.error(`error: ${error.message}`);
    return 1;
  } finally {
    await worker.release();
  }
}

class DynamoWorker {
  readonly #endpoint: EndpointName;
  readonly #health: Health;
  readonly #routes = new EngineRoutes();
  #discovery: Discovery | null = null;
  #system: SystemServer | null = null;
  #plane: RequestPlane | null = null;
  #eventPlane: EventPlane | null = null;
  #membership: Membership | null = null;
  #engine: WorkerEngine | null = null;
  #serving: Serving | null = null;
  #metrics: DynamoMetrics | null = null;

  constructor(
    readonly config: DynamoConfig,
    readonly stop: StopSignal,
  ) {
    const { worker, environment } = config;
    const namespace = environment.namespaceSuffix === null ? worker.namespace : `${worker.namespace}-${environment.namespaceSuffix}`;
    this.#health = new Health(environment.endpointHealth);
    this.#endpoint = { namespace, component: worker.component, endpoint: worker.endpoint };
  }

  async run(load: () => Promise<LoadedWorker>): Promise<number> {
    const { environment, worker } = this.config;
    checkTemplate(worker.customJinjaTemplate);
    if (environment.log.ignored.length > 0) log.warn("DYN_LOG: selectors of spans and fields have no effect", { directives: environment.log.ignored });
    if (environment.otelExport) log.warn("OTEL_EXPORT_ENABLED has no effect: traces are not exported");
    const discovery = (this.#discovery = await this.#openDiscovery());
    if (discovery === null) return 0;
    const engineMetrics = new EngineMetrics({ version: VERSION });
    const metrics = (this.#metrics = new DynamoMetrics(this.#endpoint, discovery.instanceId));
    this.#system = this.#openSystemServer(async () => (await metrics.render()) + (await engineMetrics.render()));
    log.info("worker starts", { version: VERSION, instance: hexId(discovery.instanceId), ...this.#endpoint });

    // Before the load, which takes long: an address in use or a missing broker is told at once.
    if (!(await this.#openPlanes())) return 0;

    const startedAt = performance.now();
    const loading = load();
    const loaded = await Promise.race([loading, this.stop.requested.then(() => null)]);
    if (loaded === null) {
      log.info("stopped while loading");
      void loading.then((late) => late.engine.stop()).catch(() => {});
      return 0;
    }
    const { model, servedName } = loaded;
    const engine = worker.enableRl && loaded.weights ? new ReloadableEngine(loaded.engine as ControlledEngine) : loaded.engine;
    this.#engine = engine;
    const failed = Promise.withResolvers<string>();
    let failure: string | null = null;
    engine.onFailure((error) => {
      failure = error.message;
      failed.resolve(error.message);
    });
    engineMetrics.setModel(servedName);
    engineMetrics.declareRoute(ROUTE);
    engineMetrics.attach(engine);
    const names = { model: model.path, modelName: servedName };
    const loadSeconds = (performance.now() - startedAt) / 1000;
    const { engineRequestLimit, requestQueueLimit } = environment;
    const capacity = engineRequestLimit === null ? MAX_IN_FLIGHT : engineRequestLimit + requestQueueLimit;
    metrics.attach(engine, names, { slots: engine.info.maxNumSeqs, capacity, loadSeconds, prefixCache: engine.info.prefixCache });

    const report = (transfer: TransferReport) => {
      engineMetrics.transfer.ended(transfer);
      logTransfer(transfer);
    };
    engine.onTransfer(report);
    const role = openRole(worker.disaggregationMode, engine, transferOptions(this.config)?.host ?? null, report);
    const work = generateHandler({
      engine,
      defaults: model.generation,
      role,
      stopDetector: (stops, skipSpecialTokens) => stopDetector(loaded.tokenizer, stops, skipSpecialTokens),
      metrics: engineMetrics,
      engineFailed: () => failure,
    });
    const handler = new WorkHandler(work, metrics.endpoint(this.#endpoint.endpoint), (why) => metrics.rejected(why), capacity, worker.disaggregationMode === "decode" ? (body) => role.abandoned(body) : null);
    const card = await this.#join({ ...loaded, engine }, handler, metrics);
    const membership = this.#membership!;
    if (this.#system)
      this.#serving = await Serving.open({
        config: this.config, endpoint: this.#endpoint, loaded, engine, work, handler, metrics, membership, card, system: this.#system, health: this.#health, routes: this.#routes,
      });
    const transport = this.#plane!.transport(this.#endpoint, membership.instanceId);
    log.info("worker ready", { model: servedName, transport, contextLength: engine.info.contextLength, pages: engine.info.pages });

    const ended = await Promise.race([this.stop.requested.then(() => null), failed.promise]);
    return ended === null ? this.#leave(handler, metrics) : this.#fail(handler, ended);
  }

  /** Closes what is still open; safe at any point, after any failure. */
  async release(): Promise<void> {
    await this.#discovery?.close().catch((error: unknown) => log.warn("discovery did not close", { error }));
    await this.#membership?.close();
    await this.#eventPlane?.close();
    await this.#plane?.close();
    const cleanupAt = performance.now();
    if (this.#engine && !(await within(this.#engine.stop().catch((error: unknown) => log.warn("engine did not stop", { error })), ENGINE_STOP_MS)))
      log.warn("engine did not stop in time", { seconds: ENGINE_STOP_MS / 1000 });
    this.#metrics?.cleaned((performance.now() - cleanupAt) / 1000);
    await this.#system?.close();
  }

  #openDiscovery(): Promise<Discovery | null> {
    return this.#unlessStopped(openDiscovery(this.config));
  }

  /** @returns false when the worker is stopped before */
  async #openPlanes(): Promise<boolean> {
    const { environment } = this.config;
    this.#plane = await this.#unlessStopped(openRequestPlane(environment));
    if (this.#plane === null) return false;
    this.#eventPlane = await this.#unlessStopped(openEventPlane(environment, this.#plane.host));
    return this.#eventPlane !== null;
  }

  /** What is being opened; null, with nothing left open, when the worker is stopped before. */
  async #unlessStopped<T extends { close(): Promise<void> }>(opening: Promise<T>): Promise<T | null> {
    const opened = await Promise.race([opening, this.stop.requested.then(() => null)]);
    if (opened === null) void opening.then((late) => late.close()).catch(() => {});
    return opened;
  }

  #openSystemServer(metrics: () => Promise<string>): SystemServer | null {
    const { systemPort: port, systemHost: host, systemHealthPath: healthPath, systemLivePath: livePath } = this.config.environment;
    if (port === null) return null;
    const discovery = this.#discovery;
    try {
      return new SystemServer({ host, port, healthPath, livePath, health: this.#health, routes: this.#routes, metrics, ...(discovery?.metadata && { metadata: () => discovery.metadata!() }) });
    } catch (error) {
      throw new StartError(`DYN_SYSTEM_HOST, DYN_SYSTEM_PORT: cannot listen on ${host}:${port}: ${(error as Error).message}`);
    }
  }

  /** @returns the model's record as registered */
  async #join(loaded: LoadedWorker, handler: WorkHandler, metrics: DynamoMetrics): Promise<Record<string, unknown>> {
    const { engine } = loaded;
    const card = await this.#card(loaded);
    const { environment } = this.config;
    const plane = this.#plane!;
    this.#membership = await Membership.join({
      discovery: this.#discovery!,
      plane,
      events: this.#eventPlane!,
      engine,
      metrics,
      endpoint: this.#endpoint,
      accept: handler.accept,
      card,
      codec: environment.requestPlaneCodec,
      graceMs: environment.gracePeriodSeconds * 1000,
    });
    return card;
  }

  /** The model's record; its files are served from now on. */
  async #card({ engine, model, servedName, source }: LoadedWorker): Promise<Record<string, unknown>> {
    const { worker, environment } = this.config;
    const filesPath = ["/v1/metadata", this.#endpoint.namespace, this.#endpoint.component, this.#endpoint.endpoint, slug(servedName), BASE_MODEL].join("/");
    const base = environment.selfHostMetadata && this.#system ? `${this.#system.baseUrl}${filesPath}` : null;
    const { card, served } = await modelCard({
      servedName,
      sourcePath: source ?? model.path,
      files: model.assets.materialize(""),
      architecturalContext: model.spec.maxContext,
      engine: engine.info,
      options: worker,
      stableRoutingId: environment.stableRoutingId,
      publishesKvEvents: engine.info.prefixCache,
      url: base === null ? null : (name) => `${base}/${encodeURIComponent(name)}`,
    });
    this.#system?.serveFiles(filesPath, served);
    return card;
  }

  /** Leaves discovery first, serves what is open and what still arrives through the grace time, then ends the rest. */
  async #leave(handler: WorkHandler, metrics: DynamoMetrics): Promise<number> {
    const leaveAt = performance.now();
    this.#serving?.stop();
    await this.#membership!.leave();
    const graceMs = this.config.environment.gracePeriodSeconds * 1000;
    log.info("worker left discovery", { graceSeconds: graceMs / 1000, inFlight: handler.inFlight });
    await within(new Promise<never>(() => {}), graceMs, this.stop.hurry);
    const drainAt = performance.now();
    const cut = handler.inFlight;
    const ended = await handler.stop("the worker is shutting down", DRAIN_MS);
    const drained = await this.#engine!.drain(DRAIN_MS);
    if (!(await copiesGone(this.#engine!, COPIES_MS - (performance.now() - leaveAt), this.stop.hurry)))
      log.warn("staged KV is given up", { copies: this.#engine!.stats().transfer?.staged });
    metrics.drained((performance.now() - drainAt) / 1000);
    log.info("worker stopped", { cutStreams: cut, streamsEnded: ended, engineIdle: drained });
    return 0;
  }

  /** The engine is gone: every stream ends with an error that another worker may continue from. */
  async #fail(handler: WorkHandler, reason: string): Promise<number> {
    log.error("engine failed, worker exits", { reason });
    this.#serving?.stop();
    await this.#membership!.leave();
    await handler.stop(`engine failure: ${reason}`, DRAIN_MS);
    return 1;
  }
}
