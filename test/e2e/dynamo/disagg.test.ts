/** Prefill and decode on separate workers behind the real frontend: the same answers as one worker, with the KV really moved. */
import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { eventually, launch } from "../../support/launch.ts";
import { cachedOf, computed, decodeLeg, exact, fallbacks, nothingStaged, type Pair, type Params, pair, prefillCall, prefillLeg, prompt, Proxy, sample, staged } from "./disagg-support.ts";
import { type Answer, Deployment, LIMIT_MS } from "./support.ts";

const TEST_MS = 3 * LIMIT_MS;
const PROOFS = Boolean(process.env.LAYERSCALE_PROOFS);
const TOKENS = 12;
const EDGES = [1, 2, 15, 16, 17, 31, 32, 33, 47, 48, 49, 130, 255, 256, 257];
/** The long version goes up to 2,000 tokens; 200 prompts on a tiny model are in disagg-lengths.test.ts. */
const LENGTHS = PROOFS ? [...EDGES, ...Array.from({ length: 25 }, (_, i) => 1 + ((i * 1087) % 2000))] : [...EDGES, 700];

const greedy = { max_tokens: TOKENS, temperature: 0, logprobs: 3, ...exact };
const seeded = { max_tokens: TOKENS, temperature: 1, seed: 42, ...exact };
const logprobs = (answer: Answer) => answer.logprobs as unknown as number[];

