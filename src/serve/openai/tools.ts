import { badRequest } from "../http-errors.ts";
import { expected } from "./schema.ts";

/**
 * Tool calling is not offered: calls in an answer would not be recognised. A request that carries tools is checked,
 * so that its own mistakes are named first, and then refused. @throws HttpError 400
 */
export function refuseTools(tools: unknown, toolChoice: unknown, parallel: unknown): void {
  const names = toolNames(tools);
  if (parallel !== undefined && parallel !== null && typeof parallel !== "boolean") throw expected("parallel_tool_calls", "true or false", parallel);
  checkChoice(toolChoice, names);
  if (names.length > 0) throw badRequest("tools: tool calls are not supported by this server", "tools");
}

function toolNames(tools: unknown): string[] {
  if (tools === undefined || tools === null) return [];
  if (!Array.isArray(tools)) throw expected("tools", "a list of tools", tools);
  return tools.map((item, i) => {
    const tool = item as { type?: unknown; function?: { name?: unknown } } | null;
    if (typeof tool !== "object" || tool === null || (tool.type ?? "function") !== "function") throw expected(`tools.${i}.type`, 'a tool of type "function"', tool?.type ?? tool);
    const name = tool.function?.name;
    if (typeof name !== "string" || name === "") throw expected(`tools.${i}.function.name`, "a non-empty string", name);
    return name;
  });
}

function checkChoice(choice: unknown, names: readonly string[]): void {
  if (choice === undefined || choice === null || choice === "auto" || choice === "none") return;
  if (choice === "required") {
    if (names.length === 0) throw badRequest('tool_choice: "required" needs tools, and the request has none', "tool_choice");
    return;
  }
  const named = choice as { type?: unknown; function?: { name?: unknown } };
  const name = typeof choice === "object" && named.type === "function" ? named.function?.name : undefined;
  if (typeof name !== "string") throw expected("tool_choice", '"auto", "none", "required" or {"type":"function","function":{"name":…}}', choice);
  if (!names.includes(name)) throw badRequest(`tool_choice: the function ${JSON.stringify(name.slice(0, 64))} is not among the tools`, "tool_choice");
}
