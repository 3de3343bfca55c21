/** The TCP request plane under load and under peers that misbehave. */
import { afterEach, describe, expect, test } from "bun:test";
import { connect, createServer, type Socket } from "node:net";
import { readDynamoEnvironment } from "../../../src/config/env.ts";
import type { EndpointName } from "../../../src/dynamo/discovery/records.ts";
import { stringifyJson } from "../../../src/dynamo/protocol/bigint-json.ts";
import { payloadCodec } from "../../../src/dynamo/protocol/codec.ts";
import { encodeFrame } from "../../../src/dynamo/request-plane/frame-codec.ts";
import { localAddress } from "../../../src/dynamo/request-plane/local-address.ts";
import { openRequestPlane } from "../../../src/dynamo/request-plane/open.ts";
import type { Endpoint, IncomingRequest } from "../../../src/dynamo/request-plane/request-plane.ts";
import { ResponseStream } from "../../../src/dynamo/request-plane/response-stream.ts";
import { type TcpOptions, TcpRequestPlane } from "../../../src/dynamo/request-plane/tcp-server.ts";
import { encodeTwoPart } from "../../../src/dynamo/request-plane/two-part.ts";
import { WorkHandler, type WorkErrorType, type WorkMetrics } from "../../../src/dynamo/request-plane/work-handler.ts";
import { PlaneCall, until } from "./plane-client.ts";

const name: EndpointName = { namespace: "dynamo", component: "backend", endpoint: "generate" };
const id = 0xe0634cbc480eab4dn;
const PATH = "e0634cbc480eab4d/generate";

const open: { close(): unknown }[] = [];
const sockets: Socket[] = [];
afterEach(async () => {
  for (const socket of sockets.splice(0)) socket.destroy();
  for (const item of open.splice(0)) await item.close();
});

const plane = async (endpoint: Endpoint, options: Partial<TcpOptions> = {}) => {
  const made = await TcpRequestPlane.listen({ host: "127.0.0.1", port: 0, maxMessageSize: 1 << 20, tls: null, dial: (target) => ResponseStream.open(target), ...options });
  open.push(made);
  await made.register(name, id, endpoint);
  return made;
};
const control = (patch: Record<string, unknown> = {}, port = 9) =>
  Buffer.from(stringifyJson({ id: "r", request_type: "single_in", payload_codec: "json", connection_info: { transport: "tcp_server", info: JSON.stringify({ address: `127.0.0.1:${port}`, subject: "s" }) }, ...patch }));
const request = (patch: { path?: string; control?: Record<string, unknown>; body?: Uint8Array; port?: number } = {}) =>
  encodeFrame({ path: patch.path ?? PATH, headers: {}, payload: encodeTwoPart(control(patch.control, patch.port), patch.body ?? Buffer.from("{}")) });

