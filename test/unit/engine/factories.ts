import { KvManager } from "../../../src/engine/kv-manager.ts";
import { Scheduler, type SequenceOutput } from "../../../src/engine/scheduler.ts";
import { Sequence, type SequenceInit } from "../../../src/engine/sequence.ts";
import { maxBatchTokens } from "../../../src/engine/step-budget.ts";
import { StepPlan, type Row, type SubmittedStep } from "../../../src/engine/step-plan.ts";
import type { KvSource, TransferOptions } from "../../../src/engine/types.ts";
import { FakeBackend, type FakeOptions } from "../../support/fake-backend.ts";

export const VOCAB = 500;

export interface Bench {
  scheduler: Scheduler;
  backend: FakeBackend;
  plan: StepPlan;
  maxTokens: number;
  /** Submitted, and not waited for. */
  submitted: SubmittedStep[];
  /** Rows whose sequence had ended when their result came. */
  dead: number;
}

/** A scheduler over the model backend: no device, no Worker, page counts compared after every step. */
export function scheduler(options: { pages?: number; maxNumSeqs?: number; chunkedPrefillSize?: number; contextLength?: number; prefixCache?: boolean; next?: FakeOptions["next"]; transfer?: TransferOptions; digest?: number } = {}): Bench {
  const { pages = 100, maxNumSeqs = 8, chunkedPrefillSize = 64, contextLength = 100_000, prefixCache = true, next } = options;
  const maxTokens = maxBatchTokens({ chunkedPrefillSize, maxNumSeqs });
  const backend = new FakeBackend({ vocab: VOCAB, maxSeqs: maxNumSeqs, maxBatchTokens: maxTokens, prefixCache, ...(next && { next }) });
  backend.createPool(pages);
  const transfer = options.transfer ? backend.startTransfer(options.transfer, new Uint8Array(32).fill(options.digest ?? 1)) : null;
  const kv = new KvManager(backend, { prefixCache, strict: true }, transfer);
  return { scheduler: new Scheduler(kv, { chunkedPrefillSize, maxNumSeqs, contextLength }), backend, plan: new StepPlan(maxNumSeqs, maxTokens), maxTokens, submitted: [], dead: 0 };
}

let keys = 0;
export interface SequenceSketch {
  prompt?: number | number[];
  maxTokens?: number | null;
  eos?: number[];
  stops?: number[];
  ignoreEos?: boolean;
  priority?: number;
  domain?: bigint;
  internal?: boolean;
  seed?: bigint;
  stage?: boolean;
  source?: KvSource | null;
}
/** Prompts of different keys share nothing unless ids are given. */
export function sequence(sketch: SequenceSketch = {}): Sequence {
  const key = ++keys;
  const { prompt = 20, maxTokens = 4, eos = [], stops = [], ignoreEos = false, priority = 0, domain = 0n, internal = false, seed = 0n, stage = false, source = null } = sketch;
  const init: SequenceInit = {
    key, prompt: typeof prompt === "number" ? Array.from({ length: prompt }, (_, index) => (key * 31 + index * 7) % VOCAB) : prompt,
    sampling: { temperature: 0, topP: 1, seed, maxTokens, ignoreEos, logprobs: null },
    eosTokenIds: eos, stopTokenIds: stops, priority, cacheDomain: domain, internal, submittedAt: 0, stage, source,
  };
  return new Sequence(init);
}

export interface StepTrace {
  rows: Row[];
  outputs: SequenceOutput[];
}

let stepNumber = 0;
/** One whole step: schedule, pack, submit, wait, unpack, apply. */
export function step(bench: Bench): StepTrace {
  const rows = submit(bench);
  return { rows, outputs: rows.length === 0 ? [] : complete(bench) };
}

/** The first half of a step. */
export function submit({ scheduler, backend, plan, maxTokens, submitted }: Bench): Row[] {
  const rows = scheduler.schedule();
  if (rows.length === 0) return rows;
  const tokens = rows.reduce((sum, row) => sum + row.length, 0);
  if (tokens > maxTokens) throw new Error(`step of ${tokens} tokens, at most ${maxTokens}`);
  if (rows.some((row) => row.length < 1)) throw new Error("an empty chunk was scheduled");
  backend.submit(plan.pack(rows, ++stepNumber).words, plan.length);
  submitted.push(scheduler.submitted(rows));
  backend.checkPool();
  return rows;
}

/** The second half, of the oldest step that was submitted. */
export function complete(bench: Bench): SequenceOutput[] {
  const { scheduler, backend, plan } = bench;
  const oldest = bench.submitted.shift()!;
  bench.dead += oldest.rows.filter(({ sequence }) => sequence.status === "finished").length;
  const outputs = scheduler.apply(oldest, plan.unpack(backend.wait(plan.result)));
  backend.checkPool();
  return outputs;
}

/** As the engine loop: submits a step, and waits for the oldest one when `depth` are submitted or nothing more can be. */
export function advance(bench: Bench, depth: number): StepTrace {
  const rows = submit(bench);
  const wait = bench.submitted.length >= (rows.length > 0 ? depth : 1);
  return { rows, outputs: wait ? complete(bench) : [] };
}

export function steps(bench: Bench, count: number): StepTrace[] {
  return Array.from({ length: count }, () => step(bench));
}

/** Steps until nothing is left; throws when that takes more than `limit` steps or a step does nothing. */
export function runAll(bench: Bench, limit = 10_000): StepTrace[] {
  const all: StepTrace[] = [];
  while (bench.scheduler.hasWork) {
    const trace = step(bench);
    if (trace.rows.length === 0) throw new Error(`stalled: ${bench.scheduler.running.length} running, ${bench.scheduler.waiting.length} waiting`);
    all.push(trace);
    if (all.length > limit) throw new Error(`not finished after ${limit} steps`);
  }
  return all;
}

/** Chunk lengths of one sequence, step by step; 0 = not in the step. */
export function chunks(traces: readonly StepTrace[], of: Sequence): number[] {
  return traces.map(({ rows }) => rows.find((row) => row.sequence === of)?.length ?? 0);
}

/** Index of the step that gave the sequence its first token; -1 = none did. */
export function firstToken(traces: readonly StepTrace[], of: Sequence): number {
  return traces.findIndex(({ outputs }) => outputs.some((output) => output.sequence === of && output.token !== null));
}

export function generated(of: Sequence): number[] {
  return Array.from(of.tokens.subarray(of.promptLength, of.numTokens));
}

/** Small, seeded, good enough: Mulberry32. */
export function random(seed: number): { below(limit: number): number; chance(probability: number): boolean } {
  let state = seed >>> 0;
  const next = (): number => {
    state = (state + 0x6d2b79f5) >>> 0;
    let mixed = Math.imul(state ^ (state >>> 15), state | 1);
    mixed ^= mixed + Math.imul(mixed ^ (mixed >>> 7), mixed | 61);
    return ((mixed ^ (mixed >>> 14)) >>> 0) / 2 ** 32;
  };
  return { below: (limit) => Math.floor(next() * limit), chance: (probability) => next() < probability };
}
