/** 200 prompts of 1 to 2,000 tokens on a tiny model: one aggregated worker, and a prefill and a decode worker, behind the real frontend. */
import { afterAll, expect, test } from "bun:test";
import { mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { tinyModel, writePlainTinyHf } from "../../support/models.ts";
import { computed, exact, nothingStaged, pair } from "./disagg-support.ts";
import { type Answer, Deployment, LIMIT_MS } from "./support.ts";

const TOKENS = 8;
const CONTEXT = 2048;
const EDGES = [1, 2, 3, 15, 16, 17, 31, 32, 33, 47, 48, 49, 127, 128, 129, 255, 256, 257, 1023, 1024, 1025, 1999, 2000];
const LENGTHS = [...EDGES, ...Array.from({ length: 200 - EDGES.length }, (_, i) => 1 + ((i * 1087) % 2000))];
/** Ids of plain text in the tiny tokenizer; no two prompts share a page. */
const prompt = (length: number, n: number): number[] => Array.from({ length }, (_, i) => 32 + ((i * i * 7 + i * (n % 89) + n * 31 + (i >> 4) * n) % 90));
const BATCH = 4;

const work = mkdtempSync(join(tmpdir(), "layerscale-lengths-"));
afterAll(() => rmSync(work, { recursive: true, force: true }));

/** Greedy with logprobs, and sampled under a seed, of every prompt. */
async function answers(d: Deployment): Promise<{ greedy: Answer; seeded: Answer }[]> {
  const all: { greedy: Answer; seeded: Answer }[] = [];
  for (let at = 0; at < LENGTHS.length; at += BATCH)
    all.push(
      ...(await Promise.all(
        LENGTHS.slice(at, at + BATCH).map(async (length, i) => {
          const n = at + i;
          const greedy = await d.ask("completions", prompt(length, n), { max_tokens: TOKENS, temperature: 0, logprobs: 2, stream: n % 2 === 0, ...exact });
          return { greedy, seeded: await d.ask("completions", prompt(length, n), { max_tokens: TOKENS, temperature: 1, seed: 1000 + n, ...exact }) };
        }),
      )),
    );
  return all;
}

test("200 prompts: the same greedy tokens, logprobs to 1e-5, and seeded tokens; one prompt token each is computed by the decode worker", async () => {
  const model = writePlainTinyHf(join(work, "tiny"), tinyModel("tiny-qwen3"), CONTEXT);
  const alone = await (async () => {
    await using d = await Deployment.start("round-robin");
    await d.worker([], { model });
    return await answers(d);
  })();
  await using p = await pair({ model });
  const before = await computed(p.decode);
  const both = await answers(p.d);
  LENGTHS.forEach((length, n) => {
    const [one, two] = [alone[n]!, both[n]!];
    expect([n, length, two.greedy.status, two.greedy.text, two.seeded.text]).toEqual([n, length, 200, one.greedy.text, one.seeded.text]);
    expect(two.greedy.usage).toMatchObject({ prompt_tokens: length, completion_tokens: TOKENS, prompt_tokens_details: { cached_tokens: length - 1 } });
    const logprobs = (answer: Answer) => answer.logprobs as unknown as number[];
    expect(logprobs(two.greedy).length).toBe(TOKENS);
    logprobs(two.greedy).forEach((value, i) => expect(Math.abs(value - logprobs(one.greedy)[i]!)).toBeLessThan(1e-5));
  });
  // Each prompt came twice: pulled, and from the cache.
  expect((await computed(p.decode)) - before).toBe(2 * LENGTHS.length);
  expect(await p.decode.metric("layerscale_kv_transfer_fallbacks_total")).toBe(0);
  await nothingStaged(p.prefill);
  await p.decode.idle();
  await p.prefill.idle();
}, 6 * LIMIT_MS);
