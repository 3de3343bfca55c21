import { expect, setDefaultTimeout, test } from "bun:test";
import { bytesOf, says, sseFrames, startServer } from "./support/test-server.ts";
import { EOS } from "./support/byte-tokenizer.ts";

setDefaultTimeout(60_000);

const ANSWER = "Grüße 😸 똻 ﷽, and a long tail of plain words.";

async function streamed(response: Response) {
  expect(response.status).toBe(200);
  expect(response.headers.get("content-type")).toStartWith("text/event-stream");
  return sseFrames(await response.text());
}
const joined = (frames: Record<string, any>[]) => frames.map((frame) => frame.choices[0]?.delta?.content ?? "").join("");

test("a plain answer has every field of the contract and no other key", async () => {
  await using server = startServer(says("Hello"));
  const response = await server.chat({ max_tokens: 50 });
  expect(response.status).toBe(200);
  const body = (await response.json()) as Record<string, any>;
  expect(body.id).toStartWith("chatcmpl-");
  expect(Math.abs(body.created - Date.now() / 1000)).toBeLessThan(60);
  expect({ ...body, id: "", created: 0 } as unknown).toEqual({
    id: "", object: "chat.completion", created: 0, model: "Org/Test-Model",
    choices: [{ index: 0, message: { role: "assistant", content: "Hello" }, logprobs: null, finish_reason: "stop" }],
    usage: { prompt_tokens: 9, completion_tokens: 6, total_tokens: 15, prompt_tokens_details: { cached_tokens: 0 } },
  });
  expect(response.headers.get("x-request-id")).toStartWith("req_");
  expect(response.headers.get("request-id")).toBe(response.headers.get("x-request-id"));
});

test("streamed deltas join to the whole answer, characters split over tokens stay whole", async () => {
  for (const tokensPerOutput of [1, 3, 7]) {
    await using server = startServer(says(ANSWER));
    server.engine.tokensPerOutput = tokensPerOutput;
    const whole = (await (await server.chat({})).json()) as Record<string, any>;
    expect(whole.choices[0].message.content).toBe(ANSWER);
    const frames = await streamed(await server.chat({ stream: true }));
    expect(frames[0]?.choices[0].delta).toEqual({ role: "assistant", content: "" });
    expect(joined(frames)).toBe(ANSWER);
    expect(frames.some((frame) => JSON.stringify(frame).includes("\ufffd"))).toBe(false);
    expect(frames.at(-1)?.choices[0]).toEqual({ index: 0, delta: {}, logprobs: null, finish_reason: "stop" });
    expect(new Set(frames.map((frame) => frame.id)).size).toBe(1);
    expect(frames.every((frame) => frame.object === "chat.completion.chunk" && !("usage" in frame))).toBe(true);
  }
});

test("an answer cut in the middle of a character is the same streamed and whole", async () => {
  await using server = startServer(says("ab😸"));
  const whole = (await (await server.chat({ max_tokens: 4 })).json()) as Record<string, any>;
  expect(whole.choices[0].finish_reason).toBe("length");
  expect(whole.choices[0].message.content).toBe("ab\ufffd");
  expect(joined(await streamed(await server.chat({ max_tokens: 4, stream: true })))).toBe("ab\ufffd");
});

test("include_usage: null on every chunk, then a chunk without choices", async () => {
  await using server = startServer(says("Hello"));
  const frames = await streamed(await server.chat({ stream: true, stream_options: { include_usage: true }, messages: [{ role: "user", content: "x".repeat(40) }] }));
  const last = frames.pop();
  expect(last?.choices).toEqual([]);
  expect(last?.usage).toEqual({ prompt_tokens: 47, completion_tokens: 6, total_tokens: 53, prompt_tokens_details: { cached_tokens: 32, prefix_cached_tokens: 32 } });
  expect(frames.every((frame) => frame.usage === null)).toBe(true);
  for (const include_usage of [false, null]) {
    const without = await streamed(await server.chat({ stream: true, stream_options: { include_usage } }));
    expect(without.every((frame) => !("usage" in frame) && frame.choices.length === 1)).toBe(true);
  }
});

