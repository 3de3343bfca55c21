import { shown } from "./errors.ts";
import type { FieldSection } from "./fields.ts";

/** Options that a request may carry and this engine does not apply: refused by name instead of ignored. */

export interface Refusal {
  section: FieldSection;
  field: string;
  /** Values that ask for nothing; null and absent always do. */
  neutral: (value: unknown) => boolean;
  /** Ends the sentence "<field> = <value> is not supported: ". */
  expected: string;
}

const one = (value: unknown) => value === 1;
const zero = (value: unknown) => value === 0;
const no = (value: unknown) => value === false;
const never = () => false;
const emptyText = (value: unknown) => value === "";
const isObject = (value: unknown): value is Record<string, unknown> => typeof value === "object" && value !== null && !Array.isArray(value);
/** An object or list that holds nothing, at any depth. */
const hollow = (value: unknown): boolean =>
  value === null || (Array.isArray(value) && value.every(hollow)) || (isObject(value) && Object.values(value).every(hollow));

export const REFUSALS: readonly Refusal[] = [
  { section: "sampling_options", field: "n", neutral: one, expected: "one choice per request" },
  { section: "sampling_options", field: "best_of", neutral: one, expected: "best_of is 1" },
  { section: "sampling_options", field: "use_beam_search", neutral: no, expected: "no beam search" },
  { section: "sampling_options", field: "length_penalty", neutral: (value) => zero(value) || one(value), expected: "no beam search, so no length_penalty" },
  { section: "sampling_options", field: "top_k", neutral: (value) => value === -1 || value === 0, expected: "top_k is off (-1 or 0); use top_p" },
  { section: "sampling_options", field: "min_p", neutral: zero, expected: "min_p is 0; use top_p" },
  { section: "sampling_options", field: "frequency_penalty", neutral: zero, expected: "frequency_penalty is 0" },
  { section: "sampling_options", field: "presence_penalty", neutral: zero, expected: "presence_penalty is 0" },
  { section: "sampling_options", field: "repetition_penalty", neutral: one, expected: "repetition_penalty is 1" },
  { section: "sampling_options", field: "guided_decoding", neutral: hollow, expected: "no guided decoding (json, regex, choice, grammar, response_format, forced tool_choice)" },
  { section: "stop_conditions", field: "min_tokens", neutral: zero, expected: "min_tokens is 0" },
  { section: "stop_conditions", field: "max_thinking_tokens", neutral: never, expected: "no max_thinking_tokens" },
  { section: "output_options", field: "prompt_logprobs", neutral: never, expected: "no prompt_logprobs (echo with logprobs asks for them)" },
  { section: "routing", field: "lora_name", neutral: emptyText, expected: "no LoRA adapters" },
  { section: "routing", field: "dp_rank", neutral: (value) => zero(value) || value === 0xffffffff, expected: "data-parallel rank 0, the only one" },
  { section: "request", field: "multi_modal_data", neutral: hollow, expected: "text only, no image, video or audio input" },
  { section: "request", field: "multi_modal_uuids", neutral: hollow, expected: "text only, no image, video or audio input" },
  { section: "request", field: "encoder_result", neutral: hollow, expected: "text only, no image, video or audio input" },
  { section: "request", field: "prompt_embeds", neutral: emptyText, expected: "a prompt of token ids, no prompt embeddings" },
];

/** Why the request cannot be served, naming the option; null when nothing of the list is asked for. */
export function findRefusal(request: Record<string, unknown>): string | null {
  for (const { section, field, neutral, expected } of REFUSALS) {
    const holder = section === "request" ? request : request[section];
    if (!isObject(holder)) continue;
    const value = holder[field];
    if (value === undefined || value === null || neutral(value)) continue;
    return `${field} = ${shown(value)} is not supported by this worker: ${expected}`;
  }
  return null;
}
