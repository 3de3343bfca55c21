/** Readiness and the canary: what /health says while loading, idle, stalled, saturated. */
import { afterEach, describe, expect, test } from "bun:test";
import { mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { UsageError } from "../../../src/config/flags.ts";
import { readDynamoEnvironment } from "../../../src/config/env.ts";
import { Canary, defaultPayload } from "../../../src/dynamo/health/canary.ts";
import { Health } from "../../../src/dynamo/health/health.ts";
import { internal } from "../../../src/dynamo/protocol/errors.ts";
import type { Work } from "../../../src/dynamo/request-plane/work-handler.ts";
import { PlaneCall, requestBody, until } from "./plane-client.ts";
import { config, family, start, startWith, Stop, stopAll } from "./worker-harness.ts";
import { FakeEngine } from "./fake-engine.ts";
import { runWorker } from "../../../src/dynamo/worker.ts";

afterEach(stopAll);
const health = async (worker: { system: string }) => {
  const response = await fetch(`${worker.system}/health`);
  return { status: response.status, body: (await response.json()) as { status: string; endpoints: Record<string, string> } };
};

describe("Health", () => {
  test("not ready before all that is required is", () => {
    const some = new Health(["generate", "rl"]);
    expect([some.ready, some.body()]).toMatchObject([false, { status: "notready", endpoints: {} }]);
    some.phase = "ready";
    some.set("generate", true);
    expect([some.ready, some.body().endpoints]).toEqual([false, { generate: "ready" }]);
    some.set("rl", true);
    expect(some.ready).toBe(true);
    some.phase = "stopping";
    expect([some.ready, some.body().endpoints]).toEqual([false, { generate: "notready", rl: "notready" }]);
  });
});

describe("Canary", () => {
  const canary = (work: Work, timeoutMs = 5_000) => {
    const seen: boolean[] = [];
    return { seen, canary: new Canary({ work, payload: defaultPayload(1), waitMs: 20, timeoutMs, onHealth: (ready) => seen.push(ready) }) };
  };
  test("asks at once, with the marker, and then again and again while nothing else happens", async () => {
    const bodies: unknown[] = [];
    const { seen, canary: one } = canary(async function* (body) {
      bodies.push(body);
      yield { data: {} };
    });
    await one.start();
    expect(seen).toEqual([true]);
    expect(bodies[0]).toEqual({ token_ids: [1], stop_conditions: { max_tokens: 1, ignore_eos: true }, sampling_options: { temperature: 0 }, _HEALTH_CHECK: true });
    await until("more probes", () => bodies.length >= 3);
    one.stop();
  });
  test("an error, an empty answer and no answer in time are ill health; a sign of life ends it", async () => {
    let answer: Work = async function* () {
      throw internal("device lost");
    };
    const { seen, canary: one } = canary((body, context) => answer(body, context), 30);
    await one.start();
    expect(seen).toEqual([]);
    one.sign();
    expect(seen).toEqual([true]);
    await until("ill", () => seen.length === 2);
    answer = async function* () {};
    one.sign();
    await until("ill again", () => seen.length === 4);
    // Hangs until it is aborted, as a stalled engine does.
    answer = async function* (_body, { signal }) {
      await new Promise((resolve) => signal.addEventListener("abort", resolve, { once: true }));
    };
    one.sign();
    await until("timed out", () => seen.length === 6);
    answer = async function* () {
      yield { data: {} };
    };
    await until("well again", () => seen.length === 7);
    expect(seen).toEqual([true, false, true, false, true, false, true]);
    one.stop();
  });
  test("activity keeps it silent: the wait begins at the last sign of life", async () => {
    let probes = 0;
    let clock = 0;
    let looked = 0;
    const work: Work = async function* () {
      probes++;
      yield { data: {} };
    };
    const one = new Canary({ work, payload: defaultPayload(1), waitMs: 20, timeoutMs: 5_000, onHealth: () => {}, now: () => (looked++, clock) });
    await one.start();
    for (let round = 0; round < 3; round++) {
      clock += 15;
      one.sign();
      const before = looked;
      await until("the timer looked at the clock", () => looked > before + 1);
    }
    expect(probes).toBe(1);
    clock += 20;
    await until("a probe after the wait", () => probes === 2);
    one.stop();
  });
});

describe("a worker", () => {
  const on = { DYN_HEALTH_CHECK_ENABLED: "true", DYN_CANARY_WAIT_TIME: "1", DYN_HEALTH_CHECK_REQUEST_TIMEOUT: "1" };
  test("with the canary on it is ready after its first probe, which counts nowhere", async () => {
    const worker = await start({}, on);
    await until("ready", async () => (await health(worker)).status === 200);
    expect(worker.engine.requests[0]).toMatchObject({ internal: true, sampling: { maxTokens: 1, temperature: 0, ignoreEos: true } });
    expect(await family(worker, "dynamo_component_requests_total")).toBe(0);
    expect(await family(worker, 'layerscale_requests_total{outcome="ok",route="dynamo"}')).toBe(0);
    expect(await family(worker, "layerscale_generated_tokens_total")).toBe(0);
  });
  test("an engine that hangs makes it not ready, and one that works again ready", async () => {
    let hang: PromiseWithResolvers<void> | null = null;
    class Hanging extends FakeEngine {
      override async *generate(...args: Parameters<FakeEngine["generate"]>) {
        await hang?.promise;
        yield* super.generate(...args);
      }
    }
    const worker = await startWith(new Hanging({ vocab: 384 }), { environment: on });
    await until("ready", async () => (await health(worker)).status === 200);
    hang = Promise.withResolvers<void>();
    expect((await until("not ready", async () => ((await health(worker)).status === 503 ? health(worker) : null))).body.endpoints).toEqual({ generate: "notready" });
    hang.resolve();
    await until("ready again", async () => (await health(worker)).status === 200);
  });
  test("the payload of the environment is used, from text and from a file", async () => {
    const file = join(mkdtempSync(join(tmpdir(), "ls-payload-")), "payload.json");
    const payload = '{"token_ids":[9,8,7],"stop_conditions":{"max_tokens":2}}';
    writeFileSync(file, payload);
    for (const value of [payload, `@${file}`]) {
      const worker = await start({}, { ...on, DYN_HEALTH_CHECK_PAYLOAD: value });
      await until("probe", () => worker.engine.requests.length > 0);
      expect([...(worker.engine.requests[0]!.promptTokenIds as Uint32Array)]).toEqual([9, 8, 7]);
    }
    for (const bad of ["[]", "{", "5", "@/nowhere", "@/tmp"]) {
      const read = () => readDynamoEnvironment({ DYN_HEALTH_CHECK_PAYLOAD: bad });
      expect(read).toThrow(UsageError);
      expect(read).toThrow(/^DYN_HEALTH_CHECK_PAYLOAD: expected .*, got "/);
    }
  });
  test("a peer's probe is answered whole and uncounted while clients' requests run", async () => {
    const worker = await start({ stepMs: 2 });
    const busy = await PlaneCall.send(worker.address, requestBody({ stop: { max_tokens: 2000 } }));
    const probe = await (await PlaneCall.send(worker.address, requestBody({ _HEALTH_CHECK: true, stop: { max_tokens: 1 } }))).done();
    expect([probe.tokens.length, probe.items.at(-1)!.data!.finish_reason]).toEqual([1, "length"]);
    expect(worker.engine.requests.map((request) => [request.internal, request.priority])).toEqual([[false, 0], [true, 2 ** 31]]);
    busy.close();
  });
  test("/health and /live are 503 while loading, whatever DYN_SYSTEM_STARTING_HEALTH_STATUS says, and a list of endpoints is required whole", async () => {
    const kv = mkdtempSync(join(tmpdir(), "ls-worker-"));
    const stop = new Stop();
    const lines = Promise.withResolvers<number>();
    const { setLogSink } = await import("../../../src/telemetry/log.ts");
    setLogSink((line) => {
      const entry = JSON.parse(line) as Record<string, unknown>;
      if (entry.message === "system server listens") lines.resolve(entry.port as number);
    });
    const exit = runWorker(config(kv, { DYN_SYSTEM_STARTING_HEALTH_STATUS: "ready" }), stop, () => new Promise(() => {}));
    try {
      const system = `http://127.0.0.1:${await lines.promise}`;
      for (const path of ["/health", "/live"]) {
        const response = await fetch(system + path);
        expect([response.status, await response.json()]).toMatchObject([503, { status: "notready", endpoints: {} }]);
      }
    } finally {
      setLogSink((line) => void process.stderr.write(line + "\n"));
      stop.raise();
      await exit;
      rmSync(kv, { recursive: true });
    }
    const worker = await start({}, { DYN_SYSTEM_USE_ENDPOINT_HEALTH_STATUS: '["generate","absent"]', DYN_SYSTEM_HEALTH_PATH: "/h", DYN_SYSTEM_LIVE_PATH: "/l" });
    const ask = async (path: string) => (await fetch(worker.system + path)).status;
    await until("served", async () => (await (await fetch(`${worker.system}/h`)).text()).includes('"generate":"ready"'));
    expect([await ask("/h"), await ask("/l"), await ask("/health")]).toEqual([503, 503, 404]);
    const listed = await start({}, { DYN_SYSTEM_USE_ENDPOINT_HEALTH_STATUS: '["generate"]' });
    await until("ready", async () => (await health(listed)).status === 200);
  });
});
