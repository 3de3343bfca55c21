/** Joining and leaving: readiness, SIGTERM, loss by kill -9, refusal of what is not built. */
import { describe, expect, test } from "bun:test";
import { eventually, launch, required } from "../../support/launch.ts";
import { Deployment, LIMIT_MS, NAME, readEvents } from "./support.ts";

const TEST_MS = 3 * LIMIT_MS;
const BUCKETS = ["v1/instances", "v1/mdc", "v1/event_channels", "v1/event_sources"];

describe("life of a worker", () => {
  test("SIGTERM leaves discovery first, lets a stream finish, exits 0 with nothing left", async () => {
    await using d = await Deployment.start("round-robin");
    const worker = await d.worker();
    expect((await fetch(`${worker.system}/health`)).status).toBe(200);
    const whole = await d.ask("completions", "Once upon a time", { max_tokens: 40, ignore_eos: true });
    const stream = await readEvents(await d.request("completions", "Once upon a time", { max_tokens: 40, ignore_eos: true, stream: true }), 3);
    worker.process.signal("SIGTERM");
    await eventually(() => !BUCKETS.some((bucket) => d.records(bucket).some((key) => key.includes(worker.instance))), "records are gone", LIMIT_MS);
    expect(worker.process.running).toBe(true);
    expect((await fetch(`${worker.system}/health`)).status).toBe(503);
    const events = (await stream.rest()).split("\n").filter((line) => line.startsWith("data: {")).map((line) => JSON.parse(line.slice(6)) as Record<string, any>);
    expect(events.map((event) => event.choices?.[0]?.text ?? "").join("")).toBe(whole.text);
    expect(await worker.process.exit(LIMIT_MS)).toBe(0);
    expect((await d.ask("completions", "a", { max_tokens: 1 })).status).toBeOneOf([404, 503]);
  }, TEST_MS);

  test("kill -9: the frontend forgets the worker, and a restarted one serves under a new id", async () => {
    await using d = await Deployment.start("round-robin");
    const first = await d.worker();
    const text = (await d.ask("completions", "1, 2, 3,", { max_tokens: 8, ignore_eos: true })).text;
    await first.kill();
    const second = await d.worker();
    expect(second.instance).not.toBe(first.instance);
    await eventually(() => !d.records("v1/instances").some((key) => key.includes(first.instance)), "the dead worker's record expires", LIMIT_MS);
    const answer = await d.ask("completions", "1, 2, 3,", { max_tokens: 8, ignore_eos: true });
    expect([answer.status, answer.text]).toEqual([200, text]);
  }, TEST_MS);

  test("two workers under one frontend: stopping one fails no request", async () => {
    await using d = await Deployment.start("kv", ["--migration-limit", "1"]);
    const [first] = [await d.worker(), await d.worker()];
    let stop = false;
    const client = async (i: number) => {
      const answers: [number, number | undefined][] = [];
      for (let n = 0; !stop; n++) {
        const answer = await d.ask("completions", `Client ${i}, question ${n}:`, { max_tokens: 8, ignore_eos: true });
        answers.push([answer.status, answer.usage?.completion_tokens]);
      }
      return answers;
    };
    const clients = Promise.all([0, 1, 2].map(client));
    await eventually(async () => ((await first!.metric("dynamo_component_requests_total")) ?? 0) > 1, "the worker gets requests", LIMIT_MS);
    first!.process.signal("SIGTERM");
    expect(await first!.process.exit(LIMIT_MS)).toBe(0);
    stop = true;
    const all = (await clients).flat();
    expect(all.length).toBeGreaterThan(3);
    expect(all.filter(([status, tokens]) => status !== 200 || tokens !== 8)).toEqual([]);
  }, TEST_MS);

  test("the router of a frontend that starts later knows what a worker holds", async () => {
    await using d = await Deployment.start("kv");
    await d.worker();
    const prompt = Array.from({ length: 160 }, (_, i) => 2000 + ((i * 53) % 900));
    await d.ask("completions", prompt, { max_tokens: 2, ignore_eos: true });
    await using late = await Deployment.start("kv", [], d.kv);
    await late.served();
    await eventually(async () => ((await late.ask("completions", prompt, { max_tokens: 1, nvext: { extra_fields: ["timing"] } })).nvext.timing?.kv_hit_rate ?? 0) > 0.9, "the late router counts the prompt as held", LIMIT_MS);
  }, TEST_MS);
});

describe("start", () => {
  const run = (environment: Record<string, string>, args: readonly string[] = []) =>
    launch(["dynamo", "--model", required("LAYERSCALE_TEST_GGUF"), "--served-model-name", NAME, ...args], { env: { DYN_TCP_RPC_HOST: "127.0.0.1", DYN_DISCOVERY_BACKEND: "file", ...environment } });
  const cases: [string, Record<string, string>, string[]][] = [
    ["DYN_ROUTE_TO_ENCODER", { DYN_ROUTE_TO_ENCODER: "true" }, []], ["DYN_LORA_ENABLED", { DYN_LORA_ENABLED: "true" }, []], ["--disaggregation-mode", {}, ["--disaggregation-mode", "encode"]],
    ["DYN_HEALTH_CHECK_PAYLOAD", { DYN_HEALTH_CHECK_PAYLOAD: '{"prompt":"hi"}' }, []], ["--enable-rl", {}, ["--enable-rl"]],
  ];
  test.each(cases)("%s: what cannot be served is one line that names it, exit code 2", async (name, environment, args) => {
    await using process = run(environment, args);
    expect(await process.exit(LIMIT_MS)).toBe(2);
    const lines = process.stderr.trim().split("\n");
    expect(lines.length).toBe(1);
    expect(lines[0]).toContain(name);
  }, TEST_MS);
});
