/** The worker behind the real Dynamo frontend: what a client sees, in both router modes. */
import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { eventually } from "../../support/launch.ts";
import { Deployment, LIMIT_MS, readEvents, type Worker } from "./support.ts";

const QUESTION = "What is the capital of France?";
const ROUTES = ["chat", "completions"] as const;
const exact = { ignore_eos: true };
const TEST_MS = 2 * LIMIT_MS;

for (const mode of ["round-robin", "kv"] as const)
  describe(`router mode ${mode}`, () => {
    let d: Deployment;
    let worker: Worker;
    beforeAll(async () => {
      d = await Deployment.start(mode);
      worker = await d.worker();
    }, TEST_MS);
    afterAll(() => d?.[Symbol.asyncDispose](), TEST_MS);

    test("answers a question, streamed and not alike", async () => {
      const unary = await d.ask("chat", QUESTION, { max_tokens: 24 });
      expect(unary).toMatchObject({ status: 200, error: null });
      expect(unary.text).toContain("Paris");
      const stream = await d.ask("chat", QUESTION, { max_tokens: 24, stream: true });
      expect([stream.text, stream.done, stream.finish]).toEqual([unary.text, true, unary.finish]);
      expect(stream.pieces.length).toBeGreaterThan(3);
    }, TEST_MS);

    for (const route of ROUTES)
      for (const stream of [false, true])
        test(`${route} ${stream ? "streamed" : "unary"}: exactly max_tokens, with usage`, async () => {
          const answer = await d.ask(route, "Once upon a time", { max_tokens: 17, stream, ...exact });
          expect(answer).toMatchObject({ status: 200, finish: "length", error: null, usage: { completion_tokens: 17 } });
          expect(answer.usage!.total_tokens).toBe(answer.usage!.prompt_tokens + 17);
        }, TEST_MS);

    test("32 requests at once all complete, each with the text it has alone", async () => {
      const ask = (i: number) => d.ask(ROUTES[i % 2]!, `Number ${i % 8} is`, { max_tokens: 12, stream: i % 4 > 1, ...exact });
      const alone = [await ask(0), await ask(5)];
      const all = await Promise.all(Array.from({ length: 32 }, (_, i) => ask(i)));
      expect(all.map((answer) => [answer.status, answer.usage?.completion_tokens])).toEqual(Array(32).fill([200, 12]));
      expect([all[0]!.text, all[5]!.text]).toEqual(alone.map((answer) => answer.text));
      await worker.idle();
    }, TEST_MS);

    test("a client that disconnects ends its request and frees its pages", async () => {
      await worker.idle();
      const cancelled = await worker.metric("dynamo_component_cancellation_total");
      for (const stream of [true, false]) {
        const leave = new AbortController();
        const pending = d.request("completions", "The sea is", { max_tokens: 4000, stream, ...exact }, leave.signal);
        if (stream) await readEvents(await pending, 3);
        else await eventually(async () => ((await worker.metric("layerscale_requests_running")) ?? 0) > 0, "the request runs", LIMIT_MS);
        leave.abort();
        await pending.catch(() => {});
        await worker.idle();
      }
      expect(await worker.metric("dynamo_component_cancellation_total")).toBe(cancelled! + 2);
    }, TEST_MS);

    test("a repeated prompt comes from the prefix cache", async () => {
      const prompt = Array.from({ length: 100 }, (_, i) => 1000 + ((i * 37) % 700) + (mode === "kv" ? 1 : 0));
      const first = await d.ask("completions", prompt, { max_tokens: 2, ...exact });
      const again = await d.ask("completions", prompt, { max_tokens: 2, ...exact });
      expect(first.usage!.prompt_tokens_details.cached_tokens).toBe(0);
      expect(again.usage!.prompt_tokens_details.cached_tokens).toBe(96);
      expect(again.text).toBe(first.text);
      if (mode !== "kv") return;
      // The router knows it from the worker's events.
      await eventually(async () => {
        const hit = await d.ask("completions", prompt, { max_tokens: 1, nvext: { extra_fields: ["timing"] } });
        return (hit.nvext.timing?.kv_hit_rate ?? 0) > 0.8;
      }, "the router counts the prompt as held", LIMIT_MS);
    }, TEST_MS);
  });

