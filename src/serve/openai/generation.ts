import { EngineError } from "../../engine/errors.ts";
import type { GenerateRequest, SamplingParams, TokenLogprob, Usage } from "../../engine/types.ts";
import type { Serving } from "../serving.ts";

export interface TextRequest {
  /** For logs. */
  id: string;
  promptTokenIds: readonly number[];
  sampling: SamplingParams;
  /** Never part of the text. */
  stops: readonly string[];
  /** The text goes on behind its prompt. */
  continuation: boolean;
}

/** A token of the answer as the client may see it. */
export interface AnswerToken extends TokenLogprob {
  /** Code points of text before this token. */
  textOffset: number;
}

/** One step's worth of an answer. The last one carries finishReason. */
export interface TextDelta {
  text: string;
  finishReason: "stop" | "length" | null;
  usage: Usage;
  /** Filled only when logprobs were asked for. */
  tokens: AnswerToken[];
}

/**
 * Runs one sequence and turns tokens into text. The same text comes out however it is consumed, so streamed deltas
 * join to exactly the whole answer. A stop string ends the sequence at once: the engine is told by closing its generator.
 * @throws EngineError when the engine refuses or fails; the signal's reason when it was aborted
 */
export async function* generateText(serving: Serving, request: TextRequest, signal: AbortSignal): AsyncGenerator<TextDelta, void> {
  const { engine, codec, eosTokenIds } = serving;
  const engineRequest: GenerateRequest = {
    id: request.id,
    promptTokenIds: request.promptTokenIds,
    sampling: request.sampling,
    eosTokenIds,
    stopTokenIds: [],
  };
  const decoder = codec.decoder(request.continuation);
  const matcher = request.stops.length > 0 ? codec.stopMatcher(request.stops) : null;
  let offset = 0;
  let completionTokens = 0;
  for await (const output of engine.generate(engineRequest, signal)) {
    const delta: TextDelta = { text: "", finishReason: null, usage: output.usage, tokens: [] };
    for (const [i, id] of output.tokenIds.entries()) {
      completionTokens++;
      const ends = output.stopTokenId !== null && i === output.tokenIds.length - 1;
      const logprob = output.logprobs?.[i];
      if (logprob) delta.tokens.push({ ...logprob, textOffset: offset });
      // The token that ended the answer is counted and has a logprob, but is no text, special or not.
      const piece = ends ? "" : decoder.push([id]);
      if (logprob) offset += codePoints(piece);
      const released = matcher ? matcher.push(piece) : { text: piece, matched: null };
      delta.text += released.text;
      if (released.matched !== null) {
        yield { ...delta, finishReason: "stop", usage: { ...output.usage, completionTokens } };
        return;
      }
    }
    switch (output.finishReason) {
      case null:
        yield delta;
        break;
      case "stop":
      case "length": {
        const rest = decoder.flush();
        const released = matcher ? matcher.push(rest) : { text: rest, matched: null };
        delta.text += released.text;
        if (matcher && released.matched === null) delta.text += matcher.flush();
        yield { ...delta, finishReason: released.matched === null ? output.finishReason : "stop" };
        return;
      }
      case "cancelled":
        throw signal.aborted ? signal.reason : new EngineError("unavailable", "the request was cancelled by the server");
      case "error":
        throw new EngineError("engine", output.error ?? "the engine gave no reason");
    }
  }
  throw signal.aborted ? signal.reason : new EngineError("engine", "the sequence ended without a finish reason");
}

function codePoints(text: string): number {
  let n = 0;
  for (let i = 0; i < text.length; i++) {
    const unit = text.charCodeAt(i);
    if (unit < 0xdc00 || unit > 0xdfff) n++;
  }
  return n;
}

export interface WholeText {
  text: string;
  finishReason: "stop" | "length";
  usage: Usage;
  tokens: AnswerToken[];
}

/** Runs a sequence to its end. */
export async function collectText(deltas: AsyncGenerator<TextDelta, void>): Promise<WholeText> {
  let text = "";
  const tokens: AnswerToken[] = [];
  for await (const delta of deltas) {
    text += delta.text;
    tokens.push(...delta.tokens);
    if (delta.finishReason !== null) return { text, finishReason: delta.finishReason, usage: delta.usage, tokens };
  }
  throw new EngineError("engine", "the sequence ended without a finish reason");
}

/** Items of several generators as they come, each with the index of its source; at most one item per source is held. */
export async function* merge<T>(sources: readonly AsyncGenerator<T, void>[]): AsyncGenerator<{ index: number; item: T }, void> {
  type Settled = { index: number; next: IteratorResult<T, void> } | { error: unknown };
  const ready: Settled[] = [];
  let wake: () => void = () => {};
  const pull = (index: number) => {
    const settle = (entry: Settled) => {
      ready.push(entry);
      wake();
    };
    (sources[index] as AsyncGenerator<T, void>).next().then(
      (next) => settle({ index, next }),
      (error: unknown) => settle({ error }),
    );
  };
  let open = sources.length;
  sources.forEach((_, index) => pull(index));
  try {
    while (open > 0) {
      const entry = ready.shift();
      if (entry === undefined) {
        await new Promise<void>((resolve) => (wake = resolve));
        continue;
      }
      if ("error" in entry) throw entry.error;
      if (entry.next.done) {
        open--;
        continue;
      }
      yield { index: entry.index, item: entry.next.value };
      pull(entry.index);
    }
  } finally {
    // A source that waits for its engine output ends when the request's signal is aborted; it must not hold this one up.
    for (const source of sources) void source.return().catch(() => {});
  }
}
