import { randomUUID } from "node:crypto";
import { z } from "zod";
import type { SamplingParams, Usage } from "../../engine/types.ts";
import { answer, readRequest } from "../answer.ts";
import type { RequestContext } from "../app.ts";
import { badRequest, refuseSession } from "../http-errors.ts";
import { type JsonBody, parseJsonObject } from "../json.ts";
import type { Serving } from "../serving.ts";
import { type AnswerToken, collectText, generateText, merge, type TextDelta } from "./generation.ts";
import { classicLogprobs } from "./logprobs.ts";
import { anything, checkContext, checkTextLength, commonFields, expected, fieldTable, neutral, parseFields, readStops, samplingOf } from "./schema.ts";
import { sumUsage, usageObject } from "./usage.ts";

const MAX_LOGPROBS = 5;
const LOGPROBS = `an integer from 0 to ${MAX_LOGPROBS}`;
/** Prompts of one request; each is a sequence and a choice. */
const MAX_PROMPTS = 1024;
const PROMPT = "a string, a list of strings, a list of token ids, or a list of such lists";

const fields = fieldTable(
  {
    ...commonFields,
    prompt: anything,
    logprobs: z.int(LOGPROBS).min(0, LOGPROBS).max(MAX_LOGPROBS, LOGPROBS).nullish(),
  },
  { add_special_tokens: neutral.is(true) },
);

interface CompletionCall {
  prompts: (string | number[])[];
  sampling: SamplingParams;
  stops: string[];
  stream: boolean;
  includeUsage: boolean;
}

/** @throws HttpError 400 */
function readCompletion(serving: Serving, body: JsonBody): CompletionCall {
  const read = parseFields(fields, body.fields);
  return {
    prompts: readPrompts(read.prompt, serving.vocab),
    sampling: samplingOf(serving, body, read, read.max_tokens ?? null, read.logprobs ?? null),
    stops: readStops(read.stop),
    stream: read.stream ?? false,
    includeUsage: read.stream_options?.include_usage === true,
  };
}

function readPrompts(value: unknown, vocab: number): (string | number[])[] {
  if (typeof value === "string") return [value];
  if (!Array.isArray(value) || value.length === 0) throw expected("prompt", PROMPT, value);
  if (typeof value[0] === "number") return [readIds(value, vocab, "prompt")];
  if (value.length > MAX_PROMPTS) throw badRequest(`prompt: at most ${MAX_PROMPTS} prompts in one request, got ${value.length}`, "prompt");
  const texts = typeof value[0] === "string";
  return value.map((item: unknown, i) => {
    if (texts && typeof item === "string") return item;
    if (!texts && Array.isArray(item) && item.length > 0) return readIds(item, vocab, `prompt.${i}`);
    throw expected(`prompt.${i}`, texts ? "a string, as the first prompt is" : "a non-empty list of token ids", item);
  });
}

function readIds(ids: readonly unknown[], vocab: number, at: string): number[] {
  for (const [i, id] of ids.entries()) {
    if (!Number.isInteger(id) || (id as number) < 0 || (id as number) >= vocab) throw expected(`${at}.${i}`, `a token id from 0 to ${vocab - 1}`, id);
  }
  return ids as number[];
}

/** Token ids of every prompt; other requests get their turn between two of them. @throws HttpError 400 */
async function encodePrompts(serving: Serving, prompts: CompletionCall["prompts"]): Promise<number[][]> {
  const encoded: number[][] = [];
  for (const [i, prompt] of prompts.entries()) {
    if (i > 0) await new Promise((resolve) => setImmediate(resolve));
    if (typeof prompt === "string") checkTextLength(serving, prompt.length, "prompt");
    const ids = typeof prompt === "string" ? serving.codec.encode(prompt) : prompt;
    if (ids.length === 0) throw badRequest(`prompt: expected at least one token, got ${JSON.stringify(prompt)}`, "prompt", "empty_prompt");
    checkContext(serving, ids.length, "prompt");
    encoded.push(ids);
  }
  return encoded;
}

/** POST /v1/completions */
export async function completions(context: RequestContext): Promise<Response> {
  const body = await context.app.bodies.with(context.request, parseJsonObject);
  const serving = context.app.admit();
  const { call, prompts } = await readRequest(context, "completions", async () => {
    refuseSession(context.request.headers);
    const read = readCompletion(serving, body);
    return { call: read, prompts: await encodePrompts(serving, read.prompts) };
  });
  const id = `cmpl-${randomUUID().replaceAll("-", "")}`;
  const head = { id, object: "text_completion", created: Math.floor(Date.now() / 1000), model: serving.name };
  const generate = (signal: AbortSignal) =>
    prompts.map((promptTokenIds, i) => generateText(serving, { id: `${id}-${i}`, promptTokenIds, sampling: call.sampling, stops: call.stops, continuation: true }, signal));
  const logprobs = (tokens: readonly AnswerToken[]) => (call.sampling.logprobs === null ? null : classicLogprobs(serving.codec, tokens));
  const job = { route: "completions", promptParam: "prompt" };
  if (call.stream) return answer(context, { ...job, frames: (signal) => completionFrames(head, call.includeUsage, generate(signal), logprobs) });
  return answer(context, {
    ...job,
    whole: async (signal) => {
      const answers = await Promise.all(generate(signal).map((deltas) => collectText(deltas)));
      return {
        ...head,
        choices: answers.map(({ text, finishReason, tokens }, index) => ({ index, text, logprobs: logprobs(tokens), finish_reason: finishReason })),
        usage: usageObject(sumUsage(answers.map(({ usage }) => usage))),
      };
    },
  });
}

/** Chunks of streamed choices as they come; logprobs of a choice are whole on its finish chunk. */
async function* completionFrames(
  head: Record<string, unknown>,
  includeUsage: boolean,
  sources: AsyncGenerator<TextDelta, void>[],
  logprobs: (tokens: readonly AnswerToken[]) => unknown,
): AsyncGenerator<unknown, void> {
  const tokens: AnswerToken[][] = sources.map(() => []);
  const usages: Usage[] = [];
  for await (const { index, item } of merge(sources)) {
    tokens[index]?.push(...item.tokens);
    const finished = item.finishReason !== null;
    if (finished) usages.push(item.usage);
    else if (item.text === "") continue;
    const choice = { index, text: item.text, logprobs: finished ? logprobs(tokens[index] ?? []) : null, finish_reason: item.finishReason };
    yield { ...head, choices: [choice], ...(includeUsage && { usage: null }) };
  }
  if (includeUsage) yield { ...head, choices: [], usage: usageObject(sumUsage(usages)) };
}
