import { connect } from "node:net";
import { expect, setDefaultTimeout, test } from "bun:test";
import { EngineError } from "../../../src/engine/errors.ts";
import { listen } from "../../../src/serve/server.ts";
import { post, rawRequest } from "./support/raw-http.ts";
import { says, startServer, until } from "./support/test-server.ts";

setDefaultTimeout(60_000);

const CHAT = "/v1/chat/completions";

async function errorOf(response: Response, status: number): Promise<Record<string, any>> {
  expect(response.status).toBe(status);
  expect(response.headers.get("content-type")).toContain("application/json");
  const { error } = (await response.json()) as { error: Record<string, any> };
  expect(typeof error.message === "string" && error.message !== "" && typeof error.type === "string").toBe(true);
  return error;
}

test("unknown routes, wrong methods, the envelope of the route", async () => {
  await using server = startServer(says("x"));
  for (const path of ["/", "/nope", "/v1/nope", "/v1/health", "/v1/models/", "/v1/chat/completions/", "/%", "/__proto__"]) expect((await errorOf(await fetch(server.url + path), 404)).type).toBe("not_found_error");
  const wrong = await fetch(server.url + CHAT, { method: "DELETE" });
  expect(wrong.headers.get("allow")).toBe("POST");
  await errorOf(wrong, 405);
  expect((await fetch(server.url + "/health", { method: "POST", body: "{}" })).headers.get("allow")).toBe("GET");
  const messages = await server.post("/v1/messages", {});
  expect(messages.status).toBe(404);
  expect((await messages.json()) as object).toEqual({ type: "error", error: { type: "not_found_error", message: "no route POST /v1/messages" }, request_id: messages.headers.get("request-id") });
  const head = await fetch(server.url + "/v1/models", { method: "HEAD" });
  expect([head.status, await head.text()]).toEqual([200, ""]);
  expect((await fetch(server.url + "/health?probe=1")).status).toBe(200);
});

test("CORS preflight needs no key and names what was asked for", async () => {
  await using server = startServer(says("x"), { key: "LSK-secret" });
  const response = await fetch(server.url + CHAT, { method: "OPTIONS", headers: { origin: "https://example.com", "access-control-request-method": "POST", "access-control-request-headers": "authorization,x-y" } });
  expect(response.status).toBe(204);
  expect(response.headers.get("access-control-allow-origin")).toBe("*");
  expect(response.headers.get("access-control-allow-methods")).toContain("POST");
  expect(response.headers.get("access-control-allow-headers")).toBe("authorization,x-y");
});

test("with a key: everything but health and preflight asks for it", async () => {
  await using server = startServer(says("x"), { key: "LSK-secret" });
  const get = (path: string, headers: Record<string, string> = {}) => fetch(server.url + path, { headers });
  for (const path of ["/health", "/healthz"]) expect((await get(path)).status).toBe(200);
  for (const path of ["/metrics", "/v1/models", "/v1/models/x", "/v1/sessions", "/nope"]) expect((await errorOf(await get(path), 401)).type).toBe("authentication_error");
  for (const headers of [{ authorization: "Bearer LSK-wrong" }, { authorization: "Basic LSK-secret" }, { authorization: "LSK-secret" }, { "x-api-key": "LSK-secre" }, { authorization: "Bearer " }] as Record<string, string>[])
    await errorOf(await get("/v1/models", headers), 401);
  for (const headers of [{ authorization: "Bearer LSK-secret" }, { authorization: "bearer LSK-secret" }, { "x-api-key": "LSK-secret" }] as Record<string, string>[])
    expect((await get("/v1/models", headers)).status).toBe(200);
  const body = { messages: [{ role: "user", content: "hi" }] };
  await errorOf(await server.post(CHAT, body), 401);
  expect((await server.post(CHAT, body, { "x-api-key": "LSK-secret" })).status).toBe(200);
  const messages = await server.post("/v1/messages", {});
  expect(messages.status).toBe(401);
  expect(await messages.json()).toMatchObject({ type: "error", error: { type: "authentication_error" } });
});

