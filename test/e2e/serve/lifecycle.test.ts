import { expect, test } from "bun:test";
import { mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { eventually, launch } from "../../support/launch.ts";
import { frames, model, serveModel, startListening } from "./support.ts";

const LIMIT = 120_000;
const LONG = { messages: [{ role: "user", content: "Tell me a long story." }], stream: true, ignore_eos: true, temperature: 0 };

test("listens before the model is loaded, says 503 until it is, stops with exit code 0", async () => {
  const { process, url } = await startListening();
  await using _ = process;
  const first = await fetch(`${url}/health`);
  expect([200, 503]).toContain(first.status);
  const models = await eventually(async () => {
    const response = await fetch(`${url}/v1/models`);
    return response.status === 200 ? ((await response.json()) as Record<string, any>) : null;
  }, "/v1/models");
  await process.log("ready");
  expect((await fetch(`${url}/health`)).status).toBe(200);
  const after = (await (await fetch(`${url}/v1/models`)).json()) as Record<string, any>;
  expect(after.data[0].id).toBe(models.data[0].id);
  process.signal("SIGTERM");
  expect(await process.exit()).toBe(0);
  await expect(fetch(`${url}/health`)).rejects.toThrow();
}, LIMIT);

test("SIGTERM and SIGINT while the model is loading: exit code 0", async () => {
  for (const signal of ["SIGTERM", "SIGINT"] as const) {
    const { process } = await startListening();
    await using _ = process;
    process.signal(signal);
    expect(await process.exit()).toBe(0);
  }
}, LIMIT);

test("a taken port is one clear line and exit code 1", async () => {
  const { process: holder, url } = await startListening();
  await using _ = holder;
  const port = new URL(url).port;
  const second = launch(["serve", "--model", model(), "--port", port]);
  await using __ = second;
  expect(await second.exit()).toBe(1);
  expect(second.stderr.trim().split("\n")).toEqual([expect.stringContaining(`${port} on 127.0.0.1 is already in use`)]);
}, LIMIT);

test("a model that cannot be loaded is a clear line and exit code 1, also after the port was opened", async () => {
  const dir = mkdtempSync(join(tmpdir(), "layerscale-serve-"));
  try {
    const broken = join(dir, "broken.gguf");
    writeFileSync(broken, "GGUF");
    for (const path of [broken, join(dir, "missing")]) {
      const process = launch(["serve", "--model", path, "--port", "0"]);
      await using _ = process;
      expect(await process.exit()).toBe(1);
      const words = process.stderr.trim().split("\n").filter((line) => !line.startsWith("{"));
      expect(words).toEqual([expect.stringContaining(path)]);
    }
  } finally {
    rmSync(dir, { recursive: true, force: true });
  }
}, LIMIT);

test("SIGTERM lets a running stream finish, refuses new requests, then exits 0", async () => {
  await using server = await serveModel();
  const response = await server.post("/v1/chat/completions", { ...LONG, max_tokens: 60 });
  const reader = response.body!.getReader();
  const decoder = new TextDecoder();
  let text = decoder.decode((await reader.read()).value, { stream: true });
  server.process.signal("SIGTERM");
  await server.process.log("stopping");
  // A new connection is refused; a kept one is told 503.
  const late = await server.post("/v1/chat/completions", { ...LONG, max_tokens: 1 }).then((r) => r.status, () => 503);
  expect(late).toBe(503);
  for (let next = await reader.read(); !next.done; next = await reader.read()) text += decoder.decode(next.value, { stream: true });
  const chunks = frames(text);
  expect(chunks.at(-1)?.choices[0].finish_reason).toBe("length");
  expect(await server.process.exit()).toBe(0);
}, LIMIT);

test("a second signal ends streams with an error at once, exit code 0", async () => {
  await using server = await serveModel();
  const response = await server.post("/v1/chat/completions", { ...LONG, max_tokens: 7000 });
  const reader = response.body!.getReader();
  const decoder = new TextDecoder();
  let text = decoder.decode((await reader.read()).value, { stream: true });
  server.process.signal("SIGTERM");
  await server.process.log("stopping");
  server.process.signal("SIGINT");
  for (let next = await reader.read(); !next.done; next = await reader.read()) text += decoder.decode(next.value, { stream: true });
  expect(frames(text).at(-1)).toEqual({ error: { message: "the server is stopping", type: "overloaded_error" } });
  expect(await server.process.exit()).toBe(0);
}, LIMIT);

test("after kill -9 a new server takes the same port and answers", async () => {
  const first = await serveModel();
  const port = new URL(first.url).port;
  first.process.signal("SIGKILL");
  await first.process.exit();
  const second = launch(["serve", "--model", model(), "--port", port]);
  await using _ = second;
  await second.log("ready");
  const response = await fetch(`http://127.0.0.1:${port}/v1/chat/completions`, { method: "POST", body: JSON.stringify({ messages: [{ role: "user", content: "Hi" }], max_tokens: 4 }) });
  expect(response.status).toBe(200);
}, LIMIT);
