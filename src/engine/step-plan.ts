import { floatToWord, int32Words, wordToFloat } from "../util/words.ts";
import { EngineError } from "./errors.ts";
import {
  LS_MAX_LOGPROBS, LS_PLAN_HEADER_WORDS, LS_PLAN_ROW_WORDS, LS_RESULT_HEADER_WORDS, LS_RESULT_ROW_WORDS, LS_ROW_SAMPLE,
} from "./native/abi.gen.ts";
import type { Sequence } from "./sequence.ts";

/** The part of one sequence that a step computes: tokens [start, start + length). */
export interface Row {
  sequence: Sequence;
  start: number;
  /** A token that is not known yet is the only one of its row. */
  length: number;
  /** The chunk reaches the sequence's last token: a new one is sampled. */
  sample: boolean;
}

/** A step that the device has and whose result has not come. */
export interface SubmittedStep {
  rows: readonly Row[];
  /** Of each row, then: by its result the sequence may have ended and its slot be another's. */
  slots: readonly number[];
}

export interface RowResult {
  slot: number;
  /** null when the row did not sample. */
  token: number | null;
  logprob: number;
  /** [token, logprob] pairs by falling logprob. */
  top: [token: number, logprob: number][];
}

export interface StepResult {
  step: number;
  free: number;
  cached: number;
  held: number;
  total: number;
  micros: number;
  rows: RowResult[];
}

/** Logprob of a token that cannot be chosen. JSON has no infinities. */
const LOGPROB_FLOOR = -9999;
const finite = (logprob: number): number => (Number.isFinite(logprob) ? Math.max(logprob, LOGPROB_FLOOR) : LOGPROB_FLOOR);

/** A top_p that would become 0 in f32 still means: the most likely token. */
const SMALLEST_TOP_P = 1.1754943508222875e-38;

/** A step as native words, in buffers that live as long as the engine. */
export class StepPlan {
  readonly words: Int32Array;
  readonly result: Int32Array;
  length = 0;

  constructor(maxRows: number, maxTokens: number) {
    this.words = int32Words(LS_PLAN_HEADER_WORDS + maxRows * LS_PLAN_ROW_WORDS + maxTokens);
    this.result = int32Words(LS_RESULT_HEADER_WORDS + maxRows * (LS_RESULT_ROW_WORDS + 2 * LS_MAX_LOGPROBS));
  }

  /** Header, one fixed record per row, then the token ids of all rows (see ls_step_submit). */
  pack(rows: readonly Row[], step: number): this {
    const { words } = this;
    let at = LS_PLAN_HEADER_WORDS;
    let token = at + rows.length * LS_PLAN_ROW_WORDS;
    const tokens = rows.reduce((sum, row) => sum + row.length, 0);
    if (token + tokens > words.length) {
      throw new EngineError("engine", `step of ${rows.length} rows and ${tokens} tokens is larger than the plan buffer of ${words.length} words`);
    }
    words.fill(0, 0, at);
    words[0] = rows.length;
    words[1] = tokens;
    words[2] = step | 0;
    for (const { sequence, start, length, sample } of rows) {
      const { sampling } = sequence;
      words[at] = sequence.slot;
      words[at + 1] = start;
      words[at + 2] = length;
      words[at + 3] = sample ? LS_ROW_SAMPLE | ((sampling.logprobs ?? 0) << 8) : 0;
      words[at + 4] = floatToWord(sampling.temperature);
      words[at + 5] = floatToWord(Math.max(sampling.topP, SMALLEST_TOP_P));
      words[at + 6] = sequence.seedWords[0];
      words[at + 7] = sequence.seedWords[1];
      words.set(sequence.tokens.subarray(start, start + length), token);
      at += LS_PLAN_ROW_WORDS;
      token += length;
    }
    this.length = token;
    return this;
  }

  /** Reads `length` words of the result buffer. Counts in it are checked against its length. */
  unpack(length: number): StepResult {
    const { result } = this;
    const word = (index: number): number => {
      if (index >= length) throw new EngineError("engine", `step result ends at word ${length}, inside a record`);
      return result[index]!;
    };
    const count = word(0);
    const rows: RowResult[] = [];
    let at = LS_RESULT_HEADER_WORDS;
    for (let row = 0; row < count; row++) {
      const token = word(at + 1);
      const pairs = word(at + 3);
      if (pairs < 0 || pairs > LS_MAX_LOGPROBS) throw new EngineError("engine", `step result: row ${row} has ${pairs} alternatives, expected 0..${LS_MAX_LOGPROBS}`);
      const top: RowResult["top"] = [];
      for (let pair = 0; pair < pairs; pair++) {
        const entry = at + LS_RESULT_ROW_WORDS + 2 * pair;
        top.push([word(entry), finite(wordToFloat(word(entry + 1)))]);
      }
      rows.push({ slot: word(at), token: token < 0 ? null : token, logprob: finite(wordToFloat(word(at + 2))), top });
      at += LS_RESULT_ROW_WORDS + 2 * pairs;
    }
    if (at !== length) throw new EngineError("engine", `step result has ${length} words, its ${count} rows take ${at}`);
    return { step: word(1), free: word(2), cached: word(3), held: word(4), total: word(5), micros: word(6), rows };
  }
}
