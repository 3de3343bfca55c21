/**
 * The worker behind the frontends of several Dynamo releases. LAYERSCALE_TEST_DYNAMO lists them as `version=python` words; the runner
 * gives all releases with --proofs, else those that are installed. docs/compatibility.md tells the differences.
 */
import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { eventually, required } from "../../support/launch.ts";
import { parseStream } from "./streams.ts";
import { Deployment, LIMIT_MS, readEvents, type Worker } from "./support.ts";

const TEST_MS = 3 * LIMIT_MS;
const releases = (process.env.LAYERSCALE_TEST_DYNAMO ?? `1.5.0=${required("LAYERSCALE_TEST_PYTHON")}`).split(" ").map((word) => word.split("=") as [string, string]);
const QUESTION = "What is the capital of France?";
const exact = { ignore_eos: true };

describe.each(releases)("Dynamo %s", (_version, python) => {
  let d: Deployment;
  let worker: Worker;
  beforeAll(async () => {
    d = await Deployment.start("kv", ["--migration-limit", "1"], undefined, { python });
    worker = await d.worker();
  }, TEST_MS);
  afterAll(() => d?.[Symbol.asyncDispose](), TEST_MS);

  test("chat and completions, streamed and not: the same text, exact counts", async () => {
    for (const route of ["chat", "completions"] as const) {
      const unary = await d.ask(route, QUESTION, { max_tokens: 16, ...exact });
      const stream = await d.ask(route, QUESTION, { max_tokens: 16, stream: true, ...exact });
      expect(unary).toMatchObject({ status: 200, finish: "length", error: null, usage: { completion_tokens: 16 } });
      expect(stream).toMatchObject({ status: 200, finish: "length", error: null, done: true, text: unary.text, usage: { completion_tokens: 16 } });
    }
    expect((await d.ask("chat", QUESTION, { max_tokens: 24 })).text).toContain("Paris");
  }, TEST_MS);

  test("stop strings, seeds and logprobs", async () => {
    const free = await d.ask("completions", "1, 2, 3, 4,", { max_tokens: 24 });
    const stop = free.text.slice(12, 16);
    const stopped = await d.ask("completions", "1, 2, 3, 4,", { max_tokens: 24, stop: [stop] });
    expect([stopped.finish, free.text.startsWith(stopped.text), stopped.text.includes(stop)]).toEqual(["stop", true, false]);
    const seeded = () => d.ask("completions", "The weather", { max_tokens: 12, temperature: 1, seed: -5, ...exact });
    expect((await seeded()).text).toBe((await seeded()).text);
    const logprobs = await d.ask("chat", QUESTION, { max_tokens: 6, stream: true, logprobs: true, top_logprobs: 3, ...exact });
    expect([logprobs.logprobs.length, logprobs.logprobs[0]!.top_logprobs.length]).toEqual([6, 3]);
  }, TEST_MS);

  test("a refusal is a 400 that names the option, and costs nobody else anything", async () => {
    const refused = await d.ask("chat", QUESTION, { max_tokens: 4, top_k: 5 });
    expect([refused.status, String(refused.error)]).toEqual([400, expect.stringContaining("top_k")]);
    const long = await d.ask("completions", Array(9000).fill(1000), { max_tokens: 4 });
    expect(long.status).toBe(400);
    expect((await d.ask("chat", QUESTION, { max_tokens: 2 })).status).toBe(200);
  }, TEST_MS);

  test("a client that leaves frees its pages", async () => {
    const leave = new AbortController();
    const pending = d.request("completions", "The sea is", { max_tokens: 4000, stream: true, ...exact }, leave.signal);
    await readEvents(await pending, 3);
    leave.abort();
    await worker.idle();
  }, TEST_MS);

  test("the router learns what the worker holds, and forgets it with the worker", async () => {
    const prompt = Array.from({ length: 100 }, (_, i) => 3000 + ((i * 41) % 800));
    await d.ask("completions", prompt, { max_tokens: 2, ...exact });
    await eventually(async () => {
      const hit = await d.ask("completions", prompt, { max_tokens: 1, nvext: { extra_fields: ["timing"] } });
      return hit.usage!.prompt_tokens_details.cached_tokens === 96 && (hit.nvext.timing?.kv_hit_rate ?? 0) > 0.8;
    }, "the router counts the prompt as held", LIMIT_MS);
  }, TEST_MS);

  test("a worker that leaves in the middle of a stream: it goes on elsewhere", async () => {
    const whole = await d.ask("completions", "Once upon a time", { max_tokens: 160, ...exact });
    const response = await d.request("completions", "Once upon a time", { max_tokens: 160, stream: true, ...exact });
    const { rest } = await readEvents(response, 3);
    const other = await d.worker([], { served: false });
    await eventually(() => d.records("v1/instances").some((key) => key.includes(other.instance)), "the other worker is registered", LIMIT_MS);
    worker.process.signal("SIGTERM");
    worker.process.signal("SIGTERM");
    const answer = parseStream(await rest());
    expect(answer).toMatchObject({ error: null, done: true, text: whole.text, usage: { completion_tokens: 160 } });
    expect(await worker.process.exit(LIMIT_MS)).toBe(0);
    await d.served();
  }, TEST_MS);
});
