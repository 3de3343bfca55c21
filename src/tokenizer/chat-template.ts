import { TemplateError } from "./errors.ts";
import { declareGlobals } from "./jinja/globals.ts";
import { Interpreter } from "./jinja/interpreter.ts";
import { parseTemplate } from "./jinja/program.ts";
import type { Node } from "./jinja/program.ts";
import { Scope } from "./jinja/scope.ts";
import { Text } from "./jinja/text.ts";
import { fromJs } from "./jinja/values.ts";
import { isObject } from "./json-fields.ts";

export { encodeChat } from "./encode-chat.ts";
export { TemplateError } from "./errors.ts";

export interface ChatParams {
  /** JSON-like objects with `role` and `content`, in order. */
  messages: readonly unknown[];
  /** JSON-like tool definitions. Absent or null: none. */
  tools?: readonly unknown[] | null;
  /** Ends the prompt where the assistant's answer begins. Default true. */
  addGenerationPrompt?: boolean;
  /** Further variables of the template (enable_thinking, date_string, …); `undefined` counts as not given. */
  [variable: string]: unknown;
}

export interface ChatTemplateOptions {
  /** Clock of strftime_now. */
  now?: () => Date;
}

const TOKEN_NAMES = ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];
/** Values under these keys choose the template's markers, they are no conversation text, as long as they are mere names. */
const NAME_KEYS = new Set(["role", "type"]);
const PLAIN_NAME = /^[A-Za-z][A-Za-z0-9_]{0,31}$/;

/**
 * A chat template with the semantics of Jinja2 in Python transformers: byte-equal output for the same conversation.
 * (JSON's 1.0 and 1 are one number in JavaScript, and object keys that look like integers come first: both print that way.)
 */
export class ChatTemplate {
  readonly #program: Node;
  readonly #toolProgram: Node;
  readonly #tokens: ReadonlyMap<string, unknown>;
  readonly #now: () => Date;

  private constructor(source: string, toolSource: string, config: Record<string, unknown>, options: ChatTemplateOptions) {
    this.#program = parseTemplate(source);
    this.#toolProgram = toolSource === source ? this.#program : parseTemplate(toolSource);
    this.#tokens = specialTokens(config);
    this.#now = options.now ?? (() => new Date());
  }

  /**
   * `source`: the text of a template, or the list form of tokenizer_config.json ([{name, template}, …]): "default", and
   * "tool_use" for conversations with tools.
   * @throws TemplateError for a syntax error or a list without a usable template.
   */
  static create(source: unknown, tokenizerConfig: Record<string, unknown>, options: ChatTemplateOptions = {}): ChatTemplate {
    if (typeof source === "string") return new ChatTemplate(source, source, tokenizerConfig, options);
    const named = new Map<unknown, string>();
    for (const entry of Array.isArray(source) ? source : [])
      if (isObject(entry) && typeof entry["template"] === "string") named.set(entry["name"], entry["template"]);
    const plain = named.get("default") ?? named.get("tool_use");
    if (plain === undefined) throw new TemplateError('chat_template: expected a string or a list with an entry named "default"');
    return new ChatTemplate(plain, named.get("tool_use") ?? plain, tokenizerConfig, options);
  }

  /** @throws TemplateError: the template's own raise_exception text, or what it cannot do with these messages. */
  render(params: ChatParams): string {
    return this.#render(params, Text.of).s;
  }

  /** As render, and for each UTF-16 unit of the text whether it came from the conversation. */
  renderWithOrigin(params: ChatParams): { text: string; fromConversation: (at: number) => boolean } {
    const { s, mask } = this.#render(params, (value, key) => (NAME_KEYS.has(key) && PLAIN_NAME.test(value) ? Text.of(value) : Text.outside(value)));
    return { text: s, fromConversation: (at) => mask !== null && mask[at] === "1" };
  }

  #render({ messages, tools, addGenerationPrompt, ...variables }: ChatParams, makeText: (s: string, key: string) => Text): Text {
    try {
      const scope = new Scope();
      declareGlobals(scope, this.#now);
      for (const [name, value] of this.#tokens) scope.set(name, fromJs(value, Text.of));
      scope.set("messages", fromJs(messages, makeText));
      scope.set("tools", fromJs(tools ?? null, makeText));
      scope.set("documents", null);
      scope.set("add_generation_prompt", addGenerationPrompt ?? true);
      for (const [name, value] of Object.entries(variables)) if (value !== undefined) scope.set(name, fromJs(value, makeText, name));
      return new Interpreter().run(tools ? this.#toolProgram : this.#program, scope);
    } catch (error) {
      if (error instanceof TemplateError) throw error;
      // A stack overflow (a macro that calls itself, messages nested too deep), a break outside of a loop.
      throw new TemplateError(`chat template: ${(error as Error).message}`);
    }
  }
}

function specialTokens(config: Record<string, unknown>): Map<string, unknown> {
  const contentOf = (value: unknown) => (isObject(value) ? value["content"] : value);
  const tokens = new Map<string, unknown>();
  for (const name of TOKEN_NAMES) {
    const content = contentOf(config[name]);
    if (typeof content === "string") tokens.set(name, content);
  }
  const more = config["additional_special_tokens"];
  if (Array.isArray(more)) tokens.set("additional_special_tokens", more.map(contentOf).filter((t) => typeof t === "string"));
  return tokens;
}