test("an open server takes any key", async () => {
  await using server = startServer(says("x"));
  for (const authorization of ["Bearer LSK-wrong", "Basic abc"]) expect((await fetch(server.url + "/v1/models", { headers: { authorization } })).status).toBe(200);
});

test("malformed bodies are refused shortly, as JSON, and the server lives on", async () => {
  await using server = startServer(says("x"));
  for (const path of [CHAT, "/v1/completions"]) {
    for (const body of ['{"messages":', "[".repeat(100_000), '{"__proto__":{"x":1}}', '{"messages":[],"messages":[]}', "[]", "null", ""]) {
      const error = await errorOf(await server.post(path, body), 400);
      expect(error.message.length).toBeLessThan(300);
    }
    await errorOf(await fetch(server.url + path, { method: "POST", body: new Uint8Array([0x22, 0xff, 0xfe, 0x22]) }), 400);
    await errorOf(await fetch(server.url + path, { method: "POST", headers: { "content-encoding": "gzip" }, body: "{}" }), 400);
  }
  expect(({} as Record<string, unknown>).x).toBeUndefined();
  expect((await fetch(server.url + "/v1/models", { headers: { "content-type": "application/json" } })).status).toBe(200);
  expect((await server.chat({})).status).toBe(200);
  expect(server.app.bodies.heldBytes).toBe(0);
});

test("bytes behind a short Content-Length: 400, then the connection is closed", async () => {
  await using server = startServer(says("x"));
  const { text, closed } = await rawRequest(server.port, [post(CHAT, "Content-Length: 5\r\n"), '{"mes' + "x".repeat(45)]);
  expect(text).toStartWith("HTTP/1.1 400");
  expect(text.match(/HTTP\/1\.1/g)).toHaveLength(1);
  expect(closed).toBe(true);
});

test("a body over the limit: 413 before it is read, declared or chunked", async () => {
  await using server = startServer(says("x"));
  const declared = await rawRequest(server.port, [post(CHAT, `Content-Length: ${4 * 2 ** 30}\r\n`)]);
  expect(declared.text).toStartWith("HTTP/1.1 413");
  expect(declared.text).toContain('"type":"request_too_large"');
  const mib = new Uint8Array(1 << 20).fill(0x61);
  function* sized() {
    yield post(CHAT, `Content-Length: ${200 << 20}\r\n`);
    for (let i = 0; i < 200; i++) yield mib;
  }
  expect((await rawRequest(server.port, sized())).text).toStartWith("HTTP/1.1 413");
  function* chunked() {
    yield post(CHAT, "Transfer-Encoding: chunked\r\n");
    for (let i = 0; i < 100; i++) {
      yield "100000\r\n";
      yield mib;
      yield "\r\n";
    }
    yield "0\r\n\r\n";
  }
  expect((await rawRequest(server.port, chunked())).text).toStartWith("HTTP/1.1 413");
  expect((await server.chat({})).status).toBe(200);
  expect(server.app.bodies.heldBytes).toBe(0);
});

test("a body that does not arrive: 408; too many bodies at once: 503; both give their bytes back", async () => {
  await using server = startServer(says("x"), { bodyLimits: { maxBytes: 1000, budgetBytes: 1500, deadlineMs: 100 } });
  const late = await rawRequest(server.port, [post(CHAT, "Content-Length: 900\r\n"), '{"messages":']);
  expect(late.text).toStartWith("HTTP/1.1 408");
  expect(late.text).toContain("timeout_error");
  expect(server.app.bodies.heldBytes).toBe(0);
  await using patient = startServer(says("x"), { bodyLimits: { maxBytes: 1000, budgetBytes: 1500, deadlineMs: 60_000 } });
  const answered = (text: string) => text.includes("\r\n\r\n") && text.includes("}");
  const first = connect({ host: "127.0.0.1", port: patient.port });
  first.write(post(CHAT, "Content-Length: 900\r\n") + '{"messages":');
  await until(() => patient.app.bodies.heldBytes === 900, "the first body to be reserved");
  const second = await rawRequest(patient.port, [post(CHAT, "Content-Length: 900\r\n"), '{"messages":'], answered);
  expect(second.text).toStartWith("HTTP/1.1 503");
  expect(second.text).toContain("server is holding too many request bodies");
  expect(patient.app.bodies.heldBytes).toBe(900);
  expect((await patient.chat({})).status).toBe(200);
  first.destroy();
  await until(() => patient.app.bodies.heldBytes === 0, "the first body to be given back");
});

