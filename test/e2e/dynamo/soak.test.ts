/**
 * Load through the real frontend: 32 clients, random lengths, a third of the requests cancelled, a tenth invalid. Nothing fails that was
 * not provoked, nothing stays held, memory and descriptors stay flat, and the counters of both sides add up.
 * 20 seconds on a tiny model; with LAYERSCALE_PROOFS=1 five minutes, and five more on the default model.
 */
import { afterAll, describe, expect, test } from "bun:test";
import { mkdtempSync, readdirSync, readFileSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { tinyModel, writePlainTinyHf } from "../../support/models.ts";
import { Random } from "../../support/random.ts";
import { parseStream } from "./streams.ts";
import { Deployment, LIMIT_MS, type Worker } from "./support.ts";

const PROOFS = Boolean(process.env.LAYERSCALE_PROOFS);
const SECONDS = PROOFS ? 300 : 20;
const CLIENTS = 32;
/** Memory may grow while code is compiled and pools are first touched; after this share of the run it may not. */
const WARM = 0.4;
const work = mkdtempSync(join(tmpdir(), "layerscale-soak-"));
afterAll(() => rmSync(work, { recursive: true, force: true }));

interface Load {
  name: string;
  model: () => string | undefined;
  vocabulary: number;
  promptTokens: number;
  answerTokens: number;
}
const LOADS: Load[] = [
  { name: "a tiny model", model: () => writePlainTinyHf(join(work, "tiny"), tinyModel("tiny-qwen3")), vocabulary: 128, promptTokens: 200, answerTokens: 40 },
  ...(PROOFS ? [{ name: "the default model", model: () => undefined, vocabulary: 20_000, promptTokens: 60, answerTokens: 20 }] : []),
];

const INVALID: Record<string, unknown>[] = [{ top_k: 5 }, { prompt: [4_000_000] }, { min_tokens: 3 }, { frequency_penalty: 1 }, { guided_regex: "a+" }];
/** At some prompts that end inside a character: random ids make such prompts, people do not. */
const DECODER_PANIC = /panicked at \S*dynamo-tokenizers/g;
const LOST = /ECONNRESET|Failed to await/;
const residentMiB = (pid: number) => Number(/VmRSS:\s+(\d+)/.exec(readFileSync(`/proc/${pid}/status`, "utf8"))![1]) / 1024;
const descriptors = (pid: number) => readdirSync(`/proc/${pid}/fd`).length;

interface Counts {
  sent: number;
  answered: number;
  refused: number;
  left: number;
  tokens: number;
}

async function run(d: Deployment, load: Load, wrong: string[]): Promise<Counts> {
  const counts: Counts = { sent: 0, answered: 0, refused: 0, left: 0, tokens: 0 };
  const source = new Random(11);
  const random = (below: number) => source.below(below);
  const end = performance.now() + SECONDS * 1000;

  const one = async (index: number): Promise<void> => {
    const stream = random(2) === 0;
    const prompt = Array.from({ length: 1 + random(load.promptTokens) }, () => random(load.vocabulary));
    const wanted = 1 + random(load.answerTokens);
    const invalid = index % 10 === 0;
    const cancelled = !invalid && index % 3 === 0;
    const leave = new AbortController();
    const fields = { max_tokens: wanted, temperature: random(2), seed: index, ignore_eos: true, stream, ...(invalid ? INVALID[random(INVALID.length)] : {}) };
    // Some leave at once, some while they wait, some in the middle of the answer.
    const timer = cancelled && random(2) === 0 ? setTimeout(() => leave.abort(), random(40)) : null;
    try {
      const response = await d.request("completions", prompt, fields, leave.signal);
      if (cancelled && timer === null) {
        if (stream) await response.body?.getReader().read();
        leave.abort();
        counts.left++;
        return;
      }
      const text = await response.text();
      const answer = response.status !== 200 ? null : stream ? parseStream(text) : { ...(JSON.parse(text) as { usage: Record<string, number> }), error: null, done: true };
      // A streamed completion has status 200 before the worker can refuse it.
      if (invalid) {
        counts.refused++;
        if (stream ? !answer?.error : response.status !== 400) wrong.push(`request ${index}: invalid, but ${response.status} ${text.slice(0, 200)}`);
      } else {
        counts.answered++;
        counts.tokens += answer?.usage?.completion_tokens ?? 0;
        if (answer === null || answer.error || !answer.done || answer.usage?.completion_tokens !== wanted) wrong.push(`request ${index}: ${response.status} ${text.slice(-300)}`);
      }
    } catch (error) {
      counts.left++;
      if (!cancelled) wrong.push(`request ${index}: ${error}`);
    } finally {
      if (timer !== null) clearTimeout(timer);
    }
  };
  await Promise.all(Array.from({ length: CLIENTS }, async () => {
    while (performance.now() < end) await one(counts.sent++);
  }));
  return counts;
}

/** Resident memory of the worker, sampled through the run. */
function watch(worker: Worker): { stop(): { middle: number; last: number } } {
  const samples: number[] = [];
  const timer = setInterval(() => samples.push(residentMiB(worker.process.pid)), 250);
  return {
    stop() {
      clearInterval(timer);
      const largest = (list: number[]) => Math.max(...list);
      const warm = Math.floor(samples.length * WARM);
      const half = warm + Math.floor((samples.length - warm) / 2);
      return { middle: largest(samples.slice(warm, half)), last: largest(samples.slice(half)) };
    },
  };
}

describe.each(LOADS)("$name", (load) => {
  test("clients that leave, mistakes and good requests, side by side", async () => {
    await using d = await Deployment.start("kv");
    const model = load.model();
    const worker = await d.worker(["--max-num-seqs", "16"], model === undefined ? {} : { model });
    await worker.idle();
    const value = async (name: string) => (await worker.metric(name)) ?? 0;
    const outcome = async (name: string) => {
      const text = await (await fetch(`${worker.system}/metrics`)).text();
      return Number(new RegExp(`^layerscale_requests_total\\{outcome="${name}",route="dynamo"\\} (\\S+)$`, "m").exec(text)?.[1] ?? 0);
    };
    const before = { requests: await value("dynamo_component_requests_total"), ok: await outcome("ok"), failed: await outcome("failed"), cancelled: await outcome("cancelled"), tokens: await value("layerscale_generated_tokens_total"), descriptors: descriptors(worker.process.pid) };
    const memory = watch(worker);
    const wrong: string[] = [];
    const counts = await run(d, load, wrong);
    await worker.idle();
    const resident = memory.stop();
    console.log(`soak, ${load.name}: ${JSON.stringify({ ...counts, resident })}`);

    // The one fault that is the frontend's own: each panic of its decoder costs the request that it decodes. The tiny model gives no cause.
    const panics = d.frontend.stderr.match(DECODER_PANIC)?.length ?? 0;
    expect(wrong.filter((line) => !LOST.test(line))).toEqual([]);
    expect({ wrong, tolerated: Math.min(wrong.length, panics) }).toEqual({ wrong, tolerated: wrong.length });
    expect(counts.answered + counts.refused + counts.left).toBe(counts.sent);
    // Of the requests that reached the worker each ended in one way. A client that left may have done so before or after that.
    const ended = { ok: (await outcome("ok")) - before.ok, failed: (await outcome("failed")) - before.failed, cancelled: (await outcome("cancelled")) - before.cancelled };
    expect(ended.failed).toBe(counts.refused);
    expect(ended.ok).toBeGreaterThanOrEqual(counts.answered);
    expect(ended.ok + ended.cancelled).toBeLessThanOrEqual(counts.answered + counts.left);
    // The query endpoint of the event plane counts there too, which only recoveries use.
    expect((await value("dynamo_component_requests_total")) - before.requests).toBeGreaterThanOrEqual(ended.ok + ended.failed + ended.cancelled);
    expect((await value("layerscale_generated_tokens_total")) - before.tokens).toBeGreaterThanOrEqual(counts.tokens);
    // Everything is given back.
    expect(await value("layerscale_kv_pages_held")).toBe(0);
    expect((await value("layerscale_kv_pages_free")) + (await value("layerscale_kv_pages_cached"))).toBe(await value("layerscale_kv_pages"));
    expect(descriptors(worker.process.pid)).toBeLessThanOrEqual(before.descriptors + 4);
    expect(resident.last).toBeLessThan(resident.middle * 1.15 + 24);
    expect((await fetch(`${worker.system}/health`)).status).toBe(200);
    worker.process.signal("SIGTERM");
    expect(await worker.process.exit(LIMIT_MS)).toBe(0);
  }, SECONDS * 1000 + 3 * LIMIT_MS);
});
