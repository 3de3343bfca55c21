/** NATS as request and event plane, with a real nats-server and the real frontend. */
import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { eventually, launch, required } from "../../support/launch.ts";
import { hasNats, NatsServer } from "../../support/nats-server.ts";
import { Deployment, LIMIT_MS, NAME, readEvents, type Worker } from "./support.ts";

const TEST_MS = 3 * LIMIT_MS;
const exact = { ignore_eos: true };
const planes = (server: NatsServer, login: Record<string, string> = {}) => ({ all: { DYN_REQUEST_PLANE: "nats", DYN_EVENT_PLANE: "nats", NATS_SERVER: server.url, ...login } });
/** A prompt of 6 whole pages and a bit that shares nothing with another number's. */
const prompt = (n: number) => Array.from({ length: 100 }, (_, i) => 1000 + ((i * 37 + n * 911) % 20_000));
const hits = async (d: Deployment, n: number) => (await d.ask("completions", prompt(n), { max_tokens: 1, nvext: { extra_fields: ["timing"] } })).nvext.timing?.kv_hit_rate ?? 0;

describe.skipIf(!hasNats)("two workers over NATS, KV-aware", () => {
  let server: NatsServer;
  let d: Deployment;
  let workers: Worker[];
  beforeAll(async () => {
    server = await NatsServer.start();
    d = await Deployment.start("kv", ["--migration-limit", "1"], undefined, planes(server));
    workers = [await d.worker(), await d.worker()];
  }, TEST_MS);
  afterAll(async () => {
    await d?.[Symbol.asyncDispose]();
    await server?.[Symbol.asyncDispose]();
  }, TEST_MS);
  const idle = () => Promise.all(workers.map((worker) => worker.idle()));
  const sum = async (metric: string) => (await Promise.all(workers.map(async (worker) => (await worker.metric(metric)) ?? 0))).reduce((a, b) => a + b, 0);

  test("the records name subjects, not addresses", () => {
    const bucket = (name: string) => d.records(name).join("\n");
    for (const worker of workers) expect(bucket("v1/instances")).toContain(worker.instance);
    expect(bucket("v1/event_channels")).toContain("kv-events");
    expect(bucket("v1/event_channels")).toContain("kv_metrics");
    for (const { process } of workers) expect(process.logs.find((line) => line.message === "worker ready")!.transport).toEqual({ nats_tcp: expect.stringMatching(/^dynamo_backend\.generate-[0-9a-f]+$/) });
  });

  test("requests, streamed and not, one by one and 24 at once", async () => {
    const unary = await d.ask("chat", "What is the capital of France?", { max_tokens: 12 });
    const stream = await d.ask("chat", "What is the capital of France?", { max_tokens: 12, stream: true });
    expect([unary.status, stream.text, stream.done]).toEqual([200, unary.text, true]);
    const all = await Promise.all(Array.from({ length: 24 }, (_, i) => d.ask("completions", `Number ${i % 6} is`, { max_tokens: 9, stream: i % 2 === 0, ...exact })));
    expect(all.map((answer) => [answer.status, answer.usage?.completion_tokens])).toEqual(Array(24).fill([200, 9]));
    expect((await d.ask("chat", "Hello", { max_tokens: 2, top_k: 5 })).status).toBe(400);
    await idle();
  }, TEST_MS);

  test("a client that disconnects frees its pages", async () => {
    const cancelled = await sum("dynamo_component_cancellation_total");
    for (const stream of [true, false]) {
      const leave = new AbortController();
      const pending = d.request("completions", "The sea is", { max_tokens: 4000, stream, ...exact }, leave.signal);
      if (stream) await readEvents(await pending, 3);
      else await eventually(async () => (await sum("layerscale_requests_running")) > 0, "the request runs", LIMIT_MS);
      leave.abort();
      await pending.catch(() => {});
      await idle();
    }
    expect(await sum("dynamo_component_cancellation_total")).toBe(cancelled + 2);
  }, TEST_MS);

  test("repeats go to the worker that holds them, by its events", async () => {
    const numbers = Array.from({ length: 15 }, (_, i) => i);
    for (const n of numbers) await d.ask("completions", prompt(n), { max_tokens: 2, ...exact });
    await eventually(async () => (await hits(d, numbers.at(-1)!)) > 0.8, "the router knows the last prompt", LIMIT_MS);
    const again = [];
    // One by one: beside other requests the router also weighs how busy the holder is.
    for (const n of numbers) again.push(await d.ask("completions", prompt(n), { max_tokens: 2, ...exact }));
    expect(again.filter((answer) => answer.usage!.prompt_tokens_details.cached_tokens === 96).length).toBeGreaterThanOrEqual(Math.ceil(numbers.length * 0.95));
    expect(await Promise.all(workers.map((worker) => worker.metric("dynamo_component_requests_total")))).not.toContain(0);
  }, TEST_MS);

  test("kill -9 of nats-server: an open stream ends well, serving and routing by events resume by themselves", async () => {
    const stream = await readEvents(await d.request("completions", prompt(100), { max_tokens: 150, stream: true, ...exact }), 3);
    await server.kill();
    const events = (await stream.rest()).split("\n").filter((line) => line.startsWith("data: {")).map((line) => JSON.parse(line.slice(6)) as Record<string, any>);
    expect(events.at(-1)!.usage.completion_tokens).toBe(150);
    await idle();
    await server.up();
    await eventually(async () => (await d.ask("completions", "a", { max_tokens: 1 })).status === 200, "requests are served again", LIMIT_MS);
    // Its pages were stored while nobody could be told.
    await eventually(async () => (await hits(d, 100)) > 0.8, "the router knows what was stored meanwhile", LIMIT_MS);
    for (const n of [101, 102, 103]) await d.ask("completions", prompt(n), { max_tokens: 2, ...exact });
    for (const n of [101, 102, 103, 3]) await eventually(async () => (await hits(d, n)) > 0.8, `the router knows prompt ${n}`, LIMIT_MS);
    await idle();
  }, TEST_MS);

  test("SIGTERM of one worker fails no request; it exits 0 and its subject is gone", async () => {
    const ask = (i: number) => d.ask("completions", `Story ${i}:`, { max_tokens: 60, ...exact });
    const running = Array.from({ length: 6 }, (_, i) => ask(i));
    await eventually(async () => ((await workers[0]!.metric("layerscale_requests_running")) ?? 0) > 0, "the first worker works", LIMIT_MS);
    workers[0]!.process.signal("SIGTERM");
    const during = Array.from({ length: 6 }, (_, i) => ask(10 + i));
    expect((await Promise.all([...running, ...during])).map((answer) => [answer.status, answer.usage?.completion_tokens])).toEqual(Array(12).fill([200, 60]));
    expect(await workers[0]!.process.exit(LIMIT_MS)).toBe(0);
    expect(d.records("v1/instances").some((key) => key.includes(workers[0]!.instance))).toBe(false);
  }, TEST_MS);
});

