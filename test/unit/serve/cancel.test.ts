import { expect, setDefaultTimeout, test } from "bun:test";
import { connect } from "node:net";
import { says, startServer, until, type TestServer } from "./support/test-server.ts";

setDefaultTimeout(60_000);

const LONG = says("word ".repeat(400));
const body = JSON.stringify({ messages: [{ role: "user", content: "hi" }], stream: true, ignore_eos: true });

function streamChat(server: TestServer, path = "/v1/chat/completions", payload: string = body) {
  const client = new AbortController();
  const response = fetch(server.url + path, { method: "POST", body: payload, signal: client.signal });
  return { client, response };
}

test("a client that leaves a stream ends its sequence and is counted as cancelled", async () => {
  await using server = startServer(LONG, { contextLength: 1_000_000 });
  const { client, response } = streamChat(server);
  const reader = (await response).body!.getReader();
  await reader.read();
  const before = server.engine.steps;
  expect(server.engine.running).toBe(1);
  client.abort();
  await reader.read().catch(() => {});
  await until(() => server.engine.running === 0, "the sequence to end");
  expect(server.engine.endings).toEqual(["cancelled"]);
  expect(server.engine.steps).toBeGreaterThanOrEqual(before);
  await until(() => server.app.requests.size === 0, "the request to be forgotten");
  expect(server.app.metrics.totals()).toMatchObject({ started: 1, ok: 0, failed: 0, cancelled: 1 });
});

test("leaving before the first token, streamed or not, ends the sequence too", async () => {
  await using server = startServer(LONG);
  for (const stream of [true, false]) {
    server.engine.pause();
    const { client, response } = streamChat(server, undefined, JSON.stringify({ messages: [{ role: "user", content: "hi" }], stream }));
    await until(() => server.engine.running === 1, "the request to run");
    client.abort();
    await expect(response).rejects.toThrow();
    await until(() => server.engine.running === 0 && server.app.requests.size === 0, "the sequence to end");
    server.engine.resume();
  }
  expect(server.app.metrics.totals()).toMatchObject({ started: 2, cancelled: 2 });
});

test("all choices of a completion end with their client", async () => {
  await using server = startServer(LONG, { contextLength: 1_000_000 });
  const { client, response } = streamChat(server, "/v1/completions", JSON.stringify({ prompt: ["a", "b", "c"], stream: true, ignore_eos: true }));
  await (await response).body!.getReader().read();
  expect(server.engine.running).toBe(3);
  client.abort();
  await until(() => server.engine.running === 0 && server.app.requests.size === 0, "the sequences to end");
  expect(server.engine.endings).toEqual(["cancelled", "cancelled", "cancelled"]);
});

test("a client that stops reading holds a bounded part of the stream", async () => {
  await using server = startServer(LONG, { contextLength: 10_000_000 });
  const socket = connect({ host: "127.0.0.1", port: server.port });
  socket.pause();
  socket.write(`POST /v1/chat/completions HTTP/1.1\r\nHost: test\r\nContent-Length: ${body.length}\r\n\r\n${body}`);
  await until(() => server.engine.steps > 0, "the stream to start");
  // Nobody reads: the sockets fill, and then the server stops pulling tokens.
  let last = -1;
  await until(async () => {
    const now = server.engine.steps;
    const still = now === last;
    last = now;
    if (!still) await Bun.sleep(500);
    return still;
  }, "the stream to stall", 60_000);
  expect(server.engine.running).toBe(1);
  expect(server.app.requests.size).toBe(1);
  socket.destroy();
  await until(() => server.engine.running === 0 && server.app.requests.size === 0, "the sequence to end");
}, 70_000);

test("500 disconnects leave nothing behind", async () => {
  await using server = startServer(LONG, { contextLength: 1_000_000 });
  const round = async (count: number) => {
    for (let i = 0; i < count; i++) {
      const { client, response } = streamChat(server);
      await (await response).body!.getReader().read();
      client.abort();
      await until(() => server.engine.running === 0, "the sequence to end");
    }
    await until(() => server.app.requests.size === 0, "the requests to be forgotten");
    Bun.gc(true);
    return process.memoryUsage().heapUsed;
  };
  const warm = await round(100);
  const after = await round(400);
  expect(server.app.metrics.totals()).toMatchObject({ started: 500, cancelled: 500 });
  // 400 streams that leaked even 50 kB each would add 20 MB.
  expect(after - warm).toBeLessThan(8e6);
}, 60_000);

test("a stopping server tells its streams so", async () => {
  await using server = startServer(LONG, { contextLength: 1_000_000 });
  const { unavailable } = await import("../../../src/serve/http-errors.ts");
  const { response } = streamChat(server);
  const text = (await response).text();
  await until(() => server.engine.running === 1, "the request to run");
  server.app.phase = "stopping";
  server.app.requests.abortAll(unavailable("the server is stopping"));
  expect((await text).split("\n\n").slice(-3)).toEqual(['data: {"error":{"message":"the server is stopping","type":"overloaded_error"}}', "data: [DONE]", ""]);
  await server.app.requests.idle();
  expect(server.app.metrics.totals()).toMatchObject({ failed: 1 });
});
