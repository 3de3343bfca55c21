/** --enable-rl: the control endpoint, pause and resume, flush, weight version, reload, and what is refused. */
import { afterEach, describe, expect, test } from "bun:test";
import { dynamoConfig } from "../../../src/cli/dynamo.ts";
import { Engine } from "../../../src/engine/engine.ts";
import type { EngineOptions } from "../../../src/engine/types.ts";
import type { LoadedModel } from "../../../src/model/types.ts";
import type { ControlledEngine, WeightSource } from "../../../src/dynamo/worker-engine.ts";
import { expectedTokens } from "../../support/fake-backend.ts";
import { fakeEngine, fakeOptions, WORKER_ENTRY } from "../../support/fake-engine.ts";
import { PlaneCall, requestBody, until } from "./plane-client.ts";
import { family, record, records, type Running, start, startWith, stopAll } from "./worker-harness.ts";

afterEach(stopAll);

/** Weights of the model backend: "weights=N" is another model of the same shape, "broken" cannot be loaded, "other" does not fit. */
function source(options: EngineOptions): WeightSource & { starts: string[] } {
  const starts: string[] = [];
  return {
    starts,
    async check(path) {
      if (path === "other") throw new Error("other: hidden: 128, expected 64 as in the model that runs");
      return { path } as LoadedModel;
    },
    async start({ path }) {
      starts.push(path);
      const setting = path === "/models/tiny" ? "weights=0" : path === "broken" ? "broken=1" : path;
      return Engine.start({ ...options, libraryPath: `${options.libraryPath}${options.libraryPath.includes("?") ? "&" : "?"}${setting}` }, { workerEntry: WORKER_ENTRY, checkPages: true }) as Promise<ControlledEngine>;
    },
  };
}
async function rl(overrides: Partial<EngineOptions> = {}, environment: Record<string, string> = {}): Promise<Running<Engine> & { weights: ReturnType<typeof source> }> {
  const options = fakeOptions(overrides);
  const weights = source(options);
  const worker = await startWith<Engine>(await fakeEngine(overrides), { environment, worker: { enableRl: true }, weights });
  await until("ready", async () => (await fetch(`${worker.system}/health`)).status === 200);
  return Object.assign(worker, { weights });
}
const call = async (worker: { system: string }, route: string, body?: unknown) => {
  const response = await fetch(`${worker.system}/engine/${route}`, { method: "POST", ...(body !== undefined && { body: typeof body === "string" ? body : JSON.stringify(body) }) });
  return { status: response.status, answer: (await response.json()) as Record<string, any> };
};
const ids = Array.from({ length: 40 }, (_, i) => i + 5);
const body = (more: Parameters<typeof requestBody>[0] = {}) => requestBody({ token_ids: ids, sampling: { temperature: 1, seed: 1 }, stop: { max_tokens: 20 }, ...more });
const tokens = (weights: bigint) => expectedTokens(ids, 1n + weights, 20, 1000);
const ask = async (worker: { address: string }, more: Parameters<typeof requestBody>[0] = {}) => (await PlaneCall.send(worker.address, body(more))).done();
const routable = (worker: Running<unknown>) => record(worker.kv, "v1/instances", "generate") !== null;
const ready = async (worker: { system: string }) => (await fetch(`${worker.system}/health`)).status === 200;