describe.skipIf(!hasNats)("logins", () => {
  const cases: [string, string, Record<string, string>, Record<string, string>, string][] = [
    ["user and password", 'authorization { user: "alice", password: "pw" }', { NATS_AUTH_USERNAME: "alice", NATS_AUTH_PASSWORD: "pw" }, { NATS_AUTH_PASSWORD: "no" }, "NATS_AUTH_PASSWORD"],
    ["token", 'authorization { token: "s3cret" }', { NATS_AUTH_TOKEN: "s3cret" }, { NATS_AUTH_TOKEN: "no" }, "NATS_AUTH_TOKEN"],
  ];
  test.each(cases)("%s", async (_name, config, login, wrong, variable) => {
    await using server = await NatsServer.start(config);
    await using d = await Deployment.start("round-robin", [], undefined, planes(server, login));
    await d.worker();
    expect((await d.ask("completions", "a", { max_tokens: 3, ...exact })).usage?.completion_tokens).toBe(3);
    await using refused = launch(["dynamo", "--model", required("LAYERSCALE_TEST_GGUF"), "--served-model-name", NAME], { env: { ...d.environment(), ...wrong } });
    expect([await refused.exit(LIMIT_MS), refused.stderr]).toEqual([1, expect.stringContaining(variable)]);
  }, TEST_MS);
});

describe("without a server", () => {
  test("the start ends within a bounded time and names NATS_SERVER; a stop does not wait for it", async () => {
    const kv = "/nonexistent-is-not-used";
    const env = { DYN_DISCOVERY_BACKEND: "mem", DYN_FILE_KV: kv, DYN_TCP_RPC_HOST: "127.0.0.1", DYN_REQUEST_PLANE: "nats", NATS_SERVER: "nats://127.0.0.1:1", DYN_SYSTEM_PORT: "-1" };
    const args = ["dynamo", "--model", required("LAYERSCALE_TEST_GGUF"), "--served-model-name", NAME];
    await using absent = launch(args, { env });
    await using stopped = launch(args, { env });
    await stopped.log("worker starts", LIMIT_MS);
    stopped.signal("SIGTERM");
    expect(await stopped.exit(LIMIT_MS)).toBe(0);
    expect([await absent.exit(LIMIT_MS), absent.stderr]).toEqual([1, expect.stringMatching(/NATS_SERVER: cannot connect to 127\.0\.0\.1:1 within 10 s/)]);
  }, TEST_MS);
});
