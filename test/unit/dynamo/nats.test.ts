/** NATS as request and event plane, against a real nats-server. */
import { afterEach, describe, expect, test } from "bun:test";
import { mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { createServer } from "node:net";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { connect, headers as natsHeaders, type NatsConnection, nkeys } from "@nats-io/transport-node";
import { readDynamoEnvironment } from "../../../src/config/env.ts";
import { UsageError } from "../../../src/config/flags.ts";
import type { EndpointName } from "../../../src/dynamo/discovery/records.ts";
import { NatsEventPlane } from "../../../src/dynamo/event-plane/nats-publisher.ts";
import { NatsLink } from "../../../src/dynamo/nats/link.ts";
import { natsOptions } from "../../../src/dynamo/nats/options.ts";
import { decodeMsgpack } from "../../../src/dynamo/protocol/msgpack.ts";
import { NatsRequestPlane } from "../../../src/dynamo/request-plane/nats-plane.ts";
import { openRequestPlane } from "../../../src/dynamo/request-plane/open.ts";
import { PlaneError } from "../../../src/dynamo/request-plane/request-plane.ts";
import { WorkHandler, type WorkMetrics } from "../../../src/dynamo/request-plane/work-handler.ts";
import { hasNats, NatsServer } from "../../support/nats-server.ts";
import { PlaneCall, until } from "./plane-client.ts";

const name: EndpointName = { namespace: "dynamo", component: "backend", endpoint: "generate" };
const id = 0xe0634cbc480eab4dn;
const SUBJECT = "dynamo_backend.generate-e0634cbc480eab4d";
const environment = (patch: Record<string, string> = {}) => readDynamoEnvironment({ DYN_REQUEST_PLANE: "nats", DYN_EVENT_PLANE: "nats", DYN_TCP_RPC_HOST: "127.0.0.1", ...patch });

const open: { close(): unknown }[] = [];
const servers: NatsServer[] = [];
afterEach(async () => {
  for (const item of open.splice(0).reverse()) await item.close();
  for (const server of servers.splice(0)) await server[Symbol.asyncDispose]();
});
const opened = <T extends { close(): unknown }>(item: T): T => (open.push(item), item);
const nats = async (config?: string) => {
  const server = await NatsServer.start(config);
  servers.push(server);
  return server;
};
const client = async (server: NatsServer, options: Record<string, unknown> = {}): Promise<NatsConnection> => opened(await connect({ servers: `127.0.0.1:${server.port}`, maxReconnectAttempts: -1, reconnectTimeWait: 100, ...options }));

const metrics: WorkMetrics = { received() {}, answered() {}, sent() {}, cancelled() {}, failed() {}, done() {} };
/** Echoes numbers until it is aborted. */
const counting = () =>
  new WorkHandler(async function* (body, { signal, headers }) {
    const { count } = body as { count: number };
    for (let i = 0; i < count && !signal.aborted; i++) {
      yield { data: { token_ids: [i], headers } };
      await new Promise((resolve) => setImmediate(resolve));
    }
  }, metrics);
const call = (nc: NatsConnection, body: unknown, subject = SUBJECT) =>
  PlaneCall.sendBy(async (payload, fields) => {
    const headers = natsHeaders();
    for (const [key, value] of Object.entries(fields)) headers.set(key, value);
    return (await nc.request(subject, payload, { headers, timeout: 5_000 })).string();
  }, body);
const served = async (server: NatsServer, patch: Record<string, string> = {}) => {
  const plane = opened(await openRequestPlane(environment({ NATS_SERVER: server.url, ...patch })));
  const handler = counting();
  await plane.register(name, id, handler.accept);
  return { plane, handler };
};

describe.skipIf(!hasNats)("request plane", () => {
  test("record, subject and queue group are those of the reference; a request is acknowledged empty and answered over TCP", async () => {
    const server = await nats();
    const { plane } = await served(server);
    expect(plane.transport(name, id)).toEqual({ nats_tcp: SUBJECT });
    const nc = await client(server);
    const answer = await (await call(nc, { count: 3 })).done();
    expect([answer.ack, answer.handshake, answer.prologue, answer.tokens, answer.final, answer.sentinel]).toEqual(["", { subject: "s-1", stream_type: "response" }, { error: null }, [0, 1, 2], true, true]);
    expect((answer.items[0]!.data as Record<string, any>).headers).toMatchObject({ "request-id": "id-1" });
    // Of two members of one queue group, one gets a message.
    let other = 0;
    nc.subscribe(SUBJECT, { queue: "q", callback: () => void other++ });
    await nc.flush();
    const replies = new Set<string>();
    nc.subscribe("count.replies", { callback: (_error, message) => void replies.add(message.string()) });
    for (let i = 0; i < 40; i++) nc.publish(SUBJECT, "no message", { reply: "count.replies" });
    await nc.flush();
    await until("every message went to one of them", () => other > 0 && replies.size > 0);
    expect(other).toBeLessThan(40);
  });

  test("what is no request is refused at once, and an endpoint that left has no responders", async () => {
    const server = await nats();
    const { plane, handler } = await served(server);
    const nc = await client(server);
    expect((await nc.request(SUBJECT, "junk", { timeout: 5_000 })).string()).toStartWith("Server unavailable: malformed request");
    expect((await PlaneCall.sendBy(async (payload) => (await nc.request(SUBJECT, payload, { timeout: 5_000 })).string(), {}, { control: { request_type: "many_in" } })).ack).toContain("many_in");
    handler.close("shutting down");
    expect((await call(nc, { count: 1 })).ack).toBe("Server unavailable: shutting down");
    await plane.unregister(name, id);
    await expect(call(nc, { count: 1 })).rejects.toThrow(/no responders/i);
  });

  test("kill -9 of nats-server: open answers run on, and a new server serves again without a step", async () => {
    const server = await nats();
    const { handler } = await served(server);
    const first = await client(server);
    const long = await call(first, { count: 1_000_000 });
    await until("items", () => long.items.length > 0);
    await server.kill();
    const before = long.items.length;
    await until("items without a server", () => long.items.length > before + 100);
    await server.up();
    const nc = await client(server);
    const again = await until("served again", () => call(nc, { count: 2 }).catch(() => null), 30_000);
    expect((await again.done()).tokens).toEqual([0, 1]);
    long.control("kill");
    await until("all ended", () => handler.inFlight === 0);
    long.close();
  }, 60_000);

  test("a server that refuses the login for a while is not given up", async () => {
    const login = (password: string) => `authorization { user: "u", password: "${password}" }`;
    const server = await nats(login("p"));
    await served(server, { NATS_AUTH_USERNAME: "u", NATS_AUTH_PASSWORD: "p" });
    await server.kill();
    server.config = login("other");
    await server.up();
    await until("refused more than twice", () => (server.output.match(/authentication error/gi)?.length ?? 0) > 2, 30_000);
    await server.kill();
    server.config = login("p");
    await server.up();
    const nc = await client(server, { user: "u", pass: "p" });
    const again = await until("served again", () => call(nc, { count: 1 }).catch(() => null), 30_000);
    await again.done();
  }, 90_000);
});

describe.skipIf(!hasNats)("logins", () => {
  const user = nkeys.createUser();
  const seed = new TextDecoder().decode(user.getSeed());
  const cases: [string, string, Record<string, string>][] = [
    ["user and password", 'authorization { user: "u", password: "p" }', { NATS_AUTH_USERNAME: "u", NATS_AUTH_PASSWORD: "p", NATS_AUTH_TOKEN: "unused" }],
    ["token", 'authorization { token: "s3cret" }', { NATS_AUTH_TOKEN: "s3cret" }],
    ["nkey", `authorization { users: [ { nkey: "${user.getPublicKey()}" } ] }`, { NATS_AUTH_NKEY: seed }],
    ["Dynamo's default user", 'authorization { user: "user", password: "user" }', {}],
  ];
  test.each(cases)("%s", async (_name, config, patch) => {
    const server = await nats(config);
    const { handler } = await served(server, patch);
    expect(handler.inFlight).toBe(0);
    for (const [variable, wrong] of [["NATS_AUTH_PASSWORD", { NATS_AUTH_USERNAME: "u", NATS_AUTH_PASSWORD: "wrong" }], ["NATS_AUTH_TOKEN", { NATS_AUTH_TOKEN: "wrong" }]] as const)
      await expect(openRequestPlane(environment({ NATS_SERVER: server.url, ...wrong }))).rejects.toThrow(variable);
  });
  test("credentials in the address", async () => {
    const server = await nats('authorization { user: "u", password: "p" }');
    await served(server, { NATS_SERVER: `nats://u:p@127.0.0.1:${server.port}` });
  });
  test("a subject that the login may not listen to is a start error", async () => {
    const server = await nats('authorization { users: [ { user: "u", password: "p", permissions: { subscribe: "other.>" } } ] }');
    const error = await served(server, { NATS_AUTH_USERNAME: "u", NATS_AUTH_PASSWORD: "p" }).catch((caught: unknown) => caught);
    expect(error).toBeInstanceOf(PlaneError);
    expect((error as Error).message).toContain(SUBJECT);
  });
});

describe("what cannot work is said by name", () => {
  test("no server: NATS_SERVER, after a bounded time", async () => {
    const taken = createServer((socket) => socket.destroy());
    await new Promise<void>((resolve) => taken.listen(0, "127.0.0.1", resolve));
    const { port } = taken.address() as { port: number };
    const options = natsOptions(environment({ NATS_SERVER: `nats://127.0.0.1:${port}` }));
    await expect(NatsLink.open(options, 300)).rejects.toThrow(/^NATS_SERVER: cannot connect to 127\.0\.0\.1:\d+ within 0\.3 s/);
    taken.close();
    await expect(NatsLink.open(options, 300)).rejects.toThrow("NATS_SERVER: cannot connect");
  });
  const folder = mkdtempSync(join(tmpdir(), "ls-nats-options-"));
  const notPem = join(folder, "file.pem");
  writeFileSync(notPem, "not a certificate");
  const bad: [string, Record<string, string>][] = [
    ["NATS_SERVER", { NATS_SERVER: "127.0.0.1:4222" }], ["NATS_SERVER", { NATS_SERVER: "http://127.0.0.1" }], ["NATS_SERVER", { NATS_SERVER: "nats://" }],
    ["NATS_AUTH_PASSWORD", { NATS_AUTH_USERNAME: "u" }], ["NATS_AUTH_USERNAME", { NATS_AUTH_PASSWORD: "p" }], ["NATS_AUTH_NKEY", { NATS_AUTH_NKEY: "nonsense" }],
    ["NATS_AUTH_CREDENTIALS_FILE", { NATS_AUTH_CREDENTIALS_FILE: join(folder, "none") }], ["NATS_AUTH_CREDENTIALS_FILE", { NATS_AUTH_CREDENTIALS_FILE: notPem }],
    ["NATS_TLS_CLIENT_KEY_PATH", { NATS_TLS_CLIENT_CERT_PATH: notPem, NATS_SERVER: "tls://h" }], ["NATS_TLS_CLIENT_CERT_PATH", { NATS_TLS_CLIENT_CERT_PATH: notPem, NATS_TLS_CLIENT_KEY_PATH: notPem, NATS_SERVER: "tls://h" }],
    ["NATS_TLS_CA_CERT_PATH", { NATS_TLS_CA_CERT_PATH: notPem, NATS_SERVER: "tls://h" }], ["NATS_SERVER", { NATS_TLS_INSECURE: "1", NATS_SERVER: "nats://h" }],
  ];
  test.each(bad)("%s %p", (variable, patch) => {
    expect(() => natsOptions(environment(patch))).toThrow(UsageError);
    expect(() => natsOptions(environment(patch))).toThrow(variable);
    for (const secret of Object.values(patch).filter((value) => value === "p")) expect(() => natsOptions(environment(patch))).not.toThrow(`"${secret}"`);
  });
  test("the options' folder goes", () => rmSync(folder, { recursive: true }));
});

describe.skipIf(!hasNats)("event plane", () => {
  const events = async (server: NatsServer) => {
    const link = await NatsLink.open(natsOptions(environment({ NATS_SERVER: server.url })));
    const plane = opened(new NatsEventPlane(link));
    return { link, publisher: await plane.publisher("kv-events", name) };
  };
  const PREFIX = "namespace.dynamo.component.backend.endpoint.generate";
  const listen = (nc: NatsConnection) => {
    const heard: { sequence: number; topic: string; payload: unknown[] }[] = [];
    nc.subscribe(`${PREFIX}.*`, {
      callback: (_error, message) => {
        const { payload, ...envelope } = decodeMsgpack(message.data) as { payload: Uint8Array; sequence: number; topic: string };
        heard.push({ ...envelope, payload: decodeMsgpack(payload) as unknown[] });
      },
    });
    return heard;
  };

  test("bare envelopes under the endpoint's subject; the record names the prefix", async () => {
    const server = await nats();
    const nc = await client(server);
    const heard = listen(nc);
    await nc.flush();
    const { publisher } = await events(server);
    expect(publisher.transport).toEqual({ kind: "Nats", config: { subject_prefix: PREFIX } });
    publisher.publish([{ x: 1 }]);
    publisher.publish([{ x: 2 }]);
    await until("two messages", () => heard.length === 2);
    expect(heard.map(({ sequence, topic, payload }) => [sequence, topic, payload])).toEqual([[0, "kv-events", [{ x: 1 }]], [1, "kv-events", [{ x: 2 }]]]);
  });
  test("what exceeds the server's payload is cut; a single event too large is left out", async () => {
    const server = await nats("max_payload: 4096");
    const nc = await client(server);
    const heard = listen(nc);
    await nc.flush();
    const { publisher } = await events(server);
    publisher.publish(Array.from({ length: 20 }, (_, i) => ({ i, text: "x".repeat(900) })));
    publisher.publish([{ text: "x".repeat(9000) }]);
    publisher.publish([{ i: 20 }]);
    await until("the last one", () => heard.at(-1)?.payload.some((event) => (event as { i: number }).i === 20));
    expect(heard.flatMap(({ payload }) => payload.map((event) => (event as { i: number }).i))).toEqual(Array.from({ length: 21 }, (_, i) => i));
    expect(heard.length).toBeGreaterThan(5);
  });
  test("without a server nothing is kept; after its return the publisher is told", async () => {
    const server = await nats();
    const { publisher, link } = await events(server);
    let interruptions = 0;
    publisher.onInterruption = () => interruptions++;
    await server.kill();
    await until("noticed", () => !link.connected);
    for (let i = 0; i < 1000; i++) publisher.publish([{ lost: "x".repeat(10_000) }]);
    await server.up();
    const nc = await client(server);
    const heard = listen(nc);
    await nc.flush();
    await until("told", () => interruptions > 0, 30_000);
    publisher.publish([{ x: 1 }]);
    await until("a message", () => heard.length > 0);
    expect(heard.map(({ sequence, payload }) => [sequence, payload])).toEqual([[1000, [{ x: 1 }]]]);
  }, 60_000);
  test("a server that does not read holds nothing back in memory", async () => {
    const server = await nats();
    const { publisher, link } = await events(server);
    server.signal("SIGSTOP");
    const payload = [{ text: "x".repeat(500_000) }];
    let taken = 0;
    for (let i = 0; i < 400; i++) {
      const real = link.publish.bind(link);
      link.publish = (subject, bytes) => {
        const ok = real(subject, bytes);
        if (ok) taken += bytes.length;
        return ok;
      };
      publisher.publish(payload);
      link.publish = real;
    }
    expect(taken).toBeGreaterThan(1 << 20);
    expect(taken).toBeLessThan(20 << 20);
    server.signal("SIGCONT");
    await until("it takes messages again", () => link.publish("any", Buffer.alloc(10)));
  }, 60_000);
});

test.skipIf(!hasNats)("a plane can be closed while the server is gone", async () => {
  const server = await nats();
  const plane = new NatsRequestPlane(await NatsLink.open(natsOptions(environment({ NATS_SERVER: server.url }))), "127.0.0.1", () => Promise.reject(new Error("no answer")));
  await plane.register(name, id, counting().accept);
  await server.kill();
  await plane.close();
});