test("no byte of a stop string leaves, and the engine sequence ends at once", async () => {
  const text = "Here is the alphabet: ABCDEFGHIJKLMNOP";
  for (const tokensPerOutput of [1, 4]) {
    for (const [stop, want] of [
      ["DEFGHIJ", "Here is the alphabet: ABC"],
      [["zz", "DEFGHIJ"], "Here is the alphabet: ABC"],
      [["H"], ""],
      [["DEFGHIX"], text],
    ] as const) {
      await using server = startServer(says(text));
      server.engine.tokensPerOutput = tokensPerOutput;
      const whole = (await (await server.chat({ stop, temperature: 0 })).json()) as Record<string, any>;
      expect(whole.choices[0].message.content).toBe(want);
      expect(whole.choices[0].finish_reason).toBe("stop");
      const frames = await streamed(await server.chat({ stop, temperature: 0, stream: true }));
      expect(joined(frames)).toBe(want);
      // Every prefix of what was streamed is a prefix of the answer: nothing was taken back.
      expect(frames.at(-1)?.choices[0].finish_reason).toBe("stop");
      const stopped = want !== text;
      expect(server.engine.endings).toEqual(stopped ? ["cancelled", "cancelled"] : ["stop", "stop"]);
      if (stopped) expect(whole.usage.completion_tokens).toBe(want.length + (want === "" ? 1 : 7));
      expect(server.engine.running).toBe(0);
    }
  }
});

test("logprobs: one entry per completion token, finite numbers, all on the finish chunk when streaming", async () => {
  await using server = startServer(says("é!"));
  server.engine.logprob = (step, rank) => (rank > 0 ? -Infinity : step === 1 ? NaN : step === 2 ? 1e-9 : -0.5);
  for (const top of [0, 5, 20]) {
    const body = (await (await server.chat({ logprobs: true, top_logprobs: top })).json()) as Record<string, any>;
    const { content } = body.choices[0].logprobs;
    expect(content.length).toBe(body.usage.completion_tokens);
    expect(content.map((e: any) => e.bytes)).toEqual([[0xc3], [0xa9], [0x21], bytesOf("</s>")]);
    expect(content.map((e: any) => e.logprob)).toEqual([-0.5, -9999, 0, -0.5]);
    expect(content.every((e: any) => typeof e.token === "string" && e.token !== "" && e.top_logprobs.length === top)).toBe(true);
    expect(JSON.stringify(content)).not.toContain("null");
    const frames = await streamed(await server.chat({ logprobs: true, top_logprobs: top, stream: true }));
    const carrying = frames.filter((frame) => frame.choices[0].logprobs !== null);
    expect(carrying.length).toBe(1);
    expect(carrying[0]?.choices[0]).toEqual({ index: 0, delta: {}, logprobs: body.choices[0].logprobs, finish_reason: "stop" });
  }
  const without = (await (await server.chat({})).json()) as Record<string, any>;
  expect(without.choices[0].logprobs).toBeNull();
  expect(server.engine.requests.at(-1)?.sampling.logprobs).toBeNull();
});

test("sampling reaches the engine; absent temperature and top_p are the model's own", async () => {
  await using server = startServer(says("x"));
  const sampled = async (fields: Record<string, unknown>) => {
    expect((await server.chat(fields)).status).toBe(200);
    return server.engine.requests.at(-1)?.sampling;
  };
  expect(await sampled({})).toEqual({ temperature: 0.7, topP: 0.95, seed: null, maxTokens: null, ignoreEos: false, logprobs: null });
  expect(await sampled({ temperature: 0, top_p: 1, seed: 42, max_tokens: 3, ignore_eos: true })).toEqual({ temperature: 0, topP: 1, seed: 42n, maxTokens: 3, ignoreEos: true, logprobs: null });
  expect(await sampled({ temperature: 1e-9, top_p: 1e-9, max_completion_tokens: 5 })).toMatchObject({ temperature: 1e-9, topP: 1e-9, maxTokens: 5 });
  expect(await sampled({ max_tokens: 2, max_completion_tokens: 5 })).toMatchObject({ maxTokens: 2 });
  expect(await sampled({ max_tokens: 1048576 })).toMatchObject({ maxTokens: 512 });
  expect(await sampled({ seed: -1, temperature: null, max_tokens: null, stop: null, logprobs: null, stream: null })).toMatchObject({ seed: -1n, temperature: 0.7 });
});

