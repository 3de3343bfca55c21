import { Counter, Gauge, Histogram, Registry } from "prom-client";
import type { EngineStats } from "../../engine/types.ts";
import type { FinishedSample, MetricsSource } from "../../telemetry/metrics.ts";
import type { WorkMetrics } from "../request-plane/work-handler.ts";
import { type EndpointName, hexId } from "../discovery/records.ts";

const DURATION_BUCKETS = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300, 600];
const TRANSIT_BUCKETS = [0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1];
const FIRST_RESPONSE_BUCKETS = [0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60];
const PERMIT_BUCKETS = [0.0001, 0.001, 0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30, 60];
/** Requests over which the hit rate is taken. */
const HIT_RATE_WINDOW = 1000;

const ENDPOINT_LABELS = ["dynamo_namespace", "dynamo_component", "dynamo_endpoint", "worker_id"] as const;
const MODEL_LABELS = [...ENDPOINT_LABELS, "model", "model_name"] as const;
const RANK_LABELS = [...MODEL_LABELS, "dp_rank"] as const;

export interface ModelNames {
  /** Path or id the engine loaded. */
  model: string;
  /** Name clients send. */
  modelName: string;
}

/** Dynamo's own families, with the names, labels and help of Dynamo 1.5.0. Families without a sample are not shown. */
export class DynamoMetrics {
  readonly registry = new Registry();
  readonly #registers = [this.registry];
  readonly #labels: Record<(typeof ENDPOINT_LABELS)[number], string>;
  #names: ModelNames | null = null;
  /** Samples are kept under the first id; the text tells the present one. */
  #shownId: string;
  #source: Pick<MetricsSource, "stats"> | null = null;
  /** Bytes sent since the last reading: a labelled counter costs too much for every token. */
  readonly #unreadBytes = new Map<string, { labels: Record<(typeof ENDPOINT_LABELS)[number], string>; bytes: number }>();
  readonly #hits: { cached: number; prompt: number }[] = [];
  readonly #hitSum = { cached: 0, prompt: 0 };

  readonly #requests;
  readonly #duration;
  readonly #requestBytes;
  readonly #responseBytes;
  readonly #inflight;
  readonly #cancelled;
  #errors: Counter | null = null;
  readonly #transit;
  readonly #firstResponse;
  readonly #permitWait;
  #cleanupTime: Gauge | null = null;
  #drainTime: Gauge | null = null;

