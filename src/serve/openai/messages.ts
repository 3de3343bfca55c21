import { badRequest } from "../http-errors.ts";
import { expected, preview } from "./schema.ts";

const ROLES = new Set(["system", "user", "assistant", "tool", "ipython"]);

/** Messages as a chat template reads them: content is always text, tool-call arguments are values. @throws HttpError 400 */
export function readMessages(value: unknown): Record<string, unknown>[] {
  if (!Array.isArray(value) || value.length === 0) throw expected("messages", "a non-empty list of messages", value);
  return value.map((message, i) => readMessage(message, `messages.${i}`));
}

function readMessage(value: unknown, at: string): Record<string, unknown> {
  if (typeof value !== "object" || value === null || Array.isArray(value)) throw expected(at, "an object with role and content", value);
  const message = value as Record<string, unknown>;
  const role = message.role;
  if (typeof role !== "string" || !ROLES.has(role)) throw expected(`${at}.role`, "system, user, assistant or tool", role);
  const read: Record<string, unknown> = { role: role === "ipython" ? "tool" : role, content: readContent(message.content, `${at}.content`) };
  if (message.name !== undefined && message.name !== null) {
    if (typeof message.name !== "string") throw expected(`${at}.name`, "a string", message.name);
    read.name = message.name;
  }
  if (role === "assistant") {
    if (message.function_call !== undefined && message.function_call !== null) throw badRequest(`${at}.function_call: not supported; use tool_calls`, `${at}.function_call`);
    const reasoning = message.reasoning ?? message.reasoning_content;
    if (reasoning !== undefined && reasoning !== null) {
      if (typeof reasoning !== "string") throw expected(`${at}.reasoning`, "a string", reasoning);
      read.reasoning_content = reasoning;
    }
    const calls = message.tool_calls;
    if (calls !== undefined && calls !== null) read.tool_calls = readToolCalls(calls, `${at}.tool_calls`);
  }
  if (read.role === "tool") {
    const id = message.tool_call_id ?? "";
    if (typeof id !== "string") throw expected(`${at}.tool_call_id`, "a string", id);
    read.tool_call_id = id;
  }
  return read;
}

function readContent(value: unknown, at: string): string {
  if (value === undefined || value === null) return "";
  if (typeof value === "string") return value;
  if (!Array.isArray(value)) throw expected(at, "a string or a list of parts", value);
  return value.map((part, i) => readPart(part, `${at}.${i}`)).join("\n");
}

function readPart(value: unknown, at: string): string {
  if (typeof value !== "object" || value === null) throw expected(at, "a content part", value);
  const part = value as Record<string, unknown>;
  const type = part.type ?? "text";
  if (type === "image_url") throw badRequest(`${at}: image_url: this model takes no images`, at);
  if (type !== "text") throw badRequest(`${at}.type: content of type ${preview(type)} is not supported (text)`, `${at}.type`);
  if (typeof part.text !== "string") throw expected(`${at}.text`, "a string", part.text);
  return part.text;
}

function readToolCalls(value: unknown, at: string): Record<string, unknown>[] {
  if (!Array.isArray(value)) throw expected(at, "a list of tool calls", value);
  return value.map((item, i) => {
    const call = item as { id?: unknown; type?: unknown; function?: { name?: unknown; arguments?: unknown } } | null;
    const here = `${at}.${i}`;
    if (typeof call !== "object" || call === null) throw expected(here, "a tool call", call);
    if ((call.type ?? "function") !== "function") throw expected(`${here}.type`, '"function"', call.type);
    const name = call.function?.name;
    if (typeof name !== "string" || name === "") throw expected(`${here}.function.name`, "a non-empty string", name);
    if (call.id !== undefined && call.id !== null && typeof call.id !== "string") throw expected(`${here}.id`, "a string", call.id);
    return { ...(typeof call.id === "string" && { id: call.id }), type: "function", function: { name, arguments: readArguments(call.function?.arguments) } };
  });
}

/** A JSON text is read; a text that is none stays text, since models write such calls and clients send them back. */
function readArguments(value: unknown): unknown {
  if (value === undefined || value === null) return {};
  if (typeof value !== "string") return value;
  try {
    return JSON.parse(value) as unknown;
  } catch {
    return value;
  }
}
