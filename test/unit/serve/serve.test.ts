import { expect, setDefaultTimeout, test } from "bun:test";
import type { LoadedModel } from "../../../src/model/types.ts";
import { App } from "../../../src/serve/app.ts";
import { serveUntilStopped } from "../../../src/serve/serve.ts";
import { listen } from "../../../src/serve/server.ts";
import { fakeEngine, tinySpec } from "../../support/fake-engine.ts";
import { byteTokenizer } from "./support/byte-tokenizer.ts";
import { sseFrames, until } from "./support/test-server.ts";

setDefaultTimeout(60_000);

const model: LoadedModel = {
  name: "fake-model", path: "/nowhere", format: "hf", spec: tinySpec, weights: { files: [], tensors: [] }, dtype: "f32",
  assets: {
    tokenizerJson: {}, tokenizerConfig: {},
    chatTemplate: "{% for m in messages %}{% if m.content == 'bad' %}{{ raise_exception('roles must alternate') }}{% endif %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}",
    files: () => null,
    materialize: () => { throw new Error("not needed"); },
  },
  generation: { temperature: null, topP: 0.8, eosTokenIds: [3, 257] },
};

/** The real engine over the model backend, served, with signals under the test's control. */
async function serveFake(libraryPath: string, assets: Partial<LoadedModel["assets"]> = {}) {
  const engine = await fakeEngine({ libraryPath });
  const app = new App({ version: "test", keyCheck: null });
  const server = listen(app, { host: "127.0.0.1", port: 0 });
  const requested = Promise.withResolvers<NodeJS.Signals>();
  const hurry = new AbortController();
  const stop = { requested: requested.promise, asked: new AbortController().signal, hurry: hurry.signal, received: false, dispose: () => {} };
  const loaded = { engine, model: { ...model, assets: { ...model.assets, ...assets } }, tokenizer: byteTokenizer(), contextLength: engine.info.contextLength, servedName: "fake-model" };
  const exit = serveUntilStopped(app, server, loaded, stop, server.url.origin);
  return {
    app, exit, engine,
    terminate: () => requested.resolve("SIGTERM"),
    hurry: () => hurry.abort(),
    chat: (fields: Record<string, unknown> = {}) =>
      fetch(`${server.url.origin}/v1/chat/completions`, { method: "POST", body: JSON.stringify({ messages: [{ role: "user", content: "hi" }], temperature: 0, ignore_eos: true, ...fields }) }),
    [Symbol.asyncDispose]: async () => {
      await server.stop(true);
      await engine.stop();
    },
  };
}

test("an engine failure ends every stream and answer with an error, then exit code 1", async () => {
  await using server = await serveFake("fake?fail=40&ms=2");
  const streams = Array.from({ length: 4 }, async () => {
    const response = await server.chat({ stream: true, max_tokens: 400 });
    return response.status === 200 ? sseFrames(await response.text()).at(-1) : ((await response.json()) as object);
  });
  const whole = await server.chat({ max_tokens: 400 });
  expect(whole.status).toBe(500);
  expect(await whole.json()).toMatchObject({ error: { type: "api_error", message: expect.stringContaining("device failed") } });
  for (const last of await Promise.all(streams)) expect(last).toMatchObject({ error: { type: "api_error" } });
  expect(await server.exit).toBe(1);
  expect(server.app.phase).toBe("failed");
  expect(server.app.metrics.totals()).toMatchObject({ started: 5, failed: 5 });
});

test("a stop signal lets requests finish, refuses new ones, then exit code 0", async () => {
  await using server = await serveFake("fake?ms=5");
  const running = server.chat({ max_tokens: 60 });
  await until(() => server.app.requests.size === 1, "the request to run");
  server.terminate();
  await until(() => server.app.phase === "stopping", "the stop to be seen");
  expect(await server.chat().then((response) => response.status, () => 503)).toBe(503);
  const answer = (await (await running).json()) as Record<string, any>;
  expect(answer.usage.completion_tokens).toBe(60);
  expect(await server.exit).toBe(0);
  expect(server.engine.accepting).toBe(false);
});

test("a second signal ends what runs with an error, exit code 0 all the same", async () => {
  await using server = await serveFake("fake?ms=5");
  const running = server.chat({ max_tokens: 400, stream: true });
  await until(() => server.app.requests.size === 1, "the request to run");
  const response = await running;
  server.terminate();
  await until(() => server.app.phase === "stopping", "the stop to be seen");
  server.hurry();
  expect(sseFrames(await response.text()).at(-1)).toEqual({ error: { message: "the server is stopping", type: "overloaded_error" } });
  expect(await server.exit).toBe(0);
});

test("the model's settings: its top_p, 1.0 where it is silent, its eos tokens and the tokenizer's", async () => {
  await using server = await serveFake("fake");
  expect(server.app.serving).toMatchObject({ defaults: { temperature: 1, topP: 0.8 }, eosTokenIds: [3, 257], vocab: tinySpec.vocab, contextLength: 512, name: "fake-model" });
});

test("a template that refuses gives 400 with its own words; a model without one, or with a broken one, still completes", async () => {
  await using server = await serveFake("fake");
  const refused = await server.chat({ messages: [{ role: "user", content: "bad" }] });
  expect(refused.status).toBe(400);
  expect(((await refused.json()) as any).error.message).toContain("roles must alternate");
  for (const [chatTemplate, words] of [[null, "no chat template"], ["{% for %}", "cannot be used"]] as const) {
    await using without = await serveFake("fake", { chatTemplate });
    const response = await without.chat();
    expect(response.status).toBe(400);
    expect(((await response.json()) as any).error.message).toContain(words);
  }
});
