import { LS_MAX_LOGPROBS } from "./native/abi.gen.ts";
import { EngineError } from "./errors.ts";
import type { GenerateRequest, SamplingParams } from "./types.ts";

export interface RequestLimits {
  vocab: number;
  /** Tokens a sequence may hold by the model and its options. */
  contextLength: number;
  /** Tokens the whole KV pool holds. */
  poolTokens: number;
}

const invalid = (message: string, param: string, code: string | null = null): EngineError => new EngineError("invalid", message, param, code);

/**
 * The prompt as int32 ids (promptLength), or an EngineError of kind "invalid" that says what was given and what was expected.
 * Codes: "empty_prompt", "vocabulary", "context_length_exceeded", "pool".
 */
export function validateRequest(request: GenerateRequest, limits: RequestLimits): Int32Array {
  const { promptTokenIds: prompt } = request;
  const { length } = prompt;
  if (length === 0) throw invalid("the prompt is empty: expected at least one token", "prompt", "empty_prompt");
  if (length >= limits.contextLength) {
    throw invalid(
      `the prompt has ${length} tokens, the context length is ${limits.contextLength} tokens: expected at most ${limits.contextLength - 1}, since one token is generated`,
      "prompt", "context_length_exceeded",
    );
  }
  if (length >= limits.poolTokens) {
    throw invalid(`the prompt has ${length} tokens, the KV pool holds ${limits.poolTokens} tokens in all: expected at most ${limits.poolTokens - 1}`, "prompt", "pool");
  }
  const tokens = new Int32Array(length);
  for (let index = 0; index < length; index++) {
    const id = prompt[index]!;
    if (!Number.isInteger(id) || id < 0 || id >= limits.vocab) {
      throw invalid(`token id ${id} at position ${index} of the prompt: expected an integer from 0 to ${limits.vocab - 1}`, "prompt", "vocabulary");
    }
    tokens[index] = id;
  }
  validateSampling(request.sampling);
  for (const [param, ids] of [["eosTokenIds", request.eosTokenIds], ["stopTokenIds", request.stopTokenIds]] as const) {
    const bad = ids.find((id) => !Number.isInteger(id));
    if (bad !== undefined) throw invalid(`${param}: got ${bad}, expected integers`, param);
  }
  if (request.priority !== undefined && !Number.isFinite(request.priority)) throw invalid(`priority: got ${request.priority}, expected a number`, "priority");
  return tokens;
}

function validateSampling({ temperature, topP, maxTokens, logprobs, seed }: SamplingParams): void {
  // The plan carries f32: what overflows there would be refused with the whole step.
  if (!Number.isFinite(Math.fround(temperature)) || temperature < 0) throw invalid(`temperature: got ${temperature}, expected a number of at least 0`, "temperature");
  if (!(topP > 0 && topP <= 1)) throw invalid(`top_p: got ${topP}, expected a number above 0 and at most 1`, "top_p");
  if (maxTokens !== null && (!Number.isSafeInteger(maxTokens) || maxTokens < 1)) throw invalid(`max_tokens: got ${maxTokens}, expected an integer of at least 1`, "max_tokens");
  if (logprobs !== null && !(Number.isInteger(logprobs) && logprobs >= 0 && logprobs <= LS_MAX_LOGPROBS)) {
    throw invalid(`logprobs: got ${logprobs}, expected an integer from 0 to ${LS_MAX_LOGPROBS}`, "logprobs");
  }
  if (seed !== null && (seed < -(2n ** 63n) || seed >= 2n ** 64n)) throw invalid(`seed: got ${seed}, expected a 64-bit integer`, "seed");
}
