/** What operators see and do, through the real frontend: reinforcement-learning calls, canary, traces in log lines, counters. */
import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { eventually } from "../../support/launch.ts";
import { tinyModel, writeTinyHf } from "../../support/models.ts";
import { Deployment, LIMIT_MS, NAME, readEvents, type Worker } from "./support.ts";
import { freePort } from "../../support/free-port.ts";

const TEST_MS = 2 * LIMIT_MS;
const work = mkdtempSync(join(tmpdir(), "layerscale-operations-"));
afterAll(() => rmSync(work, { recursive: true, force: true }));
const exact = { ignore_eos: true };

const call = async (worker: Worker, route: string, body: unknown = {}) => (await (await fetch(`${worker.system}/engine/${route}`, { method: "POST", body: JSON.stringify(body) })).json()) as Record<string, any>;

describe("reinforcement learning", () => {
  let d: Deployment;
  let worker: Worker;
  let rlUrl: string;
  const models = [1, 2].map((seed) => writeTinyHf(join(work, `weights-${seed}`), { ...tinyModel("tiny-llama"), seed }));
  const prompt = Array.from({ length: 40 }, (_, i) => 30 + i);
  const ask = () => d.ask("completions", prompt, { max_tokens: 12, ...exact });
  beforeAll(async () => {
    const port = await freePort();
    rlUrl = `http://127.0.0.1:${port}/v1/rl/workers`;
    d = await Deployment.start("round-robin", [], undefined, { frontend: { DYN_ENABLE_RL: "1", DYN_RL_PORT: String(port) } });
    worker = await d.worker(["--model", models[0]!, "--enable-rl"]);
  }, TEST_MS);
  afterAll(() => d?.[Symbol.asyncDispose](), TEST_MS);

  test("the frontend lists the worker, its routes and where to call them", async () => {
    const found = await eventually(async () => ((await (await fetch(rlUrl)).json()) as Record<string, any>).workers?.find((item: Record<string, any>) => item.routes?.length > 0) as Record<string, any> | undefined, "a worker with routes", LIMIT_MS);
    expect(found).toMatchObject({ namespace: "dynamo", component: "backend", endpoint: "rl", system_url: worker.system });
    expect(found.routes).toEqual(expect.arrayContaining(["control/pause_generation", "control/resume_generation", "flush_cache", "get_weight_version", "update_weights_from_disk", "update/model_taints"]));
  }, TEST_MS);

  test("pause takes the worker out, a reload changes the answers to those of the new weights, resume brings it back", async () => {
    const before = await ask();
    expect(before.status).toBe(200);
    expect(await call(worker, "pause_generation", { mode: "wait" })).toMatchObject({ status: "ok" });
    expect((await fetch(`${worker.system}/health`)).status).toBe(503);
    await eventually(async () => [404, 503].includes((await ask()).status), "the frontend has no worker", LIMIT_MS);
    expect(await call(worker, "update_weights_from_disk", { model_path: models[1], weight_version: "v2" })).toEqual({ status: "ok", version: "v2" });
    expect(await call(worker, "resume_generation")).toMatchObject({ status: "ok" });
    const after = await eventually(async () => {
      const answer = await ask();
      return answer.status === 200 ? answer : null;
    }, "the worker is back", LIMIT_MS);
    expect(after.text).not.toBe(before.text);
    await using other = await Deployment.start("round-robin");
    await other.worker(["--model", models[1]!]);
    expect((await other.ask("completions", prompt, { max_tokens: 12, ...exact })).text).toBe(after.text);
    expect((await call(worker, "get_weight_version")).version).toBe("v2");
  }, TEST_MS);

  test("other shapes are refused before anything changes, and serving goes on", async () => {
    const other = writeTinyHf(join(work, "other"), tinyModel("tiny-qwen2"));
    const before = await ask();
    await call(worker, "pause_generation", { mode: "wait" });
    expect(await call(worker, "update_weights_from_disk", { model_path: other })).toMatchObject({ status: "error", message: expect.stringContaining("expected") });
    expect(await call(worker, "update_weights_from_disk", { model_path: join(work, "absent") })).toMatchObject({ status: "error", message: expect.stringContaining("absent") });
    await call(worker, "resume_generation");
    expect((await eventually(async () => ((await ask()).status === 200 ? ask() : null), "the worker is back", LIMIT_MS)).text).toBe(before.text);
  }, TEST_MS);
});

