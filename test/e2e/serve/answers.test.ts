import { afterAll, beforeAll, expect, test } from "bun:test";
import { connect } from "node:net";
import { eventually } from "../../support/launch.ts";
import { frames, joined, serveModel, type ServedModel } from "./support.ts";

const LIMIT = 120_000;
let server: ServedModel;

beforeAll(async () => {
  server = await serveModel();
}, LIMIT);
afterAll(async () => {
  await server[Symbol.asyncDispose]();
}, LIMIT);

const CHAT = "/v1/chat/completions";
const user = (content: string) => [{ role: "user", content }];

async function idle(): Promise<void> {
  await eventually(async () => (await server.gauge("layerscale_kv_pages_held")) === 0 && (await server.gauge("layerscale_requests_running")) === 0 && (await server.gauge("layerscale_requests_queued")) === 0, "an idle engine");
  const [total, free, cached] = await Promise.all(["layerscale_kv_pages", "layerscale_kv_pages_free", "layerscale_kv_pages_cached"].map((name) => server.gauge(name)));
  expect((free ?? 0) + (cached ?? 0)).toBe(total as number);
}

test("knows the capital of France", async () => {
  const answer = await server.chat("What is the capital of France?", { max_tokens: 40 });
  expect(answer.choices[0].message.content).toContain("Paris");
  expect(answer.choices[0].finish_reason).toBe("stop");
}, LIMIT);

test("streamed and whole answers are the same bytes, without U+FFFD", async () => {
  for (const prompt of ["Repeat exactly: 😸 똻 é ﷽", "Write the word for water in Japanese, Russian and Arabic."]) {
    const fields = { max_tokens: 48, ignore_eos: true };
    const whole = await server.chat(prompt, fields);
    const response = await server.post(CHAT, { messages: user(prompt), temperature: 0, stream: true, stream_options: { include_usage: true }, ...fields });
    const chunks = frames(await response.text());
    expect(joined(chunks)).toBe(whole.choices[0].message.content);
    expect(chunks.at(-1)?.usage).toMatchObject({ prompt_tokens: whole.usage.prompt_tokens, completion_tokens: 48 });
  }
}, LIMIT);

test("no byte of a stop string leaves, streamed or not, with logprobs or without", async () => {
  const prompt = "Here is the English alphabet: ABC";
  const full = (await server.complete(prompt, { max_tokens: 20 })).choices[0].text as string;
  expect(full.length).toBeGreaterThan(10);
  for (const stop of [full.slice(3, 9), full.slice(1, 4)]) {
    const want = full.slice(0, full.indexOf(stop));
    for (const logprobs of [undefined, 3]) {
      const whole = (await server.complete(prompt, { max_tokens: 20, stop: [stop], logprobs })).choices[0];
      expect([whole.text, whole.finish_reason]).toEqual([want, "stop"]);
      const response = await server.post("/v1/completions", { prompt, temperature: 0, max_tokens: 20, stop: [stop], logprobs, stream: true });
      expect(joined(frames(await response.text()))).toBe(want);
      if (logprobs === undefined) continue;
      const { tokens, token_logprobs, top_logprobs, text_offset } = whole.logprobs;
      expect(new Set([tokens.length, token_logprobs.length, top_logprobs.length, text_offset.length]).size).toBe(1);
    }
  }
  await idle();
}, LIMIT);

test("logprobs: an entry per completion token, the greedy token first, all numbers finite", async () => {
  for (const top_logprobs of [0, 5, 20]) {
    const answer = await server.chat("Say hello.", { max_tokens: 8, logprobs: true, top_logprobs });
    const { content } = answer.choices[0].logprobs;
    expect(content).toHaveLength(answer.usage.completion_tokens);
    for (const entry of content) {
      expect(entry.top_logprobs).toHaveLength(top_logprobs);
      expect(entry.token === "" || entry.bytes.length === 0).toBe(false);
      const values = entry.top_logprobs.map((top: any) => top.logprob);
      expect(values).toEqual([...values].sort((a, b) => b - a));
      if (top_logprobs > 0) expect(entry.top_logprobs[0]).toMatchObject({ token: entry.token, logprob: entry.logprob });
      expect([entry.logprob, ...values].every((value) => Number.isFinite(value) && value <= 0)).toBe(true);
    }
    const response = await server.post(CHAT, { messages: user("Say hello."), temperature: 0, max_tokens: 8, logprobs: true, top_logprobs, stream: true });
    const carrying = frames(await response.text()).filter((chunk) => chunk.choices[0].logprobs);
    expect(carrying).toHaveLength(1);
    expect(carrying[0]?.choices[0].logprobs.content.map((entry: any) => entry.bytes)).toEqual(content.map((entry: any) => entry.bytes));
  }
}, LIMIT);

test("the same seed gives the same text alone, in company and after a cancel; tiny temperatures are greedy", async () => {
  const fields = { temperature: 0.8, top_p: 0.95, seed: 42, max_tokens: 32, ignore_eos: true };
  const ask = async () => (await server.chat("Write a poem about rain.", fields)).choices[0].message.content as string;
  const alone = await ask();
  const others = Array.from({ length: 7 }, (_, i) => server.chat(`Count from ${i}.`, { max_tokens: 40, ignore_eos: true }));
  expect(await ask()).toBe(alone);
  await Promise.all(others);
  const client = new AbortController();
  const leaving = server.post(CHAT, { messages: user("x"), max_tokens: 500, ignore_eos: true }, { signal: client.signal }).catch(() => null);
  client.abort();
  await leaving;
  expect(await ask()).toBe(alone);
  const greedy = (await server.chat("Name a colour.", { max_tokens: 12 })).choices[0].message.content;
  for (const tiny of [{ temperature: 1e-9, top_p: 1e-9 }, { temperature: 1, top_p: 1e-9 }, { temperature: 1e-9 }])
    expect((await server.chat("Name a colour.", { max_tokens: 12, ...tiny })).choices[0].message.content).toBe(greedy);
}, LIMIT);

