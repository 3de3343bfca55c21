import { randomUUID } from "node:crypto";
import { z } from "zod";
import type { SamplingParams } from "../../engine/types.ts";
import { answer, readRequest } from "../answer.ts";
import type { RequestContext } from "../app.ts";
import { badRequest, refuseSession } from "../http-errors.ts";
import { type JsonBody, parseJsonObject } from "../json.ts";
import type { Serving } from "../serving.ts";
import { collectText, generateText, type TextDelta } from "./generation.ts";
import { chatLogprobs } from "./logprobs.ts";
import { readMessages } from "./messages.ts";
import { anything, checkContext, checkTextLength, commonFields, expected, fieldTable, neutral, parseFields, readStops, samplingOf } from "./schema.ts";
import { refuseTools } from "./tools.ts";
import { usageObject } from "./usage.ts";

const MAX_TOP_LOGPROBS = 20;
const TOP_LOGPROBS = `an integer from 0 to ${MAX_TOP_LOGPROBS}`;
const THINKING_OFF = ["none", "minimal", "low"] as const;
const THINKING_ON = ["medium", "high", "xhigh", "max"] as const;

const fields = fieldTable(
  {
    ...commonFields,
    messages: anything,
    max_completion_tokens: commonFields.max_tokens,
    logprobs: z.boolean("true or false").nullish(),
    top_logprobs: z.int(TOP_LOGPROBS).min(0, TOP_LOGPROBS).max(MAX_TOP_LOGPROBS, TOP_LOGPROBS).nullish(),
    tools: anything,
    tool_choice: anything,
    parallel_tool_calls: anything,
    reasoning_effort: z.enum([...THINKING_OFF, ...THINKING_ON], `one of ${[...THINKING_OFF, ...THINKING_ON].join(", ")}`).nullish(),
    chat_template_kwargs: z
      .strictObject(
        {
          date_string: z.string("a string").nullish(),
          enable_thinking: z.boolean("true or false").nullish(),
          add_generation_prompt: z.literal(true, "true").nullish(),
          tools_in_user_message: z.literal(true, "true").nullish(),
        },
        "an object",
      )
      .nullish(),
  },
  {
    functions: neutral.isEmpty,
    function_call: neutral.is("none", "auto"),
    audio: neutral.NOTHING,
    modalities: (value) => Array.isArray(value) && value.length === 1 && value[0] === "text",
    prediction: neutral.NOTHING,
    web_search_options: neutral.NOTHING,
    verbosity: neutral.is("medium"),
    // Reasoning stays part of content, as the model wrote it.
    include_reasoning: neutral.is(true),
    separate_reasoning: neutral.is(true, false),
    stream_reasoning: neutral.is(true),
    add_generation_prompt: neutral.is(true),
    continue_final_message: neutral.is(false),
    add_special_tokens: neutral.is(false),
  },
);

interface ChatCall {
  promptTokenIds: number[];
  sampling: SamplingParams;
  stops: string[];
  stream: boolean;
  includeUsage: boolean;
}

/** @throws HttpError 400 */
function readChat(serving: Serving, body: JsonBody): ChatCall {
  if (body.fields.session_id !== undefined) throw badRequest("session_id: not taken in the body; use the header x-layerscale-session-id", "session_id");
  const read = parseFields(fields, body.fields);
  refuseTools(read.tools, read.tool_choice, read.parallel_tool_calls);
  const messages = readMessages(read.messages);
  const top = read.top_logprobs ?? 0;
  if (top > 0 && read.logprobs !== true) throw expected("top_logprobs", "logprobs to be true beside it", top);
  const sampling = samplingOf(serving, body, read, read.max_tokens ?? read.max_completion_tokens ?? null, read.logprobs === true ? top : null);
  checkTextLength(serving, messages.reduce((sum, message) => sum + (message.content as string).length, 0), "messages");
  const promptTokenIds = serving.codec.encodeChat({ messages, kwargs: templateKwargs(read) });
  checkContext(serving, promptTokenIds.length, "messages");
  return { promptTokenIds, sampling, stops: readStops(read.stop), stream: read.stream ?? false, includeUsage: read.stream_options?.include_usage === true };
}

/** Variables for the template; absent ones stay undefined there. reasoning_effort wins over enable_thinking. */
function templateKwargs(read: z.infer<typeof fields.schema>): Record<string, unknown> {
  const given = Object.entries(read.chat_template_kwargs ?? {}).filter(([, value]) => value !== null && value !== undefined);
  const kwargs = Object.fromEntries(given);
  delete kwargs.add_generation_prompt;
  const effort = read.reasoning_effort;
  if (effort !== null && effort !== undefined) kwargs.enable_thinking = (THINKING_ON as readonly string[]).includes(effort);
  return kwargs;
}

/** POST /v1/chat/completions */
export async function chatCompletions(context: RequestContext): Promise<Response> {
  const body = await context.app.bodies.with(context.request, parseJsonObject);
  const serving = context.app.admit();
  const call = await readRequest(context, "chat", () => {
    refuseSession(context.request.headers);
    return readChat(serving, body);
  });
  const id = `chatcmpl-${randomUUID().replaceAll("-", "")}`;
  const created = Math.floor(Date.now() / 1000);
  const generate = (signal: AbortSignal) => generateText(serving, { id, ...call, continuation: false }, signal);
  const head = (object: string) => ({ id, object, created, model: serving.name });
  const job = { route: "chat", promptParam: "messages" };
  if (call.stream) return answer(context, { ...job, frames: (signal) => chatFrames(serving, head("chat.completion.chunk"), call, generate(signal)) });
  return answer(context, {
    ...job,
    whole: async (signal) => {
      const { text, finishReason, usage, tokens } = await collectText(generate(signal));
      const logprobs = call.sampling.logprobs === null ? null : chatLogprobs(serving.codec, tokens);
      const choice = { index: 0, message: { role: "assistant", content: text }, logprobs, finish_reason: finishReason };
      return { ...head("chat.completion"), choices: [choice], usage: usageObject(usage) };
    },
  });
}

/** Chunks of a streamed answer: role, text as it comes, finish with all logprobs, then usage when asked for. */
async function* chatFrames(serving: Serving, head: Record<string, unknown>, call: ChatCall, deltas: AsyncGenerator<TextDelta, void>): AsyncGenerator<unknown, void> {
  const chunk = (delta: Record<string, unknown>, logprobs: unknown = null, finishReason: string | null = null) => ({
    ...head,
    choices: [{ index: 0, delta, logprobs, finish_reason: finishReason }],
    ...(call.includeUsage && { usage: null }),
  });
  const tokens: TextDelta["tokens"] = [];
  let opened = false;
  for await (const delta of deltas) {
    if (!opened) yield chunk({ role: "assistant", content: "" });
    opened = true;
    if (delta.text !== "") yield chunk({ content: delta.text });
    tokens.push(...delta.tokens);
    if (delta.finishReason === null) continue;
    yield chunk({}, call.sampling.logprobs === null ? null : chatLogprobs(serving.codec, tokens), delta.finishReason);
    if (call.includeUsage) yield { ...head, choices: [], usage: usageObject(delta.usage) };
    return;
  }
}