  constructor(
    endpoint: EndpointName,
    readonly workerId: bigint,
  ) {
    this.#shownId = hexId(workerId);
    const registers = this.#registers;
    const labelNames = ENDPOINT_LABELS;
    this.#labels = { dynamo_namespace: endpoint.namespace, dynamo_component: endpoint.component, dynamo_endpoint: endpoint.endpoint, worker_id: hexId(workerId) };
    this.#requests = new Counter({ name: "dynamo_component_requests_total", help: "Total number of requests processed by work handler", labelNames, registers });
    this.#duration = new Histogram({ name: "dynamo_component_request_duration_seconds", help: "Time spent processing requests by work handler", labelNames, buckets: DURATION_BUCKETS, registers });
    this.#requestBytes = new Counter({ name: "dynamo_component_request_bytes_total", help: "Total number of bytes received in requests by work handler", labelNames, registers });
    const unread = this.#unreadBytes;
    this.#responseBytes = new Counter({
      name: "dynamo_component_response_bytes_total",
      help: "Total number of bytes sent in responses by work handler",
      labelNames,
      registers,
      collect() {
        for (const counted of unread.values()) {
          this.inc(counted.labels, counted.bytes);
          counted.bytes = 0;
        }
      },
    });
    this.#inflight = new Gauge({ name: "dynamo_component_inflight_requests", help: "Number of requests currently being processed by work handler", labelNames, registers });
    this.#cancelled = new Counter({ name: "dynamo_component_cancellation_total", help: "Total number of requests cancelled by work handler", labelNames, registers });
    const startedAt = performance.now();
    const worker = { worker_id: hexId(workerId) };
    new Gauge({
      name: "dynamo_component_uptime_seconds",
      help: "Total uptime of the DistributedRuntime in seconds",
      labelNames: ["worker_id"] as const,
      registers,
      collect() {
        this.set(worker, (performance.now() - startedAt) / 1000);
      },
    });
    this.#transit = new Histogram({ name: "dynamo_work_handler_network_transit_seconds", help: "Frontend-to-backend network transit time (cross-process wall-clock, seconds)", buckets: TRANSIT_BUCKETS, registers });
    this.#firstResponse = new Histogram({ name: "dynamo_work_handler_time_to_first_response_seconds", help: "Backend processing time from handle_payload entry to prologue sent (seconds)", buckets: FIRST_RESPONSE_BUCKETS, registers });
    this.#permitWait = new Histogram({ name: "dynamo_work_handler_permit_wait_seconds", help: "Time spent waiting for a worker-pool permit (seconds)", buckets: PERMIT_BUCKETS, registers });
    this.#rejected = new Counter({ name: "dynamo_work_handler_enqueue_rejected_total", help: "Times enqueuing work failed because the dispatcher channel was closed", registers });
    this.#overloaded = new Counter({ name: "dynamo_rejection_request_total", help: "Requests rejected because the worker is at capacity (engine in-flight limit and Dynamo queue both full)", registers });
    // Stays 0: events come from the engine itself, in order, so none can be missed before they are published.
    new Counter({
      name: "dynamo_component_kv_publisher_engines_dropped_events_total",
      help: "Total number of raw events dropped by engines before reaching publisher (detected via event_id gaps)",
      labelNames: ["dynamo_namespace", "dynamo_component", "worker_id"] as const,
      registers,
    }).inc({ dynamo_namespace: endpoint.namespace, dynamo_component: endpoint.component, ...worker }, 0);
  }
  readonly #rejected;
  readonly #overloaded;

  /** A request was turned away before it was accepted: no room, or the worker stops. */
  rejected(why: "capacity" | "closed"): void {
    (why === "capacity" ? this.#overloaded : this.#rejected).inc();
  }

  /** The request metrics of one endpoint; its series exist from now on. */
  endpoint(name: string): WorkMetrics {
    const labels = { ...this.#labels, dynamo_endpoint: name };
    for (const counter of [this.#requests, this.#requestBytes, this.#responseBytes, this.#cancelled]) counter.inc(labels, 0);
    this.#inflight.set(labels, 0);
    this.#duration.zero(labels);
    const unread = { labels, bytes: 0 };
    this.#unreadBytes.set(name, unread);
    /** A request that outlives its endpoint brings no series back. */
    const counts = () => this.#unreadBytes.get(name) === unread;
    return {
      received: (bytes, transit) => {
        if (!counts()) return;
        this.#requests.inc(labels);
        this.#requestBytes.inc(labels, bytes);
        this.#inflight.inc(labels);
        if (transit !== null) this.#transit.observe(transit);
      },
      answered: (seconds) => this.#firstResponse.observe(seconds),
      sent: (bytes) => void (unread.bytes += bytes),
      cancelled: () => {
        if (counts()) this.#cancelled.inc(labels);
      },
      failed: (type) => {
        if (!counts()) return;
        this.#errors ??= new Counter({
          name: "dynamo_component_errors_total",
          help: "Total number of errors in work handler processing",
          labelNames: [...ENDPOINT_LABELS, "error_type"] as const,
          registers: this.#registers,
        });
        this.#errors.inc({ ...labels, error_type: type });
      },
      done: (seconds) => {
        if (!counts()) return;
        this.#inflight.dec(labels);
        this.#duration.observe(labels, seconds);
      },
    };
  }

  /** Takes an endpoint's series away: endpoints that carry an identity in their name go with it, else each new identity would add series for ever. */
  forget(name: string): void {
    const labels = this.#unreadBytes.get(name)?.labels;
    if (labels === undefined) return;
    this.#unreadBytes.delete(name);
    for (const family of [this.#requests, this.#requestBytes, this.#responseBytes, this.#cancelled, this.#inflight, this.#duration]) family.remove(labels);
  }

  /** The engine is loaded: pool, queue and model families appear. */
  attach(engine: MetricsSource, names: ModelNames, limits: { slots: number; capacity: number; loadSeconds: number; prefixCache: boolean }): () => void {
    this.#names = names;
    this.#source = engine;
    const registers = this.#registers;
    const model = { ...this.#labels, model: names.model, model_name: names.modelName };
    const rank = { ...model, dp_rank: "0" };
    new Gauge({ name: "dynamo_component_model_load_time_seconds", help: "Time engine.start() took to return. Set once at Worker setup.", labelNames: MODEL_LABELS, registers }).set(model, limits.loadSeconds);
    this.#cleanupTime = new Gauge({ name: "dynamo_component_cleanup_time_seconds", help: "Time spent releasing engine resources during shutdown. Set by the framework once after engine.cleanup() returns.", labelNames: MODEL_LABELS, registers });
    this.#cleanupTime.set(model, 0);
    this.#drainTime = new Gauge({ name: "dynamo_component_drain_time_seconds", help: "Time spent draining in-flight work before cleanup. Stays at 0 for engines without a drain hook.", labelNames: MODEL_LABELS, registers });
    this.#drainTime.set(model, 0);
    this.#rankGauge("dynamo_component_total_blocks", "Total number of KV cache blocks available on the worker.", rank, (s) => s.pagesTotal);
    this.#rankGauge("dynamo_component_gpu_cache_usage_percent", "GPU cache usage as a percentage (0.0-1.0).", rank, (s) => s.pagesHeld / Math.max(1, s.pagesTotal));
    this.#processGauge("dynamo_work_handler_queue_depth", "Current items in the bounded work queue awaiting dispatcher pickup", () => engine.stats().waiting);
    this.#processGauge("dynamo_work_handler_queue_capacity", "Configured capacity of the bounded work queue", () => Math.max(0, limits.capacity - limits.slots));
    this.#processGauge("dynamo_work_handler_pool_active_tasks", "Current number of active worker-pool tasks (permits in use)", () => engine.stats().running);
    this.#processGauge("dynamo_work_handler_pool_capacity", "Configured worker-pool capacity (total permits)", () => limits.slots);
    this.#processGauge("dynamo_engine_request", "Current number of requests being handled by the engine (--engine-request-limit)", () => engine.stats().running);
    this.#processGauge("dynamo_request_queue", "Current number of requests queued in Dynamo not yet in the engine (--dynamo-request-queue-limit)", () => engine.stats().waiting);
    let hitRate: Gauge | null = null;
    return engine.onFinish((request) => {
      if (request.internal) return;
      if (request.queuedMs !== null) this.#permitWait.observe(request.queuedMs / 1000);
      if (!limits.prefixCache || request.usage.promptTokens === 0 || request.queuedMs === null) return;
      hitRate ??= new Gauge({ name: "dynamo_component_kv_cache_hit_rate", help: "Prefix cache hit rate (0.0-1.0). Portable across engines.", labelNames: RANK_LABELS, registers });
      hitRate.set(rank, this.#hitRate(request));
    });
  }

  drained(seconds: number): void {
    if (this.#names) this.#drainTime?.set({ ...this.#labels, model: this.#names.model, model_name: this.#names.modelName }, seconds);
  }
  /** Slots, pages and weights are given back. */
  cleaned(seconds: number): void {
    if (this.#names) this.#cleanupTime?.set({ ...this.#labels, model: this.#names.model, model_name: this.#names.modelName }, seconds);
  }

  /** The worker goes by another id from now on; what was counted stays counted. */
  rename(workerId: bigint): void {
    this.#shownId = hexId(workerId);
  }

  async render(): Promise<string> {
    const text = await this.registry.metrics();
    const first = hexId(this.workerId);
    return first === this.#shownId ? text : text.replaceAll(`worker_id="${first}"`, `worker_id="${this.#shownId}"`);
  }

  /** Cached share of the prompt tokens of the latest requests. */
  #hitRate(request: FinishedSample): number {
    const latest = { cached: request.usage.cachedTokens, prompt: request.usage.promptTokens };
    const oldest = this.#hits.push(latest) > HIT_RATE_WINDOW ? this.#hits.shift()! : { cached: 0, prompt: 0 };
    this.#hitSum.cached += latest.cached - oldest.cached;
    this.#hitSum.prompt += latest.prompt - oldest.prompt;
    return this.#hitSum.prompt === 0 ? 0 : this.#hitSum.cached / this.#hitSum.prompt;
  }
  #rankGauge(name: string, help: string, labels: Record<(typeof RANK_LABELS)[number], string>, read: (stats: EngineStats) => number): void {
    const source = () => this.#source?.stats();
    new Gauge({
      name,
      help,
      labelNames: RANK_LABELS,
      registers: this.#registers,
      collect() {
        const stats = source();
        this.set(labels, stats === undefined ? 0 : read(stats));
      },
    });
  }
  #processGauge(name: string, help: string, read: () => number): void {
    new Gauge({
      name,
      help,
      registers: this.#registers,
      collect() {
        this.set(read());
      },
    });
  }
}
