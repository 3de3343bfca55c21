import { expect, test } from "bun:test";
import type { EngineStats } from "../../../src/engine/types.ts";
import { EngineMetrics, outcomeOf, type FinishedSample, type MetricsSource, type StepSample } from "../../../src/telemetry/metrics.ts";

class Source implements MetricsSource {
  now: EngineStats = { running: 2, waiting: 3, pagesTotal: 100, pagesFree: 60, pagesCached: 30, pagesHeld: 10, steps: 7, preemptions: 1, evictions: 4, stalls: 0, promptTokensComputed: 0, transfer: null };
  finish: ((request: FinishedSample) => void)[] = [];
  step: ((step: StepSample) => void)[] = [];
  stats = () => this.now;
  onFinish(listener: (request: FinishedSample) => void) {
    this.finish.push(listener);
    return () => void (this.finish = this.finish.filter((other) => other !== listener));
  }
  onStep(listener: (step: StepSample) => void) {
    this.step.push(listener);
    return () => void (this.step = this.step.filter((other) => other !== listener));
  }
  ended(overrides: Partial<FinishedSample> = {}) {
    const request: FinishedSample = { finishReason: "stop", usage: { promptTokens: 20, completionTokens: 5, cachedTokens: 16 }, internal: false, queuedMs: 2, ttftMs: 30, durationMs: 100, ...overrides };
    for (const listener of this.finish) listener(request);
  }
}

/** Series → value, and family → type. */
async function scrape(metrics: EngineMetrics) {
  const text = await metrics.render();
  const values = new Map<string, number>();
  const types = new Map<string, string>();
  for (const line of text.split("\n").filter((candidate) => candidate !== "")) {
    if (line.startsWith("# TYPE ")) types.set(line.split(" ")[2] as string, line.split(" ")[3] as string);
    else if (!line.startsWith("#")) values.set(line.slice(0, line.lastIndexOf(" ")), Number(line.slice(line.lastIndexOf(" ") + 1)));
  }
  return { text, values, types };
}

test("every family exists before an engine does, with its type", async () => {
  const { types, values } = await scrape(new EngineMetrics({ version: "1.2.3", model: "m" }));
  expect(Object.fromEntries(types)).toEqual({
    layerscale_requests_total: "counter",
    layerscale_requests_running: "gauge",
    layerscale_requests_queued: "gauge",
    layerscale_prompt_tokens_total: "counter",
    layerscale_generated_tokens_total: "counter",
    layerscale_prefix_cached_tokens_total: "counter",
    layerscale_time_to_first_token_seconds: "histogram",
    layerscale_inter_token_latency_seconds: "histogram",
    layerscale_request_duration_seconds: "histogram",
    layerscale_queue_time_seconds: "histogram",
    layerscale_kv_pages: "gauge",
    layerscale_kv_pages_free: "gauge",
    layerscale_kv_pages_cached: "gauge",
    layerscale_kv_pages_held: "gauge",
    layerscale_kv_transfers_staged: "gauge",
    layerscale_kv_transfer_staged_bytes: "gauge",
    layerscale_kv_transfers_filling: "gauge",
    layerscale_kv_transfers_pulling: "gauge",
    layerscale_kv_transfer_copies_total: "counter",
    layerscale_kv_transfer_overloads_total: "counter",
    layerscale_kv_transfer_pulls_total: "counter",
    layerscale_kv_transfer_fallbacks_total: "counter",
    layerscale_kv_transfer_bytes_total: "counter",
    layerscale_kv_transfer_seconds: "histogram",
    layerscale_prompt_tokens_computed_total: "counter",
    layerscale_steps_total: "counter",
    layerscale_preemptions_total: "counter",
    layerscale_stalls_total: "counter",
    layerscale_evictions_total: "counter",
    layerscale_build_info: "gauge",
    layerscale_uptime_seconds: "gauge",
  });
  // A family without a sample is a name that nobody can graph; routes and statuses are known only when requests come.
  for (const name of types.keys()) if (name !== "layerscale_requests_total") expect([name, [...values.keys()].some((series) => series.startsWith(name))]).toEqual([name, true]);
  expect(values.get("layerscale_kv_pages")).toBe(0);
  expect(values.get('layerscale_build_info{version="1.2.3",model="m"}')).toBe(1);
});

