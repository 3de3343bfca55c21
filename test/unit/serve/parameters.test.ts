import { expect, setDefaultTimeout, test } from "bun:test";
import { says, startServer } from "./support/test-server.ts";

setDefaultTimeout(60_000);

const tool = { type: "function", function: { name: "f", parameters: { type: "object" } } };

/** [fields, the parameter that the refusal must name] */
const REFUSED_BY_BOTH: [Record<string, unknown>, string][] = [
  [{ n: 2 }, "n"], [{ best_of: 2 }, "best_of"], [{ top_k: 5 }, "top_k"], [{ min_p: 0.1 }, "min_p"],
  [{ frequency_penalty: 0.5 }, "frequency_penalty"], [{ presence_penalty: -0.5 }, "presence_penalty"], [{ repetition_penalty: 1.1 }, "repetition_penalty"],
  [{ response_format: { type: "json_object" } }, "response_format"], [{ logit_bias: { "1": 5 } }, "logit_bias"], [{ stop_token_ids: [5] }, "stop_token_ids"],
  [{ min_tokens: 1 }, "min_tokens"], [{ echo: true }, "echo"], [{ suffix: "x" }, "suffix"], [{ use_beam_search: true }, "use_beam_search"],
  [{ prompt_logprobs: 1 }, "prompt_logprobs"], [{ guided_json: {} }, "guided_json"], [{ max_thinking_tokens: 5 }, "max_thinking_tokens"],
  [{ foo: 1 }, "foo"], [{ foo: null }, "foo"], [{ constructor: 1 }, "constructor"], [{ hasOwnProperty: 1 }, "hasOwnProperty"],
  [{ temperature: -1 }, "temperature"], [{ temperature: 2.1 }, "temperature"], [{ temperature: "hot" }, "temperature"],
  [{ top_p: 1.5 }, "top_p"], [{ top_p: 0 }, "top_p"], [{ top_p: -0.1 }, "top_p"],
  [{ max_tokens: 0 }, "max_tokens"], [{ max_tokens: -1 }, "max_tokens"], [{ max_tokens: 1.5 }, "max_tokens"], [{ max_tokens: "x" }, "max_tokens"], [{ max_tokens: true }, "max_tokens"],
  [{ seed: "x" }, "seed"], [{ seed: 0.5 }, "seed"], [{ stream: "yes" }, "stream"], [{ stream: 1 }, "stream"], [{ ignore_eos: 1 }, "ignore_eos"],
  [{ stop: ["a", "b", "c", "d", "e"] }, "stop"], [{ stop: "a".repeat(65) }, "stop"], [{ stop: "é".repeat(33) }, "stop"], [{ stop: [1] }, "stop"], [{ stop: "" }, "stop"], [{ stop: [""] }, "stop"], [{ stop: 5 }, "stop"],
  [{ stream_options: { include_usage: "yes" } }, "stream_options.include_usage"], [{ stream_options: { other: 1 } }, "stream_options.other"], [{ stream_options: 1 }, "stream_options"],
  [{ model: 5 }, "model"],
];
const REFUSED_BY_CHAT: typeof REFUSED_BY_BOTH = [
  [{ messages: undefined }, "messages"], [{ messages: [] }, "messages"], [{ messages: null }, "messages"], [{ messages: "hi" }, "messages"], [{ messages: {} }, "messages"], [{ messages: [1] }, "messages.0"],
  [{ messages: [{ role: "wizard", content: "x" }] }, "messages.0.role"], [{ messages: [{ content: "x" }] }, "messages.0.role"], [{ messages: [{ role: "user", content: 5 }] }, "messages.0.content"],
  [{ messages: [{ role: "user", content: [{ type: "image_url", image_url: { url: "https://example.com/a.png" } }] }] }, "image_url"],
  [{ messages: [{ role: "user", content: [{ type: "input_audio", input_audio: {} }] }] }, "input_audio"],
  [{ messages: [{ role: "user", content: [{ type: "text" }] }] }, "messages.0.content.0.text"],
  [{ messages: [{ role: "assistant", content: "", function_call: {} }] }, "function_call"],
  [{ messages: [{ role: "assistant", content: "", tool_calls: [{ function: {} }] }] }, "messages.0.tool_calls.0.function.name"],
  [{ messages: [{ role: "user", content: "refuse" }] }, "messages"],
  [{ session_id: "s" }, "session_id"],
  [{ logprobs: true, top_logprobs: 21 }, "top_logprobs"], [{ logprobs: true, top_logprobs: -1 }, "top_logprobs"], [{ top_logprobs: 2 }, "top_logprobs"], [{ logprobs: 5 }, "logprobs"],
  [{ tools: [tool] }, "tools"], [{ tools: [tool], tool_choice: "none" }, "tools"], [{ tools: [tool], tool_choice: "maybe" }, "tool_choice"],
  [{ tools: [tool], tool_choice: { type: "function", function: { name: "g" } } }, "tool_choice"], [{ tool_choice: "required" }, "tool_choice"],
  [{ tools: [{ type: "retrieval" }] }, "tools.0.type"], [{ tools: [{ type: "function", function: {} }] }, "tools.0.function.name"], [{ tools: {} }, "tools"], [{ parallel_tool_calls: 1 }, "parallel_tool_calls"],
  [{ functions: [tool] }, "functions"], [{ modalities: ["text", "audio"] }, "modalities"], [{ audio: {} }, "audio"],
  [{ reasoning_effort: "extreme" }, "reasoning_effort"], [{ include_reasoning: false }, "include_reasoning"], [{ stream_reasoning: false }, "stream_reasoning"],
  [{ chat_template_kwargs: { nope: 1 } }, "chat_template_kwargs.nope"], [{ chat_template_kwargs: { add_generation_prompt: false } }, "add_generation_prompt"], [{ chat_template_kwargs: { tools_in_user_message: false } }, "tools_in_user_message"], [{ chat_template_kwargs: [] }, "chat_template_kwargs"],
];
const NEUTRAL: Record<string, unknown>[] = [
  { n: 1, best_of: 1, top_k: -1, min_p: 0, frequency_penalty: 0, presence_penalty: 0, repetition_penalty: 1, min_tokens: 0, logit_bias: {}, stop_token_ids: [], echo: false, suffix: "", use_beam_search: false, response_format: { type: "text" } },
  { n: null, top_k: 0, min_p: null, logit_bias: null, response_format: null, prompt_logprobs: null, guided_json: null, repetition_penalty: 1.0 },
  { user: "u", metadata: { a: 1 }, store: true, service_tier: "auto", model: "", stop: [], stream_options: null },
  { stop: ["\u0001".repeat(64), "b".repeat(64), "c".repeat(64), "é".repeat(32)], stream_options: { include_usage: false, include_obfuscation: false } },
];
const NEUTRAL_CHAT: Record<string, unknown>[] = [
  { tools: [], tool_choice: "auto", parallel_tool_calls: true, functions: null, function_call: "none", modalities: ["text"], reasoning_effort: "none", chat_template_kwargs: { add_generation_prompt: true }, include_reasoning: true },
  { tools: null, tool_choice: null, top_logprobs: 0, logprobs: false },
];

