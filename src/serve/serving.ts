import type { EngineInfo, EngineStats, GenerateRequest, StepOutput } from "../engine/types.ts";

/** The part of the engine that answering requests needs. */
export interface ServingEngine {
  readonly info: EngineInfo;
  stats(): EngineStats;
  generate(request: GenerateRequest, signal?: AbortSignal): AsyncGenerator<StepOutput>;
}

export interface ChatParams {
  messages: Record<string, unknown>[];
  /** Variables of the template: enable_thinking, date_string, … */
  kwargs: Record<string, unknown>;
}

/** Token ids → text as they come; holds back bytes of unfinished characters. */
export interface TextDecoderStream {
  push(ids: readonly number[]): string;
  flush(): string;
}

/** Holds back text that may be the start of a stop string. */
export interface StopStream {
  push(text: string): { text: string; matched: string | null };
  flush(): string;
}

/** Text ↔ token ids for one model. */
export interface Codec {
  /** Raw prompt: special tokens in the text are parsed, the model's BOS is added. */
  encode(text: string): number[];
  /** Rendered by the chat template. @throws HttpError 400 when the template refuses or there is none */
  encodeChat(params: ChatParams): number[];
  /** Raw bytes of one token; empty for an id that the tokenizer does not know (padding rows of the embedding). */
  tokenBytes(id: number): Uint8Array;
  /** @param continuation the text goes on behind its prompt (a raw completion), so the space before its first word counts */
  decoder(continuation: boolean): TextDecoderStream;
  stopMatcher(stops: readonly string[]): StopStream;
}

/** A loaded model ready to answer. */
export interface Serving {
  engine: ServingEngine;
  codec: Codec;
  /** Name clients see. */
  name: string;
  /** Tokens that prompt and answer may have together. */
  contextLength: number;
  /** Rows of the embedding: ids from 0 to vocab - 1. */
  vocab: number;
  eosTokenIds: readonly number[];
  /** Used when a request says nothing. */
  defaults: { temperature: number; topP: number };
}