describe("options", () => {
  let d: Deployment;
  let worker: Worker;
  beforeAll(async () => {
    d = await Deployment.start("round-robin");
    worker = await d.worker(["--ctx", "512"]);
  }, TEST_MS);
  afterAll(() => d?.[Symbol.asyncDispose](), TEST_MS);

  test("logprobs come with the final chunk, one finite entry per token, and the text is the same", async () => {
    const plain = await d.ask("chat", QUESTION, { max_tokens: 10, ...exact });
    const answer = await d.ask("chat", QUESTION, { max_tokens: 10, stream: true, logprobs: true, top_logprobs: 5, ...exact });
    expect([answer.text, answer.logprobs.length, answer.logprobEvents]).toEqual([plain.text, 10, 1]);
    for (const entry of answer.logprobs) {
      expect(entry.logprob).toBeLessThanOrEqual(0);
      expect(entry.top_logprobs.length).toBe(5);
      expect(entry.top_logprobs[0].logprob).toBeCloseTo(entry.logprob, 4);
    }
  }, TEST_MS);

  test("with logprobs the worker stops at a stop string by itself", async () => {
    const free = await d.ask("completions", "1, 2, 3, 4,", { max_tokens: 200 });
    const stop = free.text.slice(12, 16);
    await worker.idle();
    const before = await worker.metric("layerscale_generated_tokens_total");
    const answer = await d.ask("completions", "1, 2, 3, 4,", { max_tokens: 200, logprobs: 1, stop: [stop] });
    await worker.idle();
    expect([answer.finish, free.text.startsWith(answer.text), answer.text.includes(stop)]).toEqual(["stop", true, false]);
    expect(answer.usage!.completion_tokens).toBeLessThanOrEqual(16);
    expect((await worker.metric("layerscale_generated_tokens_total"))! - before!).toBeLessThan(40);
  }, TEST_MS);

  test("options this engine does not apply are a 400 that names them; good requests beside them never fail", async () => {
    const refused: [string, Record<string, unknown>][] = [
      ["top_k", { top_k: 5 }], ["min_p", { min_p: 0.1 }], ["frequency_penalty", { frequency_penalty: 0.5 }], ["min_tokens", { min_tokens: 3 }], ["guided_decoding", { guided_regex: "a+" }], ["prompt_logprobs", { prompt_logprobs: 1 }],
    ];
    for (const [name, fields] of refused) {
      const answer = await d.ask("chat", QUESTION, { max_tokens: 4, ...fields });
      expect([answer.status, String(answer.error)]).toEqual([400, expect.stringContaining(name)]);
      expect((await d.ask("chat", QUESTION, { max_tokens: 2, top_k: -1, min_p: 0, frequency_penalty: 0 })).status).toBe(200);
    }
  }, TEST_MS);

  test("context and vocabulary limits are a 400 with the numbers", async () => {
    const long = await d.ask("completions", Array(512).fill(1000), { max_tokens: 2 });
    expect([long.status, String(long.error)]).toEqual([400, expect.stringContaining("512")]);
    const foreign = await d.ask("completions", [5, 4_000_000], { max_tokens: 2 });
    expect([foreign.status, String(foreign.error)]).toEqual([400, expect.stringContaining("4000000")]);
    const full = await d.ask("completions", Array(500).fill(1000), { max_tokens: 1000, ...exact });
    expect(full).toMatchObject({ status: 200, finish: "length", usage: { completion_tokens: 12 } });
  }, TEST_MS);

  test("metrics: Dynamo's families first, then the engine's", async () => {
    const response = await fetch(`${worker.system}/metrics`);
    expect(response.headers.get("content-type")).toStartWith("text/plain");
    const names = (await response.text()).split("\n").flatMap((line) => (line.startsWith("# TYPE ") ? [line.split(" ")[2]!] : []));
    expect(new Set(names).size).toBe(names.length);
    const firstOwn = names.findIndex((name) => name.startsWith("layerscale_"));
    expect(names.slice(firstOwn).every((name) => name.startsWith("layerscale_"))).toBe(true);
    expect(names.slice(0, firstOwn)).toContain("dynamo_component_gpu_cache_usage_percent");
  });
});