test("gauges and counters follow the engine's snapshot, also over several scrapes", async () => {
  const metrics = new EngineMetrics({ version: "1", model: "m" });
  const source = new Source();
  const detach = metrics.attach(source);
  for (const steps of [7, 7, 12]) {
    source.now = { ...source.now, steps, stalls: steps - 7 };
    const { values } = await scrape(metrics);
    expect(values.get("layerscale_steps_total")).toBe(steps);
    expect(values.get("layerscale_stalls_total")).toBe(steps - 7);
    expect(values.get("layerscale_requests_running")).toBe(2);
    expect(values.get("layerscale_requests_queued")).toBe(3);
    const pages = (suffix: string) => values.get(`layerscale_kv_pages${suffix}`) as number;
    expect(pages("_free") + pages("_cached") + pages("_held")).toBe(pages(""));
  }
  detach();
  expect([source.finish.length, source.step.length]).toEqual([0, 0]);
  expect((await scrape(metrics)).values.get("layerscale_requests_running")).toBe(0);
});

test("ended sequences feed tokens and latencies; internal ones and moments that never came do not", async () => {
  const metrics = new EngineMetrics({ version: "1", model: "m" });
  const source = new Source();
  metrics.attach(source);
  source.ended();
  source.ended({ finishReason: "cancelled", queuedMs: null, ttftMs: null, usage: { promptTokens: 7, completionTokens: 0, cachedTokens: 0 } });
  source.ended({ internal: true });
  for (const listener of source.step) listener({ stats: source.now, interTokenMs: [4, 12] });
  const { values } = await scrape(metrics);
  expect(values.get("layerscale_prompt_tokens_total")).toBe(27);
  expect(values.get("layerscale_generated_tokens_total")).toBe(5);
  expect(values.get("layerscale_prefix_cached_tokens_total")).toBe(16);
  expect(values.get("layerscale_time_to_first_token_seconds_count")).toBe(1);
  expect(values.get('layerscale_time_to_first_token_seconds_bucket{le="0.02"}')).toBe(0);
  expect(values.get('layerscale_time_to_first_token_seconds_bucket{le="0.04"}')).toBe(1);
  expect(values.get("layerscale_queue_time_seconds_count")).toBe(1);
  expect(values.get("layerscale_request_duration_seconds_count")).toBe(2);
  expect(values.get("layerscale_inter_token_latency_seconds_count")).toBe(2);
  expect(values.get("layerscale_inter_token_latency_seconds_sum")).toBeCloseTo(0.016, 9);
  expect(metrics.totals()).toMatchObject({ promptTokens: 27, generatedTokens: 5, prefixCachedTokens: 16, started: 0 });
});

test("requests are counted by their caller, or by the engine's endings when a route is given", async () => {
  const own = new EngineMetrics({ version: "1" });
  own.setModel("late \"name\"");
  own.declareRoute("chat");
  own.attach(new Source());
  own.startRequest();
  own.countRequest("chat", "ok");
  const counted = await scrape(own);
  expect(counted.values.get('layerscale_requests_total{outcome="ok",route="chat"}')).toBe(1);
  expect(counted.values.get('layerscale_requests_total{outcome="failed",route="chat"}')).toBe(0);
  expect(counted.text).toContain('model="late \\"name\\""');
  expect(own.totals()).toMatchObject({ started: 1, ok: 1, failed: 0, cancelled: 0 });

  const routed = new EngineMetrics({ version: "1" });
  const source = new Source();
  routed.attach(source, "dynamo");
  for (const finishReason of ["stop", "length", "cancelled", "error"] as const) source.ended({ finishReason });
  source.ended({ internal: true });
  const { values } = await scrape(routed);
  expect(["ok", "cancelled", "failed"].map((outcome) => values.get(`layerscale_requests_total{outcome="${outcome}",route="dynamo"}`))).toEqual([2, 1, 1]);
  expect(outcomeOf("length")).toBe("ok");
});

test("two registries do not share anything", async () => {
  const [a, b] = [new EngineMetrics({ version: "1" }), new EngineMetrics({ version: "1" })];
  a.countRequest("x", "ok");
  expect((await scrape(b)).text).not.toContain('route="x"');
});