describe("the control endpoint", () => {
  test("lists routes and the system server, under the worker's identity, and goes with it", async () => {
    const worker = await rl();
    const instance = record(worker.kv, "v1/instances", "rl")!;
    expect(instance).toMatchObject({ component: "backend", endpoint: "rl", instance_id: record(worker.kv, "v1/instances", "generate")!.instance_id });
    const describe = async (request: unknown) => ((await (await PlaneCall.send(instance.transport.tcp, request)).done()).items[0] as Record<string, any>).data as Record<string, any>;
    const answer = await describe({ method: "routes" });
    expect(answer).toMatchObject({ status: "ok", system_url: worker.system, world_size: 1 });
    expect(answer.routes).toEqual([...answer.routes].sort());
    for (const name of ["pause_generation", "resume_generation", "flush_cache", "get_weight_version", "update_weights_from_disk", "abort_request", "liveness_probe"])
      expect(answer.routes).toEqual(expect.arrayContaining([name, `control/${name}`]));
    expect(answer.routes).toContain("update/model_taints");
    expect(answer.routes.some((name: string) => name.includes("distributed") || name.includes("lora"))).toBe(false);
    expect(await describe({})).toEqual({ status: "error", message: "rl_dispatch: missing 'method' (str)" });
    expect(await describe({ method: "pause_generation" })).toEqual({ status: "error", method: "pause_generation", message: "rl request-plane endpoint only supports method='routes'" });
    worker.stop.raise();
    await until("gone", () => records(worker.kv, "v1/instances").length === 0);
  });
  test("its name is DYN_RL_ENDPOINT's; it needs the system server and a name of its own", async () => {
    expect(record((await rl({}, { DYN_RL_ENDPOINT: "steer" })).kv, "v1/instances", "steer")).not.toBeNull();
    const license = { id: "t", tier: "t", maxSessions: null, maxCtx: null, issued: "2026-01-01", expires: null };
    const parse = (env: Record<string, string>) => () => dynamoConfig(["--model", "m", "--enable-rl"], env, license, "k");
    expect(parse({})).toThrow(/^--enable-rl \/ DYN_ENABLE_RL: needs the system server; set DYN_SYSTEM_PORT/);
    expect(parse({ DYN_SYSTEM_PORT: "0", DYN_RL_ENDPOINT: "generate" })).toThrow('DYN_RL_ENDPOINT: "generate" is the serving endpoint');
    expect(parse({ DYN_SYSTEM_PORT: "0", DYN_RL_ENDPOINT: "a b" })).toThrow("DYN_RL_ENDPOINT");
    expect(parse({ DYN_SYSTEM_PORT: "0" })().worker.enableRl).toBe(true);
  });
  test("without the option there is no endpoint and no such call", async () => {
    const worker = await start();
    await until("ready", () => ready(worker));
    expect(record(worker.kv, "v1/instances", "rl")).toBeNull();
    expect(await call(worker, "pause_generation")).toEqual({ status: 404, answer: { error: "Route not found", message: "Route /engine/pause_generation not found" } });
  });
});

describe("pause and resume", () => {
  test("keep: requests stand still, newcomers wait, both go on exactly where they were", async () => {
    const worker = await rl({ libraryPath: "fake?ms=2" });
    const running = await PlaneCall.send(worker.address, body({ stop: { max_tokens: 200 } }));
    await until("tokens", () => running.tokens.length > 3);
    expect((await call(worker, "control/pause_generation", {})).answer).toEqual({ status: "ok", message: "Engine paused", mode: "keep", clear_cache: false });
    expect([routable(worker), await ready(worker), record(worker.kv, "v1/mdc") !== null]).toEqual([false, false, true]);
    const { steps } = worker.engine.stats();
    const late = await PlaneCall.send(worker.address, body());
    expect((await call(worker, "pause_generation", {})).answer.status).toBe("ok");
    expect(worker.engine.stats().steps).toBe(steps);
    expect([running.final, late.tokens.length]).toEqual([false, 0]);
    expect((await call(worker, "control/resume_generation")).answer).toEqual({ status: "ok", message: "Engine resumed" });
    expect([routable(worker), await ready(worker)]).toEqual([true, true]);
    expect((await running.done()).tokens).toEqual(expectedTokens(ids, 1n, 200, 1000));
    expect((await late.done()).tokens).toEqual(tokens(0n));
  });
  test("wait: what runs finishes first, within a time", async () => {
    const worker = await rl({ libraryPath: "fake?ms=2" });
    const endless = await PlaneCall.send(worker.address, body({ stop: { max_tokens: null, ignore_eos: true } }));
    await until("tokens", () => endless.tokens.length > 0);
    const refused = (await call(worker, "pause_generation", { mode: "wait", timeout_s: 0.05 })).answer;
    expect(refused).toMatchObject({ status: "error", message: expect.stringContaining("1 requests still run after 0.05 s") });
    expect((await call(worker, "pause_generation", { mode: "wait", clear_cache: true })).answer).toMatchObject({ status: "ok", mode: "wait", clear_cache: true });
    expect([endless.final, endless.errors, worker.engine.stats().pagesCached]).toEqual([true, [], 0]);
  });
  test("abort: what runs ends with an error that another worker may continue from", async () => {
    const worker = await rl({ libraryPath: "fake?ms=2" });
    const cut = await PlaneCall.send(worker.address, body({ stop: { max_tokens: 300 } }));
    await until("tokens", () => cut.tokens.length > 0);
    expect((await call(worker, "pause_generation", { mode: "abort" })).answer.status).toBe("ok");
    expect((await cut.done()).errors).toEqual([{ error_type: { Backend: "EngineShutdown" }, message: "generation is paused" }]);
    expect(worker.engine.stats()).toMatchObject({ running: 0, pagesHeld: 0 });
    // A stop while paused ends in time.
    worker.stop.raise();
    expect(await worker.exit).toBe(0);
  });
  test("bad settings are refused by name", async () => {
    const worker = await rl();
    const said = async (request: unknown) => (await call(worker, "pause_generation", request)).answer;
    for (const [request, text] of [[{ mode: "nap" }, 'mode: expected keep, wait, abort, got "nap"'], [{ clear_cache: 1 }, "clear_cache: expected true or false, got 1"], [{ timeout_s: 0 }, "timeout_s: expected a number above 0"], [[], "must be a JSON object"]] as const)
      expect(await said(request)).toMatchObject({ status: "error", message: expect.stringContaining(text) });
    expect(await call(worker, "pause_generation", "{")).toMatchObject({ status: 400, answer: { error: "Invalid JSON" } });
    expect([routable(worker), await ready(worker)]).toEqual([true, true]);
  });
});

