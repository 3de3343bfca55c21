import { z } from "zod";
import type { SamplingParams } from "../../engine/types.ts";
import { badRequest, type HttpError } from "../http-errors.ts";
import { exactInteger, type JsonBody } from "../json.ts";
import type { Serving } from "../serving.ts";

const MAX_STOPS = 4;
const MAX_STOP_BYTES = 64;
const SEED_MIN = -(2n ** 63n);
const SEED_MAX = 2n ** 64n - 1n;

/** A short picture of a value for an error message. */
export function preview(value: unknown): string {
  if (value === undefined) return "nothing";
  // JSON has no word for a number that overflowed.
  const text = typeof value === "number" || typeof value === "bigint" ? String(value) : JSON.stringify(value);
  return text.length > 80 ? `${text.slice(0, 77)}…` : text;
}

export const expected = (param: string, what: string, value: unknown): HttpError => badRequest(`${param}: expected ${what}, got ${preview(value)}`, param);

// Every message of the zod types below says what was expected; the field and the value are added by parseFields.
const number = (min: number, max: number, words: string) => z.number(words).min(min, words).max(max, words).nullish();
const integer = (min: number, max: number, words: string) => z.int(words).min(min, words).max(max, words).nullish();
const bool = z.boolean("true or false").nullish();

const TEMPERATURE = "a number from 0 to 2";
const TOP_P = "a number above 0, up to 1";
const STOPS = `a string or a list of up to ${MAX_STOPS} strings, each 1 to ${MAX_STOP_BYTES} bytes long`;
const TOKENS = `an integer from 1 to ${Number.MAX_SAFE_INTEGER}`;

/** A value that is read by hand. */
export const anything = z.unknown().optional();

/** Stop strings of a request. @throws HttpError 400 */
export function readStops(value: unknown): string[] {
  const list = typeof value === "string" ? [value] : (value ?? []);
  const fits = (item: unknown) => typeof item === "string" && item !== "" && Buffer.byteLength(item) <= MAX_STOP_BYTES;
  if (!Array.isArray(list) || list.length > MAX_STOPS || !list.every(fits)) throw expected("stop", STOPS, value);
  return list as string[];
}

/** Fields that chat and text completions share. */
export const commonFields = {
  model: z.string("a string").nullish(),
  temperature: number(0, 2, TEMPERATURE),
  top_p: z.number(TOP_P).gt(0, TOP_P).max(1, TOP_P).nullish(),
  max_tokens: integer(1, Number.MAX_SAFE_INTEGER, TOKENS),
  seed: z.number("an integer of 64 bits").nullish(),
  ignore_eos: bool,
  stop: anything,
  stream: bool,
  stream_options: z
    .strictObject(
      { include_usage: bool, include_obfuscation: z.literal(false, "false: streams are not padded").nullish(), continuous_usage_stats: z.literal(false, "false: usage comes once, at the end").nullish() },
      'an object with "include_usage"',
    )
    .nullish(),
};

export type CommonFields = z.infer<z.ZodObject<typeof commonFields>>;

/** Carried for bookkeeping on the client's side; nothing here depends on them. */
const IGNORED = new Set(["user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"]);

/** Parameters that exist elsewhere and not here: the values that ask for nothing are accepted, any other is refused. */
const isEmpty = (value: unknown): boolean => typeof value === "object" && value !== null && Object.keys(value).length === 0;
const is = (...neutral: unknown[]) => (value: unknown) => neutral.includes(value);
const NOTHING = () => false;

const refusedCommon: Record<string, (value: unknown) => boolean> = {
  n: is(1),
  best_of: is(1),
  top_k: is(-1, 0),
  min_p: is(0),
  frequency_penalty: is(0),
  presence_penalty: is(0),
  repetition_penalty: is(1),
  length_penalty: is(1),
  min_tokens: is(0),
  logit_bias: isEmpty,
  logits_processors: isEmpty,
  stop_token_ids: isEmpty,
  include_stop_str_in_output: is(false),
  skip_special_tokens: is(true),
  use_beam_search: is(false),
  early_stopping: is(false),
  echo: is(false),
  suffix: is(""),
  prompt_logprobs: NOTHING,
  prompt_embeds: NOTHING,
  return_token_ids: is(false),
  truncate_prompt_tokens: NOTHING,
  guided_json: NOTHING,
  guided_regex: NOTHING,
  guided_choice: NOTHING,
  guided_grammar: NOTHING,
  structured_outputs: NOTHING,
  max_thinking_tokens: NOTHING,
  priority: is(0),
  cache_salt: NOTHING,
  response_format: (value) => typeof value === "object" && value !== null && (value as { type?: unknown }).type === "text",
};