/** A connection with the acknowledgements that came on it. */
class Connection {
  readonly acks: string[] = [];
  closed = false;
  #bytes = Buffer.alloc(0);
  readonly socket: Socket;
  constructor(port: number, paused = false) {
    this.socket = connect(port, "127.0.0.1");
    sockets.push(this.socket);
    this.socket.on("error", () => {});
    this.socket.on("close", () => (this.closed = true));
    if (paused) this.socket.pause();
    this.socket.on("data", (chunk: Buffer) => {
      this.#bytes = Buffer.concat([this.#bytes, chunk]);
      while (this.#bytes.length >= 4 && this.#bytes.length >= 4 + this.#bytes.readUInt32BE(0)) {
        const end = 4 + this.#bytes.readUInt32BE(0);
        this.acks.push(this.#bytes.toString("utf8", 4, end));
        this.#bytes = this.#bytes.subarray(end);
      }
    });
    if (paused) this.socket.pause();
  }
}

const silent: WorkMetrics = { received() {}, answered() {}, sent() {}, cancelled() {}, failed() {}, done() {} };

describe("acknowledgements", () => {
  test("come in the order of the frames, one each, whatever the outcome and the chunk borders", async () => {
    const seen: string[] = [];
    const made = await plane(({ control }) => {
      seen.push(control.id);
      return control.id.endsWith("7") ? { refused: `no ${control.id}` } : undefined;
    });
    const kinds = ["", "unknown endpoint", "malformed request", "no "];
    const frames = Array.from({ length: 200 }, (_, i) => {
      if (i % 5 === 1) return { kind: 1, bytes: request({ path: "1/none" }) };
      if (i % 5 === 2) return { kind: 2, bytes: request({ control: { connection_info: null } }) };
      return { kind: i % 10 === 7 ? 3 : 0, bytes: request({ control: { id: `r${i}` } }) };
    });
    const expected = frames.map(({ kind }, i) => (i % 5 === 2 ? 2 : kind));
    for (const size of [100_000, 613, 7]) {
      seen.length = 0;
      const connection = new Connection(made.port);
      const bytes = Buffer.concat(frames.map((frame) => frame.bytes));
      for (let at = 0; at < bytes.length; at += size) connection.socket.write(bytes.subarray(at, at + size));
      await until("all acknowledgements", () => connection.acks.length === frames.length);
      expect(connection.acks.map((ack) => (ack === "" ? 0 : kinds.findIndex((kind, i) => i > 0 && ack.startsWith(`Server unavailable: ${kind}`))))).toEqual(expected);
      expect(seen).toEqual(frames.flatMap((_, i) => ([1, 2].includes(i % 5) ? [] : [`r${i}`])));
    }
  });

  test("leave before any work, and the prologue before any token", async () => {
    let begun = false;
    const handler = new WorkHandler(async function* (_body, { signal }) {
      begun = true;
      // Queued behind others: nothing comes for long.
      await new Promise((resolve) => signal.addEventListener("abort", resolve, { once: true }));
      yield* [];
    }, silent);
    let startedAtAck: boolean | null = null;
    const made = await plane((incoming) => {
      const taken = handler.accept(incoming);
      startedAtAck = begun;
      return taken;
    });
    const call = await PlaneCall.send(`127.0.0.1:${made.port}/${PATH}`, {});
    await until("prologue", () => call.prologue);
    expect([call.ack, startedAtAck, call.prologue, call.items.length]).toEqual(["", false, { error: null }, 0]);
    call.control("kill");
    await until("ended", () => handler.inFlight === 0);
    call.close();
  });

  test("a peer that does not read them is not read from either, and loses nothing when it does", async () => {
    let taken = 0;
    const made = await plane(() => {
      taken += 1;
      return { refused: "x".repeat(20_000) };
    });
    const connection = new Connection(made.port, true);
    const total = 2_000;
    const frame = request({ body: Buffer.alloc(4_000, 32) });
    for (let i = 0; i < total; i++) connection.socket.write(frame);
    let before = -1;
    await until("the plane rests", async () => {
      const rests = before === taken && taken > 0;
      before = taken;
      await new Promise((resolve) => setTimeout(resolve, 100));
      return rests;
    }, 30_000);
    expect(taken).toBeLessThan(total / 2);
    connection.socket.resume();
    await until("all acknowledgements", () => connection.acks.length === total, 30_000);
    expect(taken).toBe(total);
  }, 60_000);
});

describe("limits", () => {
  test("a frame over the limit costs its connection alone, at its lengths and not at its bytes", async () => {
    const made = await plane(() => {}, { maxMessageSize: 4096 });
    const other = new Connection(made.port);
    other.socket.write(request());
    const big = new Connection(made.port);
    big.socket.write(request({ body: Buffer.alloc(8_000, 32) }).subarray(0, 1_000));
    await until("closed", () => big.closed);
    expect(big.acks).toEqual([]);
    other.socket.write(request());
    await until("the other is served on", () => other.acks.length === 2);
  });
  test("unfinished frames are bounded together; finished ones and their connections go on", async () => {
    const made = await plane(() => {}, { maxMessageSize: 64 << 10 });
    const other = new Connection(made.port);
    other.socket.write(request());
    const half = request({ body: Buffer.alloc(60_000, 32) }).subarray(0, 50_000);
    const halves = Array.from({ length: 24 }, () => new Connection(made.port));
    for (const connection of halves) connection.socket.write(half);
    // 8 frames of 64 KiB: ten halves fit, whoever comes later goes.
    await until("some are closed", () => halves.filter(({ closed }) => closed).length >= 24 - 11);
    for (const connection of halves) connection.socket.destroy();
    other.socket.write(request());
    await until("the other is served on", () => other.acks.length === 2);
    const late = new Connection(made.port);
    late.socket.write(request({ body: Buffer.from(JSON.stringify("x".repeat(60_000))) }));
    await until("room again", () => late.acks.length === 1);
    expect(late.acks).toEqual([""]);
  });
  test("connections beyond the limit are closed at once, those before are served, and room comes back", async () => {
    const made = await plane(() => {}, { maxConnections: 3 });
    const first = Array.from({ length: 3 }, () => new Connection(made.port));
    for (const connection of first) connection.socket.write(request());
    await until("three are served", () => first.every(({ acks }) => acks.length === 1));
    const more = Array.from({ length: 5 }, () => new Connection(made.port));
    await until("the others are closed", () => more.every(({ closed }) => closed));
    first[0]!.socket.destroy();
    await until("room again", async () => {
      const late = new Connection(made.port);
      late.socket.write(request());
      await until("served or closed", () => late.acks.length === 1 || late.closed);
      return late.acks.length === 1;
    });
  });
  test("requests in work are bounded; the next one is refused and not queued", async () => {
    const rejected: string[] = [];
    const handler = new WorkHandler(async function* (_body, { signal }) {
      await new Promise((resolve) => signal.addEventListener("abort", resolve, { once: true }));
      yield* [];
    }, silent, (why) => rejected.push(why), 2);
    const made = await plane(handler.accept);
    const calls = [await PlaneCall.send(`127.0.0.1:${made.port}/${PATH}`, {}), await PlaneCall.send(`127.0.0.1:${made.port}/${PATH}`, {})];
    const third = await PlaneCall.send(`127.0.0.1:${made.port}/${PATH}`, {});
    expect([calls.map(({ ack }) => ack), third.ack, rejected]).toEqual([["", ""], expect.stringContaining("capacity"), ["capacity"]]);
    await handler.stop("test", 5_000);
    for (const call of [...calls, third]) call.close();
  });
});

describe("dialling back", () => {
  test("a frontend that accepts no connection ends the request in a bounded time", async () => {
    const failures: WorkErrorType[] = [];
    let done = 0;
    const handler = new WorkHandler(async function* () {}, { ...silent, failed: (type) => failures.push(type), done: () => done++ });
    // Nobody listens on the discard port of loopback.
    const made = await plane(handler.accept, { dial: (target) => ResponseStream.open(target, null, 500) });
    const connection = new Connection(made.port);
    connection.socket.write(request({ port: 9 }));
    await until("given up", () => done === 1);
    expect([connection.acks, failures, handler.inFlight]).toEqual([[""], ["response_stream"], 0]);
  });

  for (const codec of ["json", "msgpack"] as const)
    test(`a frontend that does not read an answer: what is produced stays bounded, neighbours run on (${codec})`, async () => {
      let made = 0;
      const bytes = "y".repeat(1_000);
      const handler = new WorkHandler(async function* (body, { signal }) {
        const { count } = body as { count: number };
        for (let i = 0; i < count && !signal.aborted; i++) {
          made += 1;
          yield { i, bytes };
        }
      }, silent);
      const listener = await plane(handler.accept);
      const address = `127.0.0.1:${listener.port}/${PATH}`;
      const slow = await PlaneCall.send(address, { count: 1_000_000 }, { codec, paused: true });
      let before = -1;
      await until("production rests", async () => {
        const rests = before === made && made > 0;
        before = made;
        await new Promise((resolve) => setTimeout(resolve, 100));
        return rests;
      }, 30_000);
      // What the two sockets' buffers hold, and no more.
      expect(made).toBeLessThan(20_000);
      const neighbour = await (await PlaneCall.send(address, { count: 500 }, { codec })).done();
      expect([neighbour.items.length, neighbour.final]).toEqual([500, true]);
      const rested = made;
      slow.answer!.resume();
      await until("production goes on", () => made > rested + 5_000, 30_000);
      slow.control("kill");
      await until("ended", () => handler.inFlight === 0);
      slow.close();
    }, 60_000);

  test("64-bit numbers pass both codecs exactly, both ways", async () => {
    const bodies: unknown[] = [];
    const numbers = { transfer_id: 2n ** 64n - 1n, room: 2n ** 63n, seed: -(2n ** 63n), small: 7, edge: 2n ** 53n + 1n };
    const handler = new WorkHandler(async function* (body) {
      bodies.push(body);
      yield { disaggregated_params: numbers };
    }, silent);
    const made = await plane((incoming: IncomingRequest) => handler.accept(incoming));
    for (const codec of ["json", "msgpack"] as const) {
      const call = await (await PlaneCall.send(`127.0.0.1:${made.port}/${PATH}`, { prefill_result: numbers }, { codec })).done();
      expect((call.items[0] as Record<string, unknown>).disaggregated_params).toEqual(numbers);
      expect(payloadCodec(codec)!.decode(payloadCodec(codec)!.encode(numbers))).toEqual(numbers);
    }
    expect(bodies).toEqual([{ prefill_result: numbers }, { prefill_result: numbers }]);
  });

  test("an address that names nobody, and a listener that closes at once, are one failed request each", async () => {
    const closing = createServer((socket) => socket.destroy());
    await new Promise<void>((resolve) => closing.listen(0, "127.0.0.1", resolve));
    open.push(closing);
    let cancelled = 0;
    let failed = 0;
    let done = 0;
    const handler = new WorkHandler(async function* (_body, { signal }) {
      await new Promise<void>((resolve) => (signal.aborted ? resolve() : signal.addEventListener("abort", () => resolve(), { once: true })));
      yield* [];
    }, { ...silent, cancelled: () => cancelled++, failed: () => failed++, done: () => done++ });
    const made = await plane(handler.accept);
    const connection = new Connection(made.port);
    connection.socket.write(request({ port: (closing.address() as { port: number }).port }));
    await until("ended", () => done === 1);
    expect([cancelled + failed, handler.inFlight]).toEqual([1, 0]);
  });
});

describe("the address", () => {
  const environment = (patch: Record<string, string>) => readDynamoEnvironment(patch);
  test.each([[{ DYN_TCP_RPC_HOST: "127.0.0.1", POD_IP: "192.0.2.1" }, "127.0.0.1:"], [{ POD_IP: "127.0.0.1" }, "127.0.0.1:"], [{ DYN_TCP_RPC_HOST: "[::1]" }, "[::1]:"]])("%p", async (patch, start) => {
    const made = await openRequestPlane(environment(patch as Record<string, string>));
    open.push(made);
    expect((made.transport(name, id) as { tcp: string }).tcp).toMatch(new RegExp(`^${start.replace(/[[\]]/g, "\\$&")}\\d+/${PATH}$`));
  });
  test.each<Record<string, string>>([{ DYN_TCP_RPC_HOST: "0.0.0.0" }, { POD_IP: "::" }, { DYN_TCP_RPC_HOST: "[::]" }])('%p means this host: "all addresses" would send others to themselves', async (patch: Record<string, string>) => {
    const made = await openRequestPlane(environment(patch));
    open.push(made);
    expect(made.host).toBe(localAddress());
  });
  test.each([["DYN_TCP_RPC_HOST", { DYN_TCP_RPC_HOST: "192.0.2.1" }], ["POD_IP", { POD_IP: "192.0.2.1" }]])("%s that is no address of this host is a start error", async (variable, patch) => {
    await expect(openRequestPlane(environment(patch as Record<string, string>))).rejects.toThrow(new RegExp(`^${variable}.*192\\.0\\.2\\.1`));
  });
});
