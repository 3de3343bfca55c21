import { invalid, shown } from "./errors.ts";
import { findRefusal } from "./refusals.ts";

/** What the frontend made of an OpenAI request, checked; absent and null options are null. */
export interface PreprocessedRequest {
  model: string | null;
  tokenIds: Uint32Array;
  maxTokens: number | null;
  ignoreEos: boolean;
  /** Strings; the frontend cuts the text at them, the worker stops at them only when it holds tokens back. */
  stop: string[];
  stopTokenIds: number[];
  eosTokenIds: number[];
  temperature: number | null;
  topP: number | null;
  seed: bigint | null;
  /** 0..20 alternatives per token; null = no logprobs. */
  logprobs: number | null;
  /** Control tokens have no text for stop strings to match. */
  skipSpecialTokens: boolean;
  priority: number;
  cacheSalt: string;
  healthCheck: boolean;
  /** The router wants it run whole on whichever worker gets it. */
  whole: boolean;
}

export const MAX_TOP_LOGPROBS = 20;
/** Of all stop strings together, where this worker itself looks for them: the automaton costs memory per character. */
export const MAX_STOP_CHARACTERS = 16_384;
/** Set by the router alone; the frontend strips it from what clients send. */
const RUN_WHOLE = "x-bypass-remote-prefill";
const U32 = 0xffffffff;
/** The largest float32, which is what travels in Dynamo's own types and in the engine's plan. */
const F32_MAX = 3.4028234663852886e38;
const SEED_MIN = -(2n ** 63n);
const SEED_MAX = 2n ** 64n - 1n;

type Fields = Record<string, unknown>;

const kind = (value: unknown) => (Array.isArray(value) ? "a list" : typeof value === "object" && value !== null ? "an object" : shown(value));
const expected = (path: string, what: string, value: unknown) => invalid(`${path}: expected ${what}, got ${kind(value)}`);

function section(request: Fields, name: string): Fields {
  const value = request[name];
  if (value === undefined || value === null) return {};
  if (typeof value !== "object" || Array.isArray(value)) throw expected(name, "an object", value);
  return value as Fields;
}
function optional<T>(fields: Fields, path: string, read: (value: unknown, path: string) => T): T | null {
  const value = fields[path.slice(path.indexOf(".") + 1)];
  return value === undefined || value === null ? null : read(value, path);
}
const number = (least: number, most: number, what: string) => (value: unknown, path: string) => {
  if (typeof value !== "number" || !(value >= least && value <= most)) throw expected(path, what, value);
  return value;
};
const integer = (least: number, most: number) => (value: unknown, path: string) => {
  if (typeof value !== "number" || !Number.isInteger(value) || value < least || value > most) throw expected(path, `an integer from ${least} to ${most}`, value);
  return value;
};
const boolean = (value: unknown, path: string) => {
  if (typeof value !== "boolean") throw expected(path, "true or false", value);
  return value;
};
const string = (value: unknown, path: string) => {
  if (typeof value !== "string") throw expected(path, "a string", value);
  return value;
};
const list =
  <T>(read: (value: unknown, path: string) => T) =>
  (value: unknown, path: string): T[] => {
    if (!Array.isArray(value)) throw expected(path, "a list", value);
    return value.map((item, i) => read(item, `${path}[${i}]`));
  };
/** A single string is a list of one. */
const strings = (value: unknown, path: string) => (typeof value === "string" ? [value] : list(string)(value, path)).filter((item) => item !== "");
const tokenId = integer(0, U32);

function seed(value: unknown, path: string): bigint {
  const exact = typeof value === "bigint" ? value : typeof value === "number" && Number.isSafeInteger(value) ? BigInt(value) : null;
  if (exact === null || exact < SEED_MIN || exact > SEED_MAX) throw expected(path, "an integer of 64 bits", value);
  return exact;
}

function tokenIds(value: unknown): Uint32Array {
  if (!Array.isArray(value)) throw expected("token_ids", "a list of token ids", value);
  if (value.length === 0) throw invalid("token_ids: the prompt is empty, expected at least one token");
  const ids = new Uint32Array(value.length);
  for (let i = 0; i < value.length; i++) {
    const id: unknown = value[i];
    if (typeof id !== "number" || !Number.isInteger(id) || id < 0 || id > U32) throw expected(`token_ids[${i}]`, "a token id", id);
    ids[i] = id;
  }
  return ids;
}

/**
 * Checks a decoded body.
 * @throws ProtocolError of class InvalidArgument that names the field, its value and what was expected
 */
export function parseRequest(body: unknown): PreprocessedRequest {
  if (typeof body !== "object" || body === null || Array.isArray(body)) throw expected("request", "an object", body);
  const request = body as Fields;
  for (const name of ["stop_conditions", "sampling_options", "output_options", "routing"]) section(request, name);
  const refusal = findRefusal(request);
  if (refusal !== null) throw invalid(refusal);
  const stop = section(request, "stop_conditions");
  const sampling = section(request, "sampling_options");
  const output = section(request, "output_options");
  const routing = section(request, "routing");
  const ignoreEos = optional(stop, "stop_conditions.ignore_eos", boolean) ?? false;
  const hidden = optional(stop, "stop_conditions.stop_token_ids_hidden", list(tokenId)) ?? [];
  const eos = optional(request, "eos_token_ids", list(tokenId)) ?? [];
  const logprobs = optional(output, "output_options.logprobs", integer(0, MAX_TOP_LOGPROBS));
  const stops = optional(stop, "stop_conditions.stop", strings) ?? [];
  const stopCharacters = stops.reduce((sum, { length }) => sum + length, 0);
  if (logprobs !== null && stopCharacters > MAX_STOP_CHARACTERS)
    throw expected("stop_conditions.stop", `at most ${MAX_STOP_CHARACTERS} characters in all where logprobs are asked for`, `${stopCharacters} characters`);
  return {
    model: optional(request, "model", string),
    tokenIds: tokenIds(request.token_ids),
    maxTokens: optional(stop, "stop_conditions.max_tokens", integer(1, U32)),
    ignoreEos,
    stop: stops,
    stopTokenIds: [
      ...(optional(stop, "stop_conditions.stop_token_ids", list(tokenId)) ?? []),
      ...(optional(stop, "stop_conditions.stop_token_ids_visible", list(tokenId)) ?? []),
    ],
    // The frontend sends the model's end tokens in both places.
    eosTokenIds: [...new Set([...eos, ...hidden])],
    temperature: optional(sampling, "sampling_options.temperature", number(0, F32_MAX, "a number from 0 to 3.4e38")),
    topP: optional(sampling, "sampling_options.top_p", (value, path) => {
      const p = number(0, 1, "a number above 0 and up to 1")(value, path);
      if (p === 0) throw expected(path, "a number above 0 and up to 1", value);
      return p;
    }),
    seed: optional(sampling, "sampling_options.seed", seed),
    logprobs,
    skipSpecialTokens: optional(output, "output_options.skip_special_tokens", boolean) ?? true,
    priority: optional(routing, "routing.priority", integer(-(2 ** 31), 2 ** 31 - 1)) ?? 0,
    cacheSalt: optional(routing, "routing.cache_salt", string) ?? "",
    healthCheck: request._HEALTH_CHECK === true,
    whole: (optional(request, "annotations", list(string)) ?? []).includes(RUN_WHOLE),
  };
}