test("a seed keeps all its 64 bits", async () => {
  await using server = startServer(says("x"));
  const messages = '"messages":[{"role":"user","content":"hi"}],"metadata":{"seed":5}';
  for (const seed of ["18446744073709551615", "-9223372036854775808", "9632640820254868150", "9007199254740993"]) {
    for (const body of [`{${messages},"seed":${seed}}`, `{"seed":${seed},${messages}}`]) {
      expect((await server.post("/v1/chat/completions", body)).status).toBe(200);
      expect(server.engine.requests.at(-1)?.sampling.seed).toBe(BigInt(seed));
    }
  }
  for (const seed of ["18446744073709551616", "-9223372036854775809", "1.5", "1e30", '"7"']) {
    const response = await server.post("/v1/chat/completions", `{${messages},"seed":${seed}}`);
    expect(response.status).toBe(400);
    expect(((await response.json()) as any).error.message).toContain("seed");
  }
});

test("messages: parts, roles, tool history, null content", async () => {
  await using server = startServer(says("x"));
  const messages = [
    { role: "system", content: null },
    { role: "user", content: [{ type: "text", text: "a" }, { text: "b" }] },
    { role: "assistant", content: null, refusal: null, tool_calls: [{ id: "c1", type: "function", function: { name: "f", arguments: '{"x":[1]}' } }, { function: { name: "g" } }, { function: { name: "h", arguments: "not json" } }] },
    { role: "tool", tool_call_id: "c1", content: "r" },
    { role: "ipython", content: "s" },
    { role: "assistant", content: "t", reasoning: "because", reasoning_content: "old" },
  ];
  expect((await server.chat({ messages, chat_template_kwargs: { enable_thinking: true, add_generation_prompt: true, date_string: "today" }, reasoning_effort: "low" })).status).toBe(200);
  expect(server.chats[0]?.messages).toEqual([
    { role: "system", content: "" },
    { role: "user", content: "a\nb" },
    { role: "assistant", content: "", tool_calls: [
      { id: "c1", type: "function", function: { name: "f", arguments: { x: [1] } } },
      { type: "function", function: { name: "g", arguments: {} } },
      { type: "function", function: { name: "h", arguments: "not json" } },
    ] },
    { role: "tool", content: "r", tool_call_id: "c1" },
    { role: "tool", content: "s", tool_call_id: "" },
    { role: "assistant", content: "t", reasoning_content: "because" },
  ]);
  expect(server.chats[0]?.kwargs).toEqual({ enable_thinking: false, date_string: "today" });
});

test("ignore_eos goes on behind eos, without its text", async () => {
  await using server = startServer(() => [...bytesOf("ab"), EOS]);
  const body = (await (await server.chat({ ignore_eos: true, max_tokens: 8 })).json()) as Record<string, any>;
  expect(body.choices[0]).toMatchObject({ finish_reason: "length", message: { content: "ababab" } });
  expect(body.usage.completion_tokens).toBe(8);
});

test("context: N-1 prompt tokens give one token, N are refused with both numbers", async () => {
  await using server = startServer(says("xyz"), { contextLength: 64 });
  const content = (tokens: number) => [{ role: "user", content: "x".repeat(tokens - "user: \n".length) }];
  for (const max_tokens of [undefined, 1, 1048576]) {
    for (const stream of [false, true]) {
      for (const tokens of [64, 65]) {
        const response = await server.chat({ messages: content(tokens), max_tokens, stream });
        expect(response.status).toBe(400);
        expect(response.headers.get("content-type")).toContain("application/json");
        const { error } = (await response.json()) as any;
        expect(error).toMatchObject({ type: "invalid_request_error", code: "context_length_exceeded", param: "messages" });
        expect(error.message).toContain(String(tokens));
        expect(error.message).toContain("64");
      }
    }
    const fits = (await (await server.chat({ messages: content(63), max_tokens })).json()) as any;
    expect(fits.choices[0].finish_reason).toBe("length");
    expect(fits.usage).toMatchObject({ prompt_tokens: 63, completion_tokens: 1 });
    const two = (await (await server.chat({ messages: content(62), max_tokens })).json()) as any;
    expect(two.usage.completion_tokens).toBe(max_tokens === 1 ? 1 : 2);
  }
});
