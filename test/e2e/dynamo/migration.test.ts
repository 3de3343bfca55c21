/** A worker goes while a stream runs on it: with --migration-limit 1 the client notices nothing. */
import { afterEach, describe, expect, test } from "bun:test";
import { streamOn } from "./streams.ts";
import { Deployment, LIMIT_MS } from "./support.ts";

const TEST_MS = 4 * LIMIT_MS;
const PROMPT = "Once upon a time there was";
const TOKENS = 240;

let d: Deployment | null = null;
afterEach(async () => {
  await d?.[Symbol.asyncDispose]();
  d = null;
}, TEST_MS);

/** Two workers whose requests are cut as soon as they are told to stop, unless a grace time is given. */
async function two(grace: number): Promise<Deployment> {
  d = await Deployment.start("round-robin", ["--migration-limit", "1"]);
  const env = { DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS: String(grace) };
  await d.worker([], { served: false, env });
  await d.worker([], { env });
  return d;
}

describe("the answer goes on elsewhere, with no token lost or doubled", () => {
  for (const signal of ["SIGKILL", "SIGTERM"] as const)
    test(`${signal} in the middle of a stream`, async () => {
      const deployment = await two(0);
      const whole = await deployment.ask("completions", PROMPT, { max_tokens: TOKENS, ignore_eos: true });
      expect(whole.usage!.completion_tokens).toBe(TOKENS);
      const { worker, rest } = await streamOn(deployment, PROMPT, TOKENS);
      worker.process.signal(signal);
      const answer = await rest();
      expect(answer).toMatchObject({ error: null, done: true, finish: "length", text: whole.text, usage: { completion_tokens: TOKENS } });
      expect(await worker.process.exit(LIMIT_MS)).toBe(signal === "SIGTERM" ? 0 : 137);
      const other = deployment.workers.find((candidate) => candidate !== worker)!;
      await other.idle();
      // It did take part: the stream had not ended before the signal.
      expect(await other.metric("layerscale_generated_tokens_total")).toBeGreaterThan(0);
    }, TEST_MS);

  test("a seeded sample, kill -9", async () => {
    const deployment = await two(0);
    const sampling = { temperature: 1, seed: 77 };
    const whole = await deployment.ask("completions", PROMPT, { max_tokens: TOKENS, ignore_eos: true, ...sampling });
    const { worker, rest } = await streamOn(deployment, PROMPT, TOKENS, sampling);
    worker.process.signal("SIGKILL");
    expect(await rest()).toMatchObject({ error: null, finish: "length", text: whole.text, usage: { completion_tokens: TOKENS } });
  }, TEST_MS);
});

test("SIGTERM with grace time: the stream ends on the worker that leaves", async () => {
  const deployment = await two(600);
  const whole = await deployment.ask("completions", PROMPT, { max_tokens: 60, ignore_eos: true });
  const { worker, rest } = await streamOn(deployment, PROMPT, 60);
  const other = deployment.workers.find((candidate) => candidate !== worker)!;
  const before = await other.metric("dynamo_component_requests_total");
  worker.process.signal("SIGTERM");
  expect(await rest()).toMatchObject({ error: null, finish: "length", text: whole.text, usage: { completion_tokens: 60 } });
  expect(await other.metric("dynamo_component_requests_total")).toBe(before);
  // A second signal ends the grace time; without it the worker would stay for ten minutes.
  worker.process.signal("SIGTERM");
  expect(await worker.process.exit(LIMIT_MS)).toBe(0);
}, TEST_MS);

test("without migration the client gets an error, not silence", async () => {
  d = await Deployment.start("round-robin");
  const worker = await d.worker();
  const { rest } = await streamOn(d, PROMPT, 2000);
  worker.process.signal("SIGKILL");
  const answer = await rest();
  expect(answer.error).not.toBeNull();
  expect(answer.usage).toBeNull();
}, TEST_MS);