const cases = [
  { path: "/v1/chat/completions", base: { messages: [{ role: "user", content: "hi" }] }, refused: [...REFUSED_BY_BOTH, ...REFUSED_BY_CHAT], neutral: [...NEUTRAL, ...NEUTRAL_CHAT] },
  { path: "/v1/completions", base: { prompt: "hi" }, refused: [...REFUSED_BY_BOTH, [{ messages: [] }, "messages"], [{ tools: [tool] }, "tools"], [{ max_completion_tokens: 5 }, "max_completion_tokens"]] as typeof REFUSED_BY_BOTH, neutral: NEUTRAL },
];

for (const { path, base, refused, neutral } of cases) {
  test(`${path} refuses what it does not support or understand, by name`, async () => {
    await using server = startServer(says("x"));
    let asked = 0;
    for (const stream of [false, true]) {
      for (const [fields, name] of refused) {
        asked++;
        const response = await server.post(path, { ...base, ...("stream" in fields ? {} : { stream }), ...fields });
        const { error } = (await response.json()) as any;
        expect([fields, response.status, error?.type]).toEqual([fields, 400, "invalid_request_error"]);
        expect(error.message).toContain(name);
        expect(error.message.length).toBeLessThan(400);
      }
    }
    expect(server.engine.requests).toHaveLength(0);
    // Each refusal is a request that failed, as it is behind Dynamo.
    expect(server.app.metrics.totals()).toMatchObject({ started: asked, failed: asked, ok: 0, cancelled: 0 });
  });

  test(`${path} accepts values that ask for nothing`, async () => {
    await using server = startServer(says("x"));
    for (const fields of neutral) {
      const response = await server.post(path, { ...base, ...fields });
      expect([fields, response.status, response.status === 200 ? "" : await response.text()]).toEqual([fields, 200, ""]);
    }
  });
}

test("a session header names a session that does not exist", async () => {
  await using server = startServer(says("x"));
  for (const [path, body] of [["/v1/chat/completions", { messages: [{ role: "user", content: "hi" }] }], ["/v1/completions", { prompt: "hi" }]] as const) {
    const response = await server.post(path, body, { "x-layerscale-session-id": "sess_1" });
    expect([path, response.status]).toEqual([path, 404]);
    expect(((await response.json()) as any).error).toMatchObject({ type: "not_found_error" });
  }
});

test("numbers that JSON rounds or overflows are shown as what they are", async () => {
  await using server = startServer(says("x"));
  const cases: [string, string][] = [
    ['"temperature":1e400', "temperature: expected a number from 0 to 2, got Infinity"],
    ['"temperature":-1e400', "temperature: expected a number from 0 to 2, got -Infinity"],
    ['"seed":18446744073709551616', "seed: expected an integer of 64 bits, got 18446744073709551616"],
    ['"max_tokens":1e18', "max_tokens: expected an integer from 1 to 9007199254740991, got 1000000000000000000"],
    ['"max_tokens":1e400', "max_tokens: expected an integer from 1 to 9007199254740991, got Infinity"],
  ];
  for (const [field, message] of cases) {
    const response = await server.post("/v1/completions", `{"prompt":"a",${field}}`);
    expect([response.status, ((await response.json()) as any).error.message]).toEqual([400, message]);
  }
});