export interface FieldTable {
  schema: z.ZodObject;
  refused: Record<string, (value: unknown) => boolean>;
}

export function fieldTable<S extends z.ZodRawShape>(shape: S, refused: Record<string, (value: unknown) => boolean>): { schema: z.ZodObject<S>; refused: FieldTable["refused"] } {
  const all = { ...refusedCommon, ...refused };
  for (const name of Object.keys(shape)) delete all[name];
  return { schema: z.object(shape), refused: all };
}

export const neutral = { is, isEmpty, NOTHING };

/** @throws HttpError 400 naming the first field at fault: a refused one, an unknown one, or one with a bad value */
export function parseFields<S extends z.ZodRawShape>(table: { schema: z.ZodObject<S>; refused: FieldTable["refused"] }, fields: Record<string, unknown>): z.infer<z.ZodObject<S>> {
  for (const name of Object.keys(fields)) {
    if (Object.hasOwn(table.schema.shape, name) || IGNORED.has(name)) continue;
    const isNeutral = Object.hasOwn(table.refused, name) ? table.refused[name] : undefined;
    if (!isNeutral) throw badRequest(`unknown parameter ${preview(name)}`, name.slice(0, 80));
    const value = fields[name];
    if (value !== null && !isNeutral(value)) throw badRequest(`${name}: ${preview(value)} is not supported by this server`, name);
  }
  const parsed = table.schema.safeParse(fields);
  if (parsed.success) return parsed.data as z.infer<z.ZodObject<S>>;
  const issue = parsed.error.issues[0] as z.core.$ZodIssue;
  const extra = issue.code === "unrecognized_keys" ? [issue.keys[0] as string] : [];
  const path = [...issue.path.map(String), ...extra];
  const param = path.join(".");
  if (extra.length > 0) throw badRequest(`unknown parameter ${preview(param)}`, param);
  let value: unknown = fields;
  for (const key of path) value = (value as Record<string, unknown> | undefined)?.[key];
  throw expected(param, issue.message, value);
}

/** The seed with all its 64 bits: a JSON number beyond 2^53 is read again from the text. */
function seedOf(body: JsonBody, seed: number | null | undefined): bigint | null {
  if (seed === null || seed === undefined) return null;
  const exact = Number.isSafeInteger(seed) ? BigInt(seed) : exactInteger(body, "seed");
  if (exact === null || exact < SEED_MIN || exact > SEED_MAX) throw expected("seed", "an integer of 64 bits", exact ?? seed);
  return exact;
}

/** Absent temperature and top_p: what the model's own settings say. */
export function samplingOf(serving: Serving, body: JsonBody, fields: CommonFields, maxTokens: number | null, logprobs: number | null): SamplingParams {
  return {
    temperature: fields.temperature ?? serving.defaults.temperature,
    topP: fields.top_p ?? serving.defaults.topP,
    seed: seedOf(body, fields.seed),
    // No sequence is longer than the context, and engine words have 32 bits.
    maxTokens: maxTokens === null ? null : Math.min(maxTokens, serving.contextLength),
    ignoreEos: fields.ignore_eos ?? false,
    logprobs,
  };
}

/** More bytes than any token of a known vocabulary stands for (the longest are runs of 128 spaces). */
const MAX_TOKEN_BYTES = 256;

/** Refuses a text that cannot fit whatever its tokens are, before time is spent on tokenizing it. @throws HttpError 400 */
export function checkTextLength(serving: Serving, characters: number, param: string): void {
  if (characters < serving.contextLength * MAX_TOKEN_BYTES) return;
  throw badRequest(`the prompt has ${characters} characters; the context of ${serving.name} has ${serving.contextLength} tokens`, param, "context_length_exceeded");
}

/** @throws HttpError 400 with both numbers when nothing would fit behind the prompt */
export function checkContext(serving: Serving, tokens: number, param: string): void {
  if (tokens < serving.contextLength) return;
  throw badRequest(
    `the prompt has ${tokens} tokens; the context of ${serving.name} has ${serving.contextLength}, and at least one must be left for the answer`,
    param,
    "context_length_exceeded",
  );
}