test("health and models over the phases of a server", async () => {
  await using server = startServer(says("x"), { loading: true });
  const health = async () => {
    const response = await fetch(server.url + "/healthz");
    return { status: response.status, body: (await response.json()) as Record<string, unknown> };
  };
  const loading = await health();
  expect([loading.status, loading.body.status]).toEqual([503, "unavailable"]);
  expect((await errorOf(await server.chat({}), 503)).message).toContain("loading");
  expect((await fetch(server.url + "/v1/models")).status).toBe(503);
  server.app.identify({ name: "Org/Test-Model", contextLength: 2048 });
  const list = (await (await fetch(server.url + "/v1/models")).json()) as Record<string, any>;
  expect(list.data[0]).toMatchObject({ id: "Org/Test-Model", max_model_len: 2048, max_input_tokens: 2047, max_tokens: 2047, lifecycle: "active", line: null });
  expect(list).toMatchObject({ object: "list", has_more: false, first_id: "Org/Test-Model", last_id: "Org/Test-Model" });
  expect(Date.parse(list.data[0].created_at) / 1000).toBe(list.data[0].created);
  server.app.phase = "stopping";
  expect((await errorOf(await server.chat({}), 503)).message).toContain("stopping");
  server.app.phase = "failed";
  expect((await errorOf(await server.chat({}), 503)).message).toContain("failed");
  expect((await health()).status).toBe(503);
  await using ready = startServer(says("x"));
  const response = await fetch(ready.url + "/health");
  expect(response.status).toBe(200);
  const body = (await response.json()) as Record<string, unknown>;
  expect(Object.keys(body).sort()).toEqual(Object.keys(loading.body).sort());
  const { status, ...numbers } = body;
  expect(status).toBe("ok");
  expect(Object.values(numbers).every((value) => Number.isFinite(value))).toBe(true);
});

test("a model is found by its id raw, encoded and in any case", async () => {
  await using server = startServer(says("x"));
  for (const id of ["Org/Test-Model", "Org%2FTest-Model", "oRG/tEST-mODEL"]) expect(await (await fetch(`${server.url}/v1/models/${id}`)).json()).toMatchObject({ id: "Org/Test-Model", type: "model" });
  for (const id of ["nope", "Org", "%", "Org%2"]) await errorOf(await fetch(`${server.url}/v1/models/${id}`), 404);
});

test("engine refusals and failures have their status, streamed or not", async () => {
  await using server = startServer(says("x"));
  for (const stream of [false, true]) {
    for (const [error, status, type] of [
      [new EngineError("invalid", "too big for the pool: 300 > 256", "prompt", "pool"), 400, "invalid_request_error"],
      [new EngineError("unavailable", "the engine is stopping"), 503, "overloaded_error"],
      [new EngineError("engine", "device lost"), 500, "api_error"],
    ] as const) {
      server.engine.refusal = error;
      const refused = await errorOf(await server.chat({ stream }), status);
      expect(refused.type).toBe(type);
      expect(refused.message).toContain(error.message);
      if (status === 400) expect(refused).toMatchObject({ param: "messages", code: "pool" });
    }
  }
});