describe("canary, traces and counters", () => {
  let d: Deployment;
  let worker: Worker;
  beforeAll(async () => {
    d = await Deployment.start("round-robin", [], undefined, { frontend: { DYN_LOGGING_JSONL: "1" } });
    worker = await d.worker([], { env: { DYN_HEALTH_CHECK_ENABLED: "true", DYN_CANARY_WAIT_TIME: "1", DYN_LOG: "warn,layerscale=debug" } });
  }, TEST_MS);
  afterAll(() => d?.[Symbol.asyncDispose](), TEST_MS);

  test("the worker is ready, and its own probes count nowhere", async () => {
    const before = [await worker.metric("dynamo_component_requests_total"), await worker.metric("layerscale_generated_tokens_total")];
    const steps = (await worker.metric("layerscale_steps_total"))!;
    await eventually(async () => (await worker.metric("layerscale_steps_total"))! > steps, "a probe ran", LIMIT_MS);
    expect((await fetch(`${worker.system}/health`)).status).toBe(200);
    expect([await worker.metric("dynamo_component_requests_total"), await worker.metric("layerscale_generated_tokens_total")]).toEqual(before);
  }, TEST_MS);

  test("a client's trace id is in the worker's lines of that request", async () => {
    const trace = "4bf92f3577b34da6a3ce929d0e0e4736";
    const response = await fetch(`${d.url}/v1/completions`, {
      method: "POST", headers: { "content-type": "application/json", traceparent: `00-${trace}-00f067aa0ba902b7-01` }, body: JSON.stringify({ model: NAME, prompt: "a", max_tokens: 2 }),
    });
    expect(response.status).toBe(200);
    const lines = await eventually(() => {
      const found = worker.process.logs.filter((line) => line.traceId === trace);
      return found.some((line) => line.message === "request ended") ? found : null;
    }, "a line with the trace id", LIMIT_MS);
    for (const line of lines) expect({ ...line }).toMatchObject({ time: expect.any(String), level: "debug", target: expect.stringContaining("layerscale::dynamo::"), requestId: lines[0]!.requestId as string });
  }, TEST_MS);

  test("answered, refused and abandoned requests are counted as they are over HTTP", async () => {
    await worker.idle();
    const count = async (outcome: string) => {
      const text = await (await fetch(`${worker.system}/metrics`)).text();
      return Number(new RegExp(`^layerscale_requests_total\\{outcome="${outcome}",route="dynamo"\\} (\\d+)$`, "m").exec(text)![1]);
    };
    const before = { ok: await count("ok"), failed: await count("failed"), cancelled: await count("cancelled") };
    await d.ask("completions", "a", { max_tokens: 2, ...exact });
    expect((await d.ask("chat", "a", { max_tokens: 2, top_k: 5 })).status).toBe(400);
    const leave = new AbortController();
    await readEvents(await d.request("completions", "The sea is", { max_tokens: 4000, stream: true, ...exact }, leave.signal), 2);
    leave.abort();
    await eventually(async () => (await count("cancelled")) === before.cancelled + 1, "the abandoned one is counted", LIMIT_MS);
    expect({ ok: await count("ok"), failed: await count("failed"), cancelled: await count("cancelled") }).toEqual({ ok: before.ok + 1, failed: before.failed + 1, cancelled: before.cancelled + 1 });
    await worker.idle();
  }, TEST_MS);
});