describe("one prefill and one decode worker", () => {
  let p: Pair & AsyncDisposable;
  const references: { greedy: Answer; seeded: Answer }[] = [];
  beforeAll(async () => {
    await using d = await Deployment.start("round-robin");
    await d.worker();
    for (const length of LENGTHS) references.push({ greedy: await d.ask("completions", prompt(length), greedy), seeded: await d.ask("completions", prompt(length), seeded) });
    await d[Symbol.asyncDispose]();
    p = await pair();
  }, 6 * TEST_MS);
  afterAll(() => p?.[Symbol.asyncDispose](), TEST_MS);

  test("greedy tokens, logprobs and seeded tokens are those of one worker, at every length around page edges", async () => {
    for (const [index, length] of LENGTHS.entries()) {
      const reference = references[index]!;
      const before = await computed(p.decode);
      const answer = await p.d.ask("completions", prompt(length), { ...greedy, stream: index % 2 === 0 });
      expect([length, answer.status, answer.text, answer.finish]).toEqual([length, 200, reference.greedy.text, "length"]);
      expect(answer.usage).toMatchObject({ prompt_tokens: length, completion_tokens: TOKENS, prompt_tokens_details: { cached_tokens: length - 1 } });
      logprobs(answer).forEach((value, i) => expect(Math.abs(value - logprobs(reference.greedy)[i]!)).toBeLessThan(1e-5));
      expect(logprobs(answer).length).toBe(TOKENS);
      // Of a prompt that came with its KV one token is computed here.
      expect((await computed(p.decode)) - before).toBe(1);
      expect((await p.d.ask("completions", prompt(length), seeded)).text).toBe(reference.seeded.text);
    }
    await nothingStaged(p.prefill);
    expect(await p.decode.metric("layerscale_kv_transfer_fallbacks_total")).toBe(0);
    await p.decode.idle();
    await p.prefill.idle();
  }, 6 * TEST_MS);

  test("16 at once, chat and completions", async () => {
    const jobs = Array.from({ length: 16 }, (_, i) => i % EDGES.length);
    const answers = await Promise.all(jobs.map((at, i) => p.d.ask("completions", prompt(LENGTHS[at]!), { ...greedy, stream: i % 2 === 0 })));
    expect(answers.map(({ text }) => text)).toEqual(jobs.map((at) => references[at]!.greedy.text));
    const chat = await p.d.ask("chat", "What is the capital of France?", { max_tokens: 12 });
    expect([chat.status, chat.text]).toEqual([200, expect.stringContaining("Paris")]);
    await nothingStaged(p.prefill);
  }, TEST_MS);

  test("a connection to the transfer port carries at least the prompt's KV, and a prefix that is there is not sent again", async () => {
    const pageBytes = p.prefill.process.logs.find((line) => line.message === "engine ready")!.pageBytes as number;
    const tokens = prompt(200, 7);
    const params = await prefillLeg(p.prefill, tokens);
    expect({ ...params }).toMatchObject({ host: "127.0.0.1", port: expect.any(Number), transfer_id: expect.stringMatching(/^\d+$/), tokens: 199 });
    expect(await staged(p.prefill)).toBe(1);
    await using proxy = await Proxy.start(params.port);
    const call = await decodeLeg(p.decode, tokens, { ...params, port: proxy.port });
    expect([call.tokens.length, cachedOf(call), call.errors]).toEqual([8, 199, []]);
    expect(proxy.received).toBeGreaterThanOrEqual((199 / 16) * pageBytes);
    const sent = await sample(p.prefill, 'layerscale_kv_transfer_bytes_total{direction="sent"}');
    expect(sent).toBeGreaterThan(proxy.received / 2);

    const longer = [...tokens, ...prompt(40, 8)];
    const second = await prefillLeg(p.prefill, longer);
    await using counter = await Proxy.start(second.port);
    expect(cachedOf(await decodeLeg(p.decode, longer, { ...second, port: counter.port }))).toBe(239);
    expect(counter.received).toBeLessThan(5 * pageBytes);
    for (const [worker, message] of [[p.prefill, "staged KV left"], [p.decode, "KV pulled"]] as const)
      expect(worker.process.logs.filter((line) => line.message === message && line.transfer === second.transfer_id)).toMatchObject([{ requestId: "id-1", outcome: "done" }]);
  }, TEST_MS);

  test("a flipped byte is noticed: the prompt is computed here, with the same tokens", async () => {
    for (const at of [40, 2_000, 1_000_000]) {
      const fresh = prompt(150, 100 + (at % 97));
      const params = await prefillLeg(p.prefill, fresh);
      const before = [await computed(p.decode), await fallbacks(p.decode, "corrupt")] as const;
      let flipped = false;
      await using proxy = await Proxy.start(params.port, (chunk, start) => {
        if (!flipped && at < start + chunk.length) {
          chunk[at - start]! ^= 0x10;
          flipped = true;
        }
        return chunk;
      });
      const broken = await decodeLeg(p.decode, fresh, { ...params, port: proxy.port });
      expect([at, broken.tokens.length, cachedOf(broken), (await computed(p.decode)) - before[0], (await fallbacks(p.decode, "corrupt")) - before[1]]).toEqual([at, 8, 0, 150, 1]);
      // The sender is told so, through the same door.
      await nothingStaged(p.prefill);
      const again = await decodeLeg(p.decode, fresh, await prefillLeg(p.prefill, fresh));
      expect(again.tokens).toEqual(broken.tokens);
    }
  }, TEST_MS);

  test("used and unknown ids, a closed port and hand-offs that are none lead to the same tokens, with their reason", async () => {
    const tokens = prompt(90, 11);
    const params = await prefillLeg(p.prefill, tokens);
    const first = await decodeLeg(p.decode, tokens, params);
    const before = [await computed(p.decode), await fallbacks(p.decode, "used")] as const;
    const again = await decodeLeg(p.decode, tokens, params);
    // All of it, though the prefix cache has the prompt.
    expect([again.tokens, cachedOf(again), (await computed(p.decode)) - before[0], (await fallbacks(p.decode, "used")) - before[1]]).toEqual([first.tokens, 0, 90, 1]);

    const wrong: [string, (real: Params) => unknown][] = [
      ["unknown", (real) => ({ ...real, transfer_id: "12345" })],
      ["no_route", (real) => ({ ...real, port: 1 })],
      ["handoff", (real) => ({ ...real, transfer_id: 12345 })],
      ["handoff", (real) => ({ ...real, host: "example.org" })],
      ["handoff", (real) => ({ ...real, port: 70_000 })],
      ["handoff", () => "nonsense"],
    ];
    for (const [index, [reason, change]] of wrong.entries()) {
      const other = prompt(90, 300 + index);
      const real = await prefillLeg(p.prefill, other);
      const count = await fallbacks(p.decode, reason);
      const call = await decodeLeg(p.decode, other, change(real));
      expect([reason, call.tokens.length, call.errors, (await fallbacks(p.decode, reason)) - count]).toEqual([reason, 8, [], 1]);
      expect((await decodeLeg(p.decode, other, real)).tokens).toEqual(call.tokens);
    }
    await nothingStaged(p.prefill);
  }, TEST_MS);

  test("health checks and requests that the router marks run whole on either worker", async () => {
    for (const worker of [p.prefill, p.decode])
      for (const mark of [{ _HEALTH_CHECK: true }, { annotations: ["x-bypass-remote-prefill"] }]) {
        const call = await prefillCall(worker, prompt(30, 13), mark);
        expect([call.tokens.length, call.errors, (call.items[0]!.data as any).disaggregated_params]).toEqual([1, [], undefined]);
      }
    await nothingStaged(p.prefill);
  }, TEST_MS);
});

