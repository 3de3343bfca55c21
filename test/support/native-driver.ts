/** Drives the native library step by step with tokens given in advance, below the scheduler: what golden tests compare. */
import type { EngineOptions } from "../../src/engine/types.ts";
import { loadEngine, planPool } from "../../src/engine/loader.ts";
import { FfiBackend } from "../../src/engine/native/ffi-backend.ts";
import { findLibrary } from "../../src/engine/native/library.ts";
import { maxBatchTokens } from "../../src/engine/step-budget.ts";
import { Sequence } from "../../src/engine/sequence.ts";
import { StepPlan, type Row, type RowResult } from "../../src/engine/step-plan.ts";
import type { LoadedModel } from "../../src/model/types.ts";

export interface Forced {
  prompt: readonly number[];
  /** Tokens to feed after the prompt, whatever was sampled. */
  continuation: readonly number[];
}

interface Run {
  item: Forced;
  sequence: Sequence;
  predictions: Prediction[];
  preempted: boolean;
}

/** Position i: the distribution that predicts continuation[i]. */
export type Prediction = RowResult;

export interface Scenario {
  /** Tokens of the prompt computed in one step; default all. */
  chunk?: number;
  /** Other sequences that run in the same steps. */
  company?: number;
  /** Close and open again after this many continuation tokens, with everything computed so far committed. */
  preemptAfter?: number;
}

export class NativeDriver implements Disposable {
  readonly #backend: FfiBackend;
  readonly #plans: StepPlan;
  #step = 0;
  #keys = 0;

  private constructor(options: EngineOptions) {
    const tokens = maxBatchTokens(options);
    this.#backend = new FfiBackend(options, tokens);
    this.#plans = new StepPlan(options.maxNumSeqs, tokens);
    loadEngine(this.#backend, options, planPool(options), this.#plans, () => {});
  }

  static async create(model: LoadedModel, overrides: Partial<EngineOptions> = {}): Promise<NativeDriver> {
    return new NativeDriver({
      spec: model.spec, weights: model.weights, libraryPath: await findLibrary(), contextLength: Math.min(1024, model.spec.maxContext), maxNumSeqs: 32,
      chunkedPrefillSize: 4096, maxTotalTokens: 16384, memoryUtilization: 0.5, kvCacheDtype: "f32", prefixCache: true, threads: 2, gpu: null, transfer: null,
      ...overrides,
    });
  }

  get isa(): string {
    return this.#backend.device.isa;
  }
  get isas(): string[] {
    return this.#backend.device.isas;
  }
  get held(): number {
    return this.#backend.poolStats().held;
  }

  clearCache(): void {
    this.#backend.clearCache();
  }

  /** Runs all items side by side; returns the predictions of each, and how many prompt tokens were known when it was opened. */
  run(items: readonly Forced[], scenario: Scenario = {}): { predictions: Prediction[][]; known: number[] } {
    const runs = [...items, ...companions(items, scenario.company ?? 0)].map((item) => this.#open(item));
    const known = runs.slice(0, items.length).map((run) => run.sequence.numComputed);
    for (;;) {
      const rows: Row[] = [];
      for (const run of runs) {
        const { item } = run;
        const known = item.prompt.length + run.predictions.length;
        if (run.predictions.length === item.continuation.length) continue;
        if (scenario.preemptAfter !== undefined && run.predictions.length === scenario.preemptAfter && !run.preempted) this.#preempt(run);
        const length = Math.min(known - run.sequence.numComputed, scenario.chunk ?? Infinity);
        rows.push({ sequence: run.sequence, start: run.sequence.numComputed, length, sample: run.sequence.numComputed + length === known });
      }
      if (rows.length === 0) break;
      this.#backend.submit(this.#plans.pack(rows, ++this.#step).words, this.#plans.length);
      const result = this.#plans.unpack(this.#backend.wait(this.#plans.result));
      rows.forEach((row, index) => {
        const run = runs.find((candidate) => candidate.sequence === row.sequence)!;
        row.sequence.numComputed += row.length;
        if (row.sample) {
          run.predictions.push(result.rows[index]!);
          row.sequence.append(run.item.continuation[run.predictions.length - 1]!);
        }
      });
    }
    for (const run of runs) this.#backend.closeSequence(run.sequence.slot, run.sequence.numComputed);
    this.#backend.checkPool();
    return { predictions: runs.slice(0, items.length).map((run) => run.predictions), known };
  }

  #open(item: Forced): Run {
    return { item, sequence: this.#sequence([...item.prompt]), predictions: [], preempted: false };
  }

  #sequence(tokens: number[]): Sequence {
    const sequence = new Sequence({
      key: ++this.#keys, prompt: Int32Array.from(tokens), eosTokenIds: [], stopTokenIds: [], priority: 0, cacheDomain: 0n, internal: false, submittedAt: 0,
      sampling: { temperature: 0, topP: 1, seed: 1n, maxTokens: null, ignoreEos: true, logprobs: 20 },
    });
    const { slot, start } = this.#backend.openSequence(Int32Array.from(tokens), tokens.length, 0n);
    sequence.slot = slot;
    sequence.numComputed = start;
    return sequence;
  }

  #preempt(run: Run): void {
    this.#backend.closeSequence(run.sequence.slot, run.sequence.numComputed);
    run.preempted = true;
    run.sequence = this.#sequence([...run.item.prompt, ...run.item.continuation.slice(0, run.predictions.length)]);
  }

  [Symbol.dispose](): void {
    this.#backend.destroy();
  }
}

/** Other prompts of other lengths, made of the items' own tokens in another order. */
function companions(items: readonly Forced[], count: number): Forced[] {
  const source = items.flatMap((item) => item.prompt);
  return Array.from({ length: count }, (_, i) => ({
    prompt: Array.from({ length: 3 + 7 * i }, (_, j) => source[(i * 31 + j * 17 + 5) % source.length]!),
    continuation: Array.from({ length: 20 + i }, (_, j) => source[(i * 13 + j * 5) % source.length]!),
  }));
}
