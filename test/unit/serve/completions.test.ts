import { expect, setDefaultTimeout, test } from "bun:test";
import { EOS } from "./support/byte-tokenizer.ts";
import { bytesOf, says, sseFrames, startServer, until } from "./support/test-server.ts";

setDefaultTimeout(60_000);

const PATH = "/v1/completions";

test("one choice per prompt, in order, usage summed", async () => {
  await using server = startServer((request) => [request.promptTokenIds[0] as number, 0x21, EOS]);
  const ask = async (prompt: unknown) => {
    const response = await server.post(PATH, { prompt, model: "any" });
    expect(response.status).toBe(200);
    return (await response.json()) as Record<string, any>;
  };
  const one = await ask("abc");
  expect(one.id).toStartWith("cmpl-");
  expect({ ...one, id: "", created: 0 } as unknown).toEqual({
    id: "", object: "text_completion", created: 0, model: "Org/Test-Model",
    choices: [{ index: 0, text: "a!", logprobs: null, finish_reason: "stop" }],
    usage: { prompt_tokens: 3, completion_tokens: 3, total_tokens: 6, prompt_tokens_details: { cached_tokens: 0 } },
  });
  const texts = async (prompt: unknown) => (await ask(prompt)).choices.map((choice: any) => [choice.index, choice.text]);
  expect(await texts(["a", "bb", "c"])).toEqual([[0, "a!"], [1, "b!"], [2, "c!"]]);
  expect(await texts([0x61, 0x62])).toEqual([[0, "a!"]]);
  expect(await texts([[0x61], [0x62, 0x63]])).toEqual([[0, "a!"], [1, "b!"]]);
  expect((await ask(["a", "bb"])).usage).toMatchObject({ prompt_tokens: 3, completion_tokens: 6, total_tokens: 9 });
});

test("prompts that cannot run are refused by name, and the next request is served", async () => {
  await using server = startServer(says("x"), { contextLength: 64 });
  const prompts = [undefined, null, "", [], [999999], [300], [-1], [1.5], [1, "a"], ["a", 1], ["a", [1]], [[]], [[1], []], [[1], [-1]], [null], [true], {}, 7, ["a", ""], "x".repeat(64), Array(64).fill(1), Array(1025).fill("a")];
  for (const stream of [false, true]) {
    for (const prompt of prompts) {
      const response = await server.post(PATH, { prompt, stream });
      expect([JSON.stringify(prompt)?.slice(0, 40), response.status]).toEqual([JSON.stringify(prompt)?.slice(0, 40), 400]);
      const { error } = (await response.json()) as any;
      expect(error.param).toStartWith("prompt");
      expect(error.type).toBe("invalid_request_error");
    }
  }
  expect(server.engine.requests).toHaveLength(0);
  expect((await server.post(PATH, { prompt: [299] })).status).toBe(200);
  for (const [path, field] of [[PATH, { prompt: "x".repeat(64 * 256) }], ["/v1/chat/completions", { messages: [{ role: "user", content: "x".repeat(64 * 256) }] }]] as const) {
    const { error } = (await (await server.post(path, field)).json()) as any;
    expect(error).toMatchObject({ code: "context_length_exceeded" });
    expect(error.message).toContain("characters");
  }
  const long = (await (await server.post(PATH, { prompt: "x".repeat(65) })).json()) as any;
  expect(long.error).toMatchObject({ code: "context_length_exceeded", param: "prompt" });
});

test("logprobs in the classic format", async () => {
  await using server = startServer(says("a😸b"));
  const ask = async (logprobs: unknown) => ((await (await server.post(PATH, { prompt: "p", logprobs })).json()) as any).choices[0].logprobs;
  const two = await ask(2);
  expect(two.tokens).toEqual(["a", "bytes:\\xf0", "bytes:\\x9f", "bytes:\\x98", "bytes:\\xb8", "b", "</s>"]);
  expect(two.token_logprobs).toEqual([-0.25, -0.5, -0.75, -1, -1.25, -1.5, -1.75]);
  expect(two.text_offset).toEqual([0, 1, 1, 1, 1, 2, 3]);
  expect(two.top_logprobs[0]).toEqual({ a: -0.25, b: -1.25 });
  expect(two.top_logprobs).toHaveLength(7);
  expect((await ask(0)).top_logprobs[0]).toEqual({ a: -0.25 });
  expect(await ask(null)).toBeNull();
  for (const bad of [6, -1, 1.5, true, "1"]) expect((await server.post(PATH, { prompt: "p", logprobs: bad })).status).toBe(400);
});

test("streamed choices join to the whole ones, logprobs on each finish chunk", async () => {
  const answers: Record<string, string> = { a: "first 😸 answer", b: "second", c: "" };
  await using server = startServer((request) => [...bytesOf(answers[String.fromCharCode(request.promptTokenIds[0] as number)] as string), EOS]);
  const body = { prompt: ["a", "b", "c"], logprobs: 1, stop: ["swer"] };
  const whole = (await (await server.post(PATH, body)).json()) as any;
  expect(whole.choices.map((choice: any) => choice.text)).toEqual(["first 😸 an", "second", ""]);
  const response = await server.post(PATH, { ...body, stream: true, stream_options: { include_usage: true } });
  const frames = sseFrames(await response.text());
  const usage = frames.pop();
  expect(usage?.choices).toEqual([]);
  expect(usage?.usage).toEqual(whole.usage);
  for (const index of [0, 1, 2]) {
    const own = frames.filter((frame) => frame.choices[0].index === index).map((frame) => frame.choices[0]);
    expect(own.map((choice) => choice.text).join("")).toBe(whole.choices[index].text);
    expect(own.filter((choice) => choice.finish_reason !== null)).toHaveLength(1);
    expect(own.at(-1)).toMatchObject({ finish_reason: whole.choices[index].finish_reason, logprobs: whole.choices[index].logprobs });
    expect(own.slice(0, -1).every((choice) => choice.logprobs === null)).toBe(true);
  }
  expect(frames.every((frame) => frame.usage === null && frame.object === "text_completion")).toBe(true);
});

test("one failing prompt ends the others of its request", async () => {
  await using server = startServer((request) => (request.promptTokenIds[0] === 0x62 ? (() => { throw new Error("bad luck"); })() : [0x61]));
  for (const stream of [false, true]) {
    const response = await server.post(PATH, { prompt: ["a", "b", "a"], stream, max_tokens: 100_000 });
    if (!stream) expect(response.status).toBe(500);
    else if (response.status === 200) expect(await response.text()).toContain('"type":"api_error"');
    await until(() => server.engine.running === 0, "the other sequences to end");
  }
  expect(server.app.metrics.totals()).toMatchObject({ started: 2, failed: 2 });
});