describe("the prefix cache and single requests", () => {
  test("flush_cache empties the cache and tells the router", async () => {
    const worker = await rl();
    await ask(worker);
    expect(worker.engine.stats().pagesCached).toBeGreaterThan(0);
    const cleared = Promise.withResolvers<void>();
    worker.engine.onKvEvents((events) => void (events.some((event) => event.kind === "cleared") && cleared.resolve()));
    expect((await call(worker, "flush_cache")).answer).toEqual({ status: "ok", message: "Cache flushed" });
    await cleared.promise;
    expect(((await ask(worker)).items.at(-1)!.data!.completion_usage as Record<string, any>).prompt_tokens_details.cached_tokens).toBe(0);
  });
  test("abort_request ends one request, by its id", async () => {
    const worker = await rl({ libraryPath: "fake?ms=2" });
    const [one, other] = await Promise.all(["one", "other"].map((id) => PlaneCall.send(worker.address, body({ stop: { max_tokens: 300 } }), { control: { id } })));
    await until("both run", () => one!.tokens.length > 0 && other!.tokens.length > 0);
    expect((await call(worker, "abort_request", { request_id: "one" })).answer).toEqual({ status: "ok", request_id: "one" });
    expect((await one!.done()).errors[0]).toMatchObject({ error_type: "Cancelled" });
    expect((await other!.done()).errors).toEqual([]);
    expect((await call(worker, "abort_request", { request_id: "none" })).answer).toMatchObject({ status: "error", message: expect.stringContaining('"none"') });
    expect((await call(worker, "abort_request", {})).answer.message).toContain("request_id");
  });
});

