/** What staging adds to the computation of a prompt, on the engine below the scheduler. */
import { openModel } from "../../src/model/model.ts";
import { findLibrary } from "../../src/engine/native/library.ts";
import { KvNode } from "../../test/support/kv-node.ts";
import { tokenPrompt } from "./measure.ts";
import { median } from "./report.ts";

export interface StagingRow {
  /** The prompt's time without and with staging; medians, in turns. */
  plainMs: number;
  stagedMs: number;
  /** A plain copy of the same bytes. */
  copyMs: number;
  megabytes: number;
  /** Layers staged by steps, those of them copied while later layers were computed, and the time that steps took longer for the rest; per prompt. */
  layers: number;
  early: number;
  waitMs: number;
}

const CHUNK = 128;

/** One compute thread, so that the copying thread has the other core. */
export async function staging(directory: string, length: number, reps: number): Promise<StagingRow> {
  const model = await openModel(directory);
  const options = {
    spec: model.spec, weights: model.weights, libraryPath: await findLibrary(), contextLength: length + 16, maxNumSeqs: 4, chunkedPrefillSize: CHUNK, maxTotalTokens: 2 * (length + 64),
    memoryUtilization: 0.9, kvCacheDtype: "f32", kvScales: null, prefixCache: false, threads: 1, gpu: null, transfer: null,
  } as const;
  using node = new KvNode(options, { host: "127.0.0.1" });
  const plain: number[] = [];
  const staged: number[] = [];
  const time = (body: () => void): number => {
    const begun = performance.now();
    body();
    return performance.now() - begun;
  };
  let bytes = 0;
  const before = node.stats();
  for (let i = 0; i < reps; i++) {
    const prompt = tokenPrompt(length, 1000 + i);
    const alone = () => {
      const sequence = node.sequence(prompt);
      node.open(sequence);
      node.compute(sequence, length - 1, false, CHUNK);
      node.backend.closeSequence(sequence.slot, 0);
    };
    const withStaging = () => {
      const source = node.prefill(prompt, CHUNK);
      bytes = node.stats().staged_bytes_lo;
      node.release(source.id);
    };
    for (const [list, body] of i % 2 ? ([[staged, withStaging], [plain, alone]] as const) : ([[plain, alone], [staged, withStaging]] as const)) list.push(time(body));
    node.events();
  }
  const after = node.stats();
  const from = new Uint8Array(bytes).fill(1);
  const copies = Array.from({ length: 3 }, () => {
    const to = new Uint8Array(bytes);
    return time(() => to.set(from));
  });
  return {
    plainMs: median(plain), stagedMs: median(staged), copyMs: median(copies), megabytes: bytes / 1e6, layers: (after.stage_layers - before.stage_layers) / reps,
    early: (after.stage_layers_early - before.stage_layers_early) / reps, waitMs: (after.stage_wait_micros_lo - before.stage_wait_micros_lo) / 1000 / reps,
  };
}