test("a failure in the middle of a stream is its last frame before [DONE]", async () => {
  await using server = startServer(says("abcdefgh"));
  server.engine.failure = "device lost";
  server.engine.failAfter = 3;
  const text = await (await server.chat({ stream: true })).text();
  expect(text).toContain('"content":"a');
  const frames = text.split("\n\n");
  expect(frames.slice(-2)).toEqual(["data: [DONE]", ""]);
  expect(JSON.parse(frames.at(-3)!.slice(6))).toEqual({ error: { message: "engine failure: device lost", type: "api_error" } });
  expect(server.app.metrics.totals()).toMatchObject({ started: 1, ok: 0, failed: 1, cancelled: 0 });
});

test("metrics: text format, counters by outcome and route, the four page gauges add up", async () => {
  await using server = startServer(says("Hello"));
  const scrape = async () => {
    const response = await fetch(server.url + "/metrics");
    expect(response.headers.get("content-type")).toContain("text/plain; version=0.0.4");
    const text = await response.text();
    const value = (series: string) => {
      const line = text.split("\n").find((candidate) => candidate.startsWith(series + " "));
      return line === undefined ? undefined : Number(line.slice(series.length + 1));
    };
    return { text, value };
  };
  const before = await scrape();
  expect(before.value('layerscale_requests_total{outcome="ok",route="chat"}')).toBe(0);
  await server.chat({});
  await server.post("/v1/completions", { prompt: "ab" });
  await server.chat({ top_k: 5 });
  server.engine.refusal = new EngineError("engine", "gone");
  await server.chat({});
  const after = await scrape();
  expect(after.value('layerscale_requests_total{outcome="ok",route="chat"}')).toBe(1);
  // The refused one and the one that met a broken engine.
  expect(after.value('layerscale_requests_total{outcome="failed",route="chat"}')).toBe(2);
  expect(after.value('layerscale_requests_total{outcome="ok",route="completions"}')).toBe(1);
  expect(after.value("layerscale_generated_tokens_total")).toBe(12);
  expect(after.value("layerscale_prompt_tokens_total")).toBe(11);
  expect(after.value('layerscale_build_info{version="0.0.0-test",model="Org/Test-Model"}')).toBe(1);
  expect(after.value("layerscale_request_duration_seconds_count")).toBe(2);
  expect((after.value("layerscale_kv_pages_free") ?? 0) + (after.value("layerscale_kv_pages_cached") ?? 0) + (after.value("layerscale_kv_pages_held") ?? 0)).toBe(after.value("layerscale_kv_pages")!);
  expect(after.text.split("\n").filter((line) => line !== "" && !line.startsWith("#")).every((line) => line.startsWith("layerscale_"))).toBe(true);
  const health = (await (await fetch(server.url + "/health")).json()) as Record<string, number>;
  expect(health).toMatchObject({ requests_started: 4, requests_ok: 2, requests_failed: 2, requests_cancelled: 0, generated_tokens: 12, prompt_tokens: 11 });
});

test("a port that is taken is not shared", async () => {
  await using server = startServer(says("x"));
  expect(() => listen(server.app, { host: "127.0.0.1", port: server.port })).toThrow(expect.objectContaining({ code: "EADDRINUSE" }));
});

test("a silent answer is not cut by the idle limit, and its connection is closed once it is idle", async () => {
  await using server = startServer(says("Hello"), { idleSeconds: 1 });
  const idleConnection = () => rawRequest(server.port, ["GET /v1/models HTTP/1.1\r\nHost: test\r\n\r\n"]);
  for (const stream of [true, false]) {
    server.engine.pause();
    const body = JSON.stringify({ messages: [{ role: "user", content: "hi" }], stream });
    const answer = rawRequest(server.port, [post(CHAT, `Content-Length: ${body.length}\r\n`), body], undefined, 50_000);
    await until(() => server.engine.running === 1, "the request to run");
    // Two connections were closed for idling in the meantime: the limit has passed twice.
    for (let i = 0; i < 2; i++) expect((await idleConnection()).closed).toBe(true);
    expect(server.engine.running).toBe(1);
    server.engine.resume();
    const { text, closed } = await answer;
    expect(text).toContain(stream ? "data: [DONE]" : '"content":"Hello"');
    expect(closed).toBe(true);
  }
});