describe("weights from disk", () => {
  test("new weights change the answer, keep counters and records, and empty the cache", async () => {
    const worker = await rl();
    expect((await ask(worker)).tokens).toEqual(tokens(0n));
    expect((await call(worker, "get_weight_version")).answer).toEqual({ status: "ok", version: "initial" });
    const card = record(worker.kv, "v1/mdc");
    const steps = await family(worker, "layerscale_steps_total");
    expect((await call(worker, "update_weights_from_disk", { model_path: "weights=7" })).answer).toMatchObject({ status: "error", message: expect.stringContaining("must be paused") });
    await call(worker, "pause_generation", { mode: "wait" });
    expect((await call(worker, "update_weights_from_disk", { model_path: "weights=7", weight_version: "step-12" })).answer).toEqual({ status: "ok", version: "step-12" });
    const waiting = await PlaneCall.send(worker.address, body());
    await call(worker, "resume_generation");
    const after = await waiting.done();
    expect(after.tokens).toEqual(tokens(7n));
    expect((after.items.at(-1)!.data!.completion_usage as Record<string, any>).prompt_tokens_details.cached_tokens).toBe(0);
    expect((await call(worker, "get_weight_version")).answer.version).toBe("step-12");
    expect(record(worker.kv, "v1/mdc")).toEqual(card);
    expect(await family(worker, "layerscale_steps_total")).toBeGreaterThan(steps!);
    expect(await family(worker, "layerscale_generated_tokens_total")).toBe(40);
  });
  test("what does not fit or cannot be read changes nothing; what cannot be loaded brings the old weights back", async () => {
    const worker = await rl();
    await call(worker, "pause_generation", { mode: "wait" });
    expect((await call(worker, "update_weights_from_disk", { model_path: "other" })).answer.message).toContain("hidden: 128, expected 64");
    expect(worker.weights.starts).toEqual([]);
    expect((await call(worker, "update_weights_from_disk", { model_path: "broken" })).answer.message).toContain("cannot be loaded");
    expect(worker.weights.starts).toEqual(["broken", "/models/tiny"]);
    expect((await call(worker, "update_weights_from_disk", {})).answer.message).toContain("model_path: expected");
    await call(worker, "resume_generation");
    expect((await ask(worker)).tokens).toEqual(tokens(0n));
    expect((await call(worker, "get_weight_version")).answer.version).toBe("initial");
  });
  test("requests that stand still would go on over other weights, so the reload is refused", async () => {
    const worker = await rl({ libraryPath: "fake?ms=2" });
    const running = await PlaneCall.send(worker.address, body({ stop: { max_tokens: 300 } }));
    await until("tokens", () => running.tokens.length > 0);
    await call(worker, "pause_generation");
    expect((await call(worker, "update_weights_from_disk", { model_path: "weights=7" })).answer.message).toContain("1 requests stand still");
    await call(worker, "resume_generation");
    expect((await running.done()).tokens).toEqual(expectedTokens(ids, 1n, 300, 1000));
  });
  test("when the old weights do not come back either, the worker ends with exit code 1", async () => {
    const worker = await rl();
    worker.weights.start = () => Promise.reject(new Error("no memory"));
    await call(worker, "pause_generation", { mode: "wait" });
    await call(worker, "update_weights_from_disk", { model_path: "weights=7" }).catch(() => {});
    expect(await worker.exit).toBe(1);
  });
});

describe("routes", () => {
  test("unsupported calls say why, unknown ones are 404", async () => {
    const worker = await rl();
    for (const name of ["update_weights_from_distributed", "update_weights_from_tensor", "init_weights_update_group", "destroy_weights_update_group", "sleep", "wake_up", "start_profile", "load_lora", "control/sleep", "update/load_lora"]) {
      const { status, answer } = await call(worker, name, {});
      expect([name, status, answer.status]).toEqual([name, 200, "error"]);
      expect(answer.message).toStartWith(`${name} is not supported by this worker: `);
      expect(answer.message.length).toBeGreaterThan(`${name} is not supported by this worker: `.length + 10);
    }
    expect((await call(worker, "dance", {})).status).toBe(404);
  });
  test("model taints replace those of the model record", async () => {
    const worker = await start();
    await until("ready", () => ready(worker));
    expect(await call(worker, "update/model_taints", { taints: ["gpu", "blue", "gpu"] })).toEqual({ status: 200, answer: { status: "ok", taints: ["blue", "gpu"] } });
    expect(record(worker.kv, "v1/mdc")!.card_json.runtime_config.taints).toEqual(["blue", "gpu"]);
    for (const [request, text] of [[{ taints: "x" }, "'taints' must be a JSON array of strings"], [[], "request body must be a JSON object"], [{ taints: ["dynamo.topology/zone=west"] }, "taint 'dynamo.topology/zone=west' uses reserved prefix 'dynamo.topology/'"]] as const)
      expect(await call(worker, "update/model_taints", request)).toEqual({ status: 500, answer: { error: "Handler error", message: text } });
  });
  test("they are closed once the worker stops", async () => {
    const worker = await rl({}, { DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS: "60" });
    worker.stop.raise();
    await until("closed", async () => (await call(worker, "flush_cache")).answer.message === "engine administrative routes are unavailable while the worker is shutting down");
  });
});