test("cached_tokens: whole pages of a prompt that was seen before, the answer unchanged", async () => {
  for (const tokens of [15, 16, 17, 31, 32, 33, 48]) {
    const prompt = Array.from({ length: tokens }, (_, i) => 1000 + tokens * 50 + i);
    const cold = await server.complete(prompt, { max_tokens: 8, ignore_eos: true });
    const warm = await server.complete(prompt, { max_tokens: 8, ignore_eos: true });
    expect(warm.choices[0].text).toBe(cold.choices[0].text);
    expect([tokens, cold.usage.prompt_tokens_details.cached_tokens, warm.usage.prompt_tokens_details.cached_tokens]).toEqual([tokens, 0, 16 * Math.floor((tokens - 1) / 16)]);
  }
}, LIMIT);

test("prompts at the context limit and ids outside the vocabulary", async () => {
  await using small = await serveModel(["--ctx", "256", "--max-total-tokens", "1024"]);
  const ids = (count: number) => Array.from({ length: count }, (_, i) => 500 + (i % 200));
  for (const max_tokens of [undefined, 1, 1048576]) {
    for (const tokens of [256, 257]) {
      const response = await small.post("/v1/completions", { prompt: ids(tokens), max_tokens });
      expect(response.status).toBe(400);
      const { error } = (await response.json()) as Record<string, any>;
      expect(error.code).toBe("context_length_exceeded");
      expect(error.message).toContain(String(tokens));
      expect(error.message).toContain("256");
    }
    const last = await small.complete(ids(255), { max_tokens, ignore_eos: true });
    expect([last.usage.completion_tokens, last.choices[0].finish_reason]).toEqual([1, "length"]);
    const before = await small.complete(ids(254), { max_tokens, ignore_eos: true });
    expect([before.usage.completion_tokens, before.choices[0].finish_reason]).toEqual([max_tokens === 1 ? 1 : 2, "length"]);
  }
  for (const prompt of [[999999], [-1], [], [1.5], ""]) expect((await small.post("/v1/completions", { prompt })).status).toBe(400);
  expect((await small.chat("Hi", { max_tokens: 2 })).usage.completion_tokens).toBeLessThanOrEqual(2);
}, LIMIT);

test("clients that leave give their pages back, whatever they were waiting for", async () => {
  await idle();
  const before = await server.health();
  for (let i = 0; i < 40; i++) {
    const client = new AbortController();
    const stream = i % 2 === 0;
    const response = server.post(CHAT, { messages: user(`Story number ${i}`), stream, max_tokens: 2000, ignore_eos: true }, { signal: client.signal }).catch(() => null);
    if (stream) await (await response)?.body?.getReader().read();
    client.abort();
    await response;
  }
  await idle();
  const after = await server.health();
  expect(after.requests_started - before.requests_started).toBe(after.requests_cancelled - before.requests_cancelled + (after.requests_failed - before.requests_failed) + (after.requests_ok - before.requests_ok));
  expect(after.requests_cancelled - before.requests_cancelled).toBeGreaterThanOrEqual(20);
}, LIMIT);

test("a stream ends with its client, far from its end", async () => {
  await idle();
  const body = JSON.stringify({ messages: user("Go on and on."), stream: true, max_tokens: 4000, ignore_eos: true });
  const socket = connect({ host: "127.0.0.1", port: Number(new URL(server.url).port) });
  socket.on("error", () => {});
  socket.write(`POST ${CHAT} HTTP/1.1\r\nHost: test\r\nContent-Length: ${Buffer.byteLength(body)}\r\n\r\n${body}`);
  await new Promise<void>((resolve) => socket.once("data", () => resolve()));
  const before = await server.gauge("layerscale_generated_tokens_total");
  socket.destroy();
  await idle();
  // Tokens are counted when a sequence ends. The first ones left before the socket closed; a request nobody stops would make 4,000.
  const generated = (await server.gauge("layerscale_generated_tokens_total")) - before;
  expect(generated).toBeGreaterThan(0);
  expect(generated).toBeLessThan(1000);
}, LIMIT);

test("32 requests at once, streamed and not, over both routes", async () => {
  const answers = await Promise.all(
    Array.from({ length: 32 }, async (_, i) => {
      if (i % 4 === 0) return (await server.complete(`Item ${i} is`, { max_tokens: 12, ignore_eos: true })).usage.completion_tokens as number;
      if (i % 4 === 1) return (await server.chat(`Say ${i}`, { max_tokens: 12, ignore_eos: true })).usage.completion_tokens as number;
      const path = i % 4 === 2 ? CHAT : "/v1/completions";
      const prompt = i % 4 === 2 ? { messages: user(`Say ${i}`) } : { prompt: `Item ${i} is` };
      const response = await server.post(path, { ...prompt, max_tokens: 12, ignore_eos: true, temperature: 0, stream: true, stream_options: { include_usage: true } });
      return frames(await response.text()).at(-1)?.usage.completion_tokens as number;
    }),
  );
  expect(answers).toEqual(Array(32).fill(12));
  await idle();
}, LIMIT);
