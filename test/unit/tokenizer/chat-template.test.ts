import { describe, expect, setDefaultTimeout, test } from "bun:test";
import { ChatTemplate, TemplateError } from "../../../src/tokenizer/chat-template.ts";
import type { ChatParams } from "../../../src/tokenizer/chat-template.ts";
import { golden, TOKENIZER_NAMES, tokenizerFiles } from "../../support/tokenizers.ts";
import type { TokenizerName } from "../../support/tokenizers.ts";

// Large vocabularies on a machine that others use too.
setDefaultTimeout(60_000);

interface Case {
  template: string;
  params: { messages: unknown[]; tools?: unknown[]; add_generation_prompt: boolean; [more: string]: unknown };
  expected: { text: string } | { error: string; raised: boolean };
}
interface Golden {
  now: [number, number, number, number, number, number];
  llama3_1_style: string;
  cases: Case[];
}

const data = golden<Golden>("templates");
const now = () => new Date(...data.now);
const isModel = (name: string): name is TokenizerName => (TOKENIZER_NAMES as readonly string[]).includes(name);
const snippet = (source: string, params: Partial<ChatParams> = {}) => ChatTemplate.create(source, {}, { now }).render({ messages: [], ...params });

async function open(name: string): Promise<ChatTemplate> {
  if (isModel(name)) {
    const { chatTemplate, config } = await tokenizerFiles(name);
    return ChatTemplate.create(chatTemplate, config, { now });
  }
  const { config } = await tokenizerFiles("llama3_1");
  return ChatTemplate.create(name === "llama3_1_style" ? data.llama3_1_style : name, config, { now });
}

function paramsOf({ add_generation_prompt, ...rest }: Case["params"]): ChatParams {
  return { ...rest, addGenerationPrompt: add_generation_prompt };
}

describe("byte-equal to Jinja2 as transformers runs it", () => {
  for (const [i, { template, params, expected }] of data.cases.entries()) {
    test(`${i}: ${template.slice(0, 60)}`, async () => {
      const opened = await open(template);
      if ("text" in expected) {
        expect(opened.render(paramsOf(params))).toBe(expected.text);
        expect(opened.renderWithOrigin(paramsOf(params)).text).toBe(expected.text);
        return;
      }
      let error: unknown;
      try {
        opened.render(paramsOf(params));
      } catch (thrown) {
        error = thrown;
      }
      expect(error).toBeInstanceOf(TemplateError);
      if (expected.raised) expect((error as Error).message).toBe(expected.error);
    });
  }
});

describe("sources", () => {
  const list = [
    { name: "default", template: "plain" },
    { name: "tool_use", template: "tools" },
  ];

  test("the list form picks by tools", () => {
    const template = ChatTemplate.create(list, {});
    expect(template.render({ messages: [] })).toBe("plain");
    expect(template.render({ messages: [], tools: [] })).toBe("tools");
    expect(template.render({ messages: [], tools: null })).toBe("plain");
    expect(ChatTemplate.create(list.slice(0, 1), {}).render({ messages: [], tools: [{}] })).toBe("plain");
  });

  test("what is neither a text nor a list with a usable entry is refused", () => {
    for (const source of [null, 7, [], [{ name: "rag", template: "x" }], {}]) expect(() => ChatTemplate.create(source, {})).toThrow(TemplateError);
  });

  test("syntax errors are refused when the template is read", () => {
    for (const source of ["{% if %}", "{{ a", "{% for x in y %}", "{% unknown %}", "{{ 'a }}", "{# open", "{{ 1 is divisibleby(2 }}", "{{ }}"])
      expect(() => ChatTemplate.create(source, {})).toThrow(TemplateError);
  });

  test("special tokens as strings and as objects", () => {
    const template = ChatTemplate.create("{{ bos_token }}|{{ eos_token }}|{{ pad_token is defined }}", { bos_token: { content: "<s>" }, eos_token: "</s>", pad_token: null });
    expect(template.render({ messages: [] })).toBe("<s>|</s>|False");
  });
});

describe("what a conversation can do to a template", () => {
  test("raise_exception gives its text, whatever it is", () => {
    expect(() => snippet("{{ raise_exception('roles must alternate') }}")).toThrow(new TemplateError("roles must alternate"));
    expect(() => snippet("{{ raise_exception(messages) }}")).toThrow(new TemplateError("[]"));
  });

  test("a macro that never ends is an error, not a crash", () => {
    expect(() => snippet("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}")).toThrow(TemplateError);
  });

  test("messages nested too deep are an error, not a crash", () => {
    let nested: unknown = "x";
    for (let i = 0; i < 200_000; i++) nested = [nested];
    expect(() => snippet("{{ messages }}", { messages: [nested] })).toThrow(TemplateError);
  });

  test("huge ranges and repetitions are refused", () => {
    expect(() => snippet("{{ range(1000000000) | list }}")).toThrow(TemplateError);
    expect(() => snippet("{{ 'x' * 1000000000 }}")).toThrow(TemplateError);
  });

  test("prototype names are ordinary names", () => {
    const message = JSON.parse('{"role": "user", "__proto__": {"x": 1}, "constructor": "c", "content": "hi"}') as unknown;
    expect(snippet("{{ messages[0].constructor }}{{ messages[0]['__proto__'].x }}{{ messages[0].hasOwnProperty }}", { messages: [message] })).toBe("c1");
    expect(() => snippet("{{ 'a' | constructor }}")).toThrow(TemplateError);
    expect(() => snippet("{{ 'a' is toString }}")).toThrow(TemplateError);
  });

  test("variables that are undefined count as not given", () => {
    expect(snippet("{{ enable_thinking is defined }}", { enable_thinking: undefined })).toBe("False");
    expect(snippet("{{ enable_thinking is defined }}", { enable_thinking: false })).toBe("True");
  });

  test("addGenerationPrompt is true unless told otherwise; a snake-case variable wins", () => {
    expect(snippet("{{ add_generation_prompt }}")).toBe("True");
    expect(snippet("{{ add_generation_prompt }}", { addGenerationPrompt: false })).toBe("False");
    expect(snippet("{{ add_generation_prompt }}", { add_generation_prompt: false })).toBe("False");
  });

  test("rendering does not change the messages", () => {
    const messages = [{ role: "user", content: "hi", list: [1, { a: "b" }] }];
    const before = structuredClone(messages);
    snippet("{% set m = messages[0] %}{% set m = 3 %}{{ messages }}", { messages });
    expect(messages).toEqual(before);
  });
});