test("layouts that differ are refused with the name of the field, and the copy goes", async () => {
  await using p = await pair({ decode: { args: ["--kv-cache-dtype", "bf16"] }, served: false });
  const tokens = prompt(60, 20);
  const params = await prefillLeg(p.prefill, tokens);
  const call = await decodeLeg(p.decode, tokens, params);
  expect([call.tokens, call.errors]).toEqual([[], [{ error_type: { Backend: "Unknown" }, message: expect.stringMatching(/does not fit.*dtype.*f32.*bf16/s) }]] as never);
  await nothingStaged(p.prefill);
  await eventually(async () => (await p.d.ask("completions", tokens, { max_tokens: 2 })).status === 500, "the frontend answers 500", LIMIT_MS);
  await p.decode.idle();
  expect([(await fetch(`${p.decode.system}/health`)).status, (await fetch(`${p.prefill.system}/health`)).status]).toEqual([200, 200]);
}, TEST_MS);

test("a pre-shared key: with it KV is pulled and does not travel in the clear, without it the prompt is computed", async () => {
  const env = { LAYERSCALE_KV_KEY: "correct horse battery staple" };
  await using p = await pair({ prefill: { env }, decode: { env } });
  const answer = await p.d.ask("completions", prompt(100, 21), { max_tokens: 4, ...exact });
  expect(answer.usage!.prompt_tokens_details.cached_tokens).toBe(99);
  await using other = await pair({ prefill: { env }, decode: { env: { LAYERSCALE_KV_KEY: "another secret of 27 bytes" } } });
  expect((await other.d.ask("completions", prompt(100, 21), { max_tokens: 4, ...exact })).text).toBe(answer.text);
  expect(await fallbacks(other.decode, "auth")).toBeGreaterThanOrEqual(1);
}, TEST_MS);

test.each(["prefill", "decode"])("a %s worker refuses a model with recurrent layers at its start, with the reason", async (mode) => {
  const model = mkdtempSync(join(tmpdir(), "layerscale-hybrid-"));
  writeFileSync(join(model, "config.json"), JSON.stringify({ architectures: ["Qwen3NextForCausalLM"], model_type: "qwen3_next", layer_types: ["linear_attention", "full_attention"] }));
  const worker = launch(["dynamo", "--model", model, "--disaggregation-mode", mode], { env: { DYN_DISCOVERY_BACKEND: "mem" } });
  expect(await worker.exit()).toBe(1);
  expect(worker.stderr).toMatch(/recurrent layers beside attention.*cannot be moved.*serve this model aggregated/s);
  rmSync(model, { recursive: true, force: true });
}, TEST_MS);
