import type { MessagePort } from "node:worker_threads";
import { joinU64 } from "../util/words.ts";
import type { EngineErrorKind } from "./errors.ts";
import { LS_PAGE_TOKENS, ls_event } from "./native/abi.gen.ts";
import type { SequenceOutput } from "./scheduler.ts";
import type { TransferNote } from "./pulls.ts";
import type { SequenceInit } from "./sequence.ts";
import type { EngineInfo, EngineOptions, EngineStats, FinishReason, KvEvent, KvSource, LoadProgress, Refusal } from "./types.ts";

/** What the main thread hands to the engine Worker. */
export interface EngineWorkerData {
  kind: "layerscale-engine";
  options: EngineOptions;
  checkPages: boolean;
  /** See EngineStartOptions; null = as the device likes it. */
  stepsSubmitted: number | null;
  /** Commands in, reports out. */
  port: MessagePort;
  /** One int32 that grows with each command: the Worker sleeps on it. */
  signal: Int32Array;
}

/** Main → engine. The Worker drains its port between steps. */
export type Command =
  | ({ kind: "add" } & SequenceInit)
  | { kind: "cancel"; key: number }
  | { kind: "clear"; id: number }
  /** No step starts between pause and resume; sequences keep their pages, newcomers wait. */
  | { kind: "pause"; id: number; paused: boolean }
  /** A copy of another engine that no sequence will fetch. */
  | { kind: "drop"; source: KvSource }
  /** A copy of this engine that nobody has been told of. */
  | { kind: "release"; copy: bigint }
  | { kind: "stop" };

/** Engine → main. At most one "step" per engine step. */
export type Report =
  | { kind: "progress"; progress: LoadProgress; /** Address for ls_load_progress. */ handle: number | null }
  | { kind: "ready"; info: EngineInfo; stats: EngineStats }
  | StepMessage
  /** A "clear" or "pause" has been carried out. */
  | { kind: "done"; id: number }
  | { kind: "fatal"; errorKind: EngineErrorKind; message: string; param: string | null; code: string | null; stats: EngineStats | null }
  /** The native engine is destroyed. */
  | { kind: "stopped" };

export interface StepMessage {
  kind: "step";
  stats: EngineStats;
  /** Packed by packOutputs: one array crosses the threads faster than an object per sequence. */
  outputs: Float64Array;
  /** Texts of outputs that ended with "error", and which of them are refusals. */
  errors: [key: number, message: string, refusal: Refusal | null][];
  /** Copies that were offered, by the requests they belong to. */
  staged: [key: number, copy: bigint][];
  transfers: TransferNote[];
  /** Words of ls_events_drain. */
  events: Int32Array | null;
}

export interface PackedOutput {
  key: number;
  token: number | null;
  finishReason: FinishReason | null;
  cachedTokens: number;
  queuedMs: number | null;
  logprob: number;
  top: [token: number, logprob: number][];
}

const FINISH_CODES = [null, "stop", "length", "cancelled", "error"] as const satisfies (FinishReason | null)[];
const OUTPUT_WORDS = 7;

/** Per output [key, token | -1, finish code, cached tokens, queued ms | -1, logprob, n, then n pairs token, logprob]. */
export function packOutputs(outputs: readonly SequenceOutput[]): Float64Array {
  let words = 0;
  for (const { top } of outputs) words += OUTPUT_WORDS + 2 * top.length;
  const packed = new Float64Array(words);
  let at = 0;
  for (const { sequence, token, logprob, top, finishReason } of outputs) {
    packed[at] = sequence.key;
    packed[at + 1] = token ?? -1;
    packed[at + 2] = finishReason === null ? 0 : FINISH_CODES.indexOf(finishReason);
    packed[at + 3] = sequence.numCached;
    packed[at + 4] = sequence.admittedAt === null ? -1 : Math.max(0, sequence.admittedAt - sequence.submittedAt);
    packed[at + 5] = logprob;
    packed[at + 6] = top.length;
    at += OUTPUT_WORDS;
    for (const [candidate, value] of top) {
      packed[at] = candidate;
      packed[at + 1] = value;
      at += 2;
    }
  }
  return packed;
}

const NO_TOP: PackedOutput["top"] = [];

export function unpackOutputs(packed: Float64Array): PackedOutput[] {
  const outputs: PackedOutput[] = [];
  for (let at = 0; at < packed.length; ) {
    const token = packed[at + 1]!;
    const queuedMs = packed[at + 4]!;
    const pairs = packed[at + 6]!;
    const top = pairs === 0 ? NO_TOP : Array.from({ length: pairs }, (_, i): [number, number] => [packed[at + OUTPUT_WORDS + 2 * i]!, packed[at + OUTPUT_WORDS + 2 * i + 1]!]);
    outputs.push({
      key: packed[at]!, token: token < 0 ? null : token, finishReason: FINISH_CODES[packed[at + 2]!] ?? null,
      cachedTokens: packed[at + 3]!, queuedMs: queuedMs < 0 ? null : queuedMs, logprob: packed[at + 5]!, top,
    });
    at += OUTPUT_WORDS + 2 * pairs;
  }
  return outputs;
}

/** Words of ls_events_drain as events. */
export function unpackEvents(words: Int32Array): KvEvent[] {
  const events: KvEvent[] = [];
  for (let at = 0; at < words.length; ) {
    switch (words[at]) {
      case ls_event.LS_EVENT_STORED: {
        const parent = words[at + 2]!;
        const tokenIds = Array.from(words.subarray(at + 5, at + 5 + LS_PAGE_TOKENS));
        events.push({ kind: "stored", page: words[at + 1]!, parent: parent < 0 ? null : parent, domain: joinU64(words[at + 3]!, words[at + 4]!), tokenIds });
        at += 5 + LS_PAGE_TOKENS;
        break;
      }
      case ls_event.LS_EVENT_REMOVED:
        events.push({ kind: "removed", page: words[at + 1]! });
        at += 2;
        break;
      case ls_event.LS_EVENT_CLEARED:
        events.push({ kind: "cleared" });
        at += 1;
        break;
      default:
        throw new Error(`prefix-cache event ${words[at]} at word ${at} is not known`);
    }
  }
  return events;
}
