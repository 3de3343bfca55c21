/** TLS of the request plane, both directions, and of the NATS connection. */
import { afterAll, afterEach, beforeAll, describe, expect, test } from "bun:test";
import { readFileSync, writeFileSync } from "node:fs";
import { connect as connectTcp, type Socket } from "node:net";
import { connect as connectTls, createServer as createTlsServer, type Server, type TLSSocket } from "node:tls";
import { readDynamoEnvironment } from "../../../src/config/env.ts";
import { UsageError } from "../../../src/config/flags.ts";
import { NatsLink } from "../../../src/dynamo/nats/link.ts";
import { natsOptions } from "../../../src/dynamo/nats/options.ts";
import { encodeFrame } from "../../../src/dynamo/request-plane/frame-codec.ts";
import { openRequestPlane } from "../../../src/dynamo/request-plane/open.ts";
import type { RequestPlane } from "../../../src/dynamo/request-plane/request-plane.ts";
import { ResponseStream } from "../../../src/dynamo/request-plane/response-stream.ts";
import { createListener, tcpTls } from "../../../src/dynamo/request-plane/tls.ts";
import { TlsFiles } from "../../../src/dynamo/request-plane/tls-files.ts";
import { Certificates, hasOpenssl } from "../../support/certificates.ts";
import { hasNats, NatsServer } from "../../support/nats-server.ts";
import { until } from "./plane-client.ts";

const environment = (patch: Record<string, string>) => readDynamoEnvironment({ DYN_TCP_RPC_HOST: "127.0.0.1", ...patch });

describe.skipIf(!hasOpenssl)("TLS", () => {
  let made: Certificates;
  let server: { cert: string; key: string };
  let client: { cert: string; key: string };
  let foreign: Certificates;
  beforeAll(() => {
    made = new Certificates();
    foreign = new Certificates();
    server = made.sign("server");
    client = made.sign("client");
    foreign.sign("stranger");
  });
  afterAll(() => {
    made?.[Symbol.dispose]();
    foreign?.[Symbol.dispose]();
  });
  const open: { close(): unknown }[] = [];
  afterEach(async () => {
    for (const item of open.splice(0)) await item.close();
  });
  const plane = async (patch: Record<string, string>): Promise<{ plane: RequestPlane; port: number }> => {
    const opened = await openRequestPlane(environment(patch));
    open.push(opened);
    const { tcp } = opened.transport({ namespace: "n", component: "c", endpoint: "e" }, 1n) as { tcp: string };
    return { plane: opened, port: Number(tcp.slice(tcp.indexOf(":") + 1, tcp.indexOf("/"))) };
  };
  const listenerTls = () => ({ DYN_TCP_TLS_CERT_PATH: server.cert, DYN_TCP_TLS_KEY_PATH: server.key });

  /** What a frame to no endpoint is answered, or why not. */
  const ask = (socket: Socket, event: string) =>
    new Promise<string>((resolve) => {
      const frame = encodeFrame({ path: "1/none", headers: {}, payload: Buffer.alloc(0) });
      socket.once(event, () => socket.write(frame));
      socket.on("data", (data: Buffer) => (resolve(data.toString("utf8", 4)), socket.destroy()));
      socket.on("error", (error) => resolve(`error ${error.message}`));
      socket.on("close", () => resolve("closed"));
    });
  const secure = (port: number, options: Record<string, unknown>) => ask(connectTls({ host: "127.0.0.1", port, ...options }), "secureConnect");
  const pem = ({ cert, key }: { cert: string; key: string }) => ({ cert: readFileSync(cert), key: readFileSync(key) });

  test("the listener serves who trusts its certificate; plain text and half a handshake are cut off", async () => {
    const { port } = await plane({ ...listenerTls(), DYN_TCP_TLS_HANDSHAKE_TIMEOUT_SECS: "1" });
    const ca = readFileSync(made.ca);
    expect(await secure(port, { ca })).toContain("unknown endpoint 1/none");
    expect(await secure(port, { ca, servername: "plane.test" })).toContain("unknown endpoint 1/none");
    expect(await secure(port, { ca: readFileSync(foreign.ca) })).toStartWith("error");
    expect(await ask(connectTcp(port, "127.0.0.1"), "connect")).not.toContain("unknown endpoint");
    const silent = connectTcp(port, "127.0.0.1");
    let closed = false;
    silent.on("close", () => (closed = true)).on("error", () => {});
    await until("the silent one is cut off", () => closed, 20_000);
  }, 30_000);

  test("with a client authority only certificates it signed are served", async () => {
    const { port } = await plane({ ...listenerTls(), DYN_TCP_TLS_CLIENT_CA_CERT_PATH: made.ca });
    const ca = readFileSync(made.ca);
    expect(await secure(port, { ca, ...pem(client) })).toContain("unknown endpoint 1/none");
    for (const options of [{ ca }, { ca, cert: readFileSync(foreign.path("stranger.pem")), key: readFileSync(foreign.path("stranger.key")) }]) expect(await secure(port, options)).not.toContain("unknown endpoint");
  });

  /** A frontend's response listener. */
  const frontend = async (options: Record<string, unknown>) => {
    const seen: { bytes: number; peer: string | null }[] = [];
    const listener: Server = createTlsServer({ ...pem(server), ...options }, (socket: TLSSocket) => {
      const entry = { bytes: 0, peer: (socket.getPeerCertificate()?.subject?.CN as string | undefined) ?? null };
      seen.push(entry);
      socket.on("data", (data) => (entry.bytes += data.length));
      socket.on("error", () => {});
    });
    listener.on("tlsClientError", (_error, socket) => socket.destroy());
    await new Promise<void>((resolve) => listener.listen(0, "127.0.0.1", resolve));
    open.push(listener);
    return { seen, target: { host: "127.0.0.1", port: (listener.address() as { port: number }).port, subject: "s" } };
  };

  test("answers verify the frontend: authority, name, and their own certificate", async () => {
    const { seen, target } = await frontend({});
    const dial = (patch: Record<string, string>, to = target) => ResponseStream.open(to, tcpTls(environment(patch)).dial, 3_000);
    (await dial({ DYN_TCP_TLS_CA_CERT_PATH: made.ca })).destroy();
    (await dial({ DYN_TCP_TLS_CA_CERT_PATH: made.ca, DYN_TCP_TLS_SERVER_NAME: "plane.test" })).destroy();
    (await dial({ DYN_TCP_TLS_INSECURE: "true" })).destroy();
    await until("handshakes and prologues", () => seen.length === 3 && seen.every(({ bytes }) => bytes > 60));
    for (const patch of [{ DYN_TCP_TLS_CA_CERT_PATH: foreign.ca }, { DYN_TCP_TLS_CA_CERT_PATH: made.ca, DYN_TCP_TLS_SERVER_NAME: "other.test" }]) await expect(dial(patch as Record<string, string>)).rejects.toThrow(/certificate/i);
    const mutual = await frontend({ requestCert: true, rejectUnauthorized: true, ca: readFileSync(made.ca) });
    const own = { DYN_TCP_TLS_CA_CERT_PATH: made.ca, DYN_TCP_TLS_CLIENT_CERT_PATH: client.cert, DYN_TCP_TLS_CLIENT_KEY_PATH: client.key };
    (await dial(own, mutual.target)).destroy();
    await until("the certificate was seen", () => mutual.seen.some(({ peer, bytes }) => peer === "client" && bytes > 60));
  }, 30_000);

  test("an answer that cannot be trusted, or a frontend without TLS, ends in a bounded time", async () => {
    const { target } = await frontend({ requestCert: true, rejectUnauthorized: true, ca: readFileSync(made.ca) });
    const tls = tcpTls(environment({ DYN_TCP_TLS_CA_CERT_PATH: made.ca, DYN_TCP_TLS_HANDSHAKE_TIMEOUT_SECS: "1" })).dial!;
    // Under TLS 1.3 the refusal of a client arrives after its handshake: as the end of the stream.
    const stream = await ResponseStream.open(target, tls, 200).catch(() => null);
    if (stream) await until("cancelled", () => stream.cancelled !== null);
    const plain = createListener(null, () => {});
    await new Promise<void>((resolve) => plain.listen(0, "127.0.0.1", resolve));
    open.push(plain);
    await expect(ResponseStream.open({ ...target, port: (plain.address() as { port: number }).port }, tls, 200)).rejects.toThrow(/within 1200 ms/);
  }, 30_000);

  test("renewed files are used without a restart; broken ones leave the old in place", async () => {
    const old = made.sign("old");
    const broken: unknown[] = [];
    const files = new TlsFiles({ cert: ["CERT", old.cert], key: ["KEY", old.key] }, (error) => broken.push(error), 0);
    const listener = createListener({ files, mutual: false, handshakeMs: 3_000 }, (socket) => socket.on("error", () => {}));
    await new Promise<void>((resolve) => listener.listen(0, "127.0.0.1", resolve));
    open.push(listener);
    const subject = () =>
      new Promise<string>((resolve, reject) => {
        const socket = connectTls({ host: "127.0.0.1", port: (listener.address() as { port: number }).port, ca: readFileSync(made.ca) }, () => (resolve(String(socket.getPeerCertificate().subject.CN)), socket.destroy()));
        socket.on("error", reject);
      });
    expect(await subject()).toBe("old");
    made.replace(old, made.sign("renewed"));
    await until("the new one is shown", async () => (await subject()) === "renewed");
    writeFileSync(old.cert, "half a fi");
    await subject();
    expect(await subject()).toBe("renewed");
    expect(broken.length).toBeGreaterThan(0);
  });

  test("what does not fit together is refused by name", () => {
    const key = { DYN_TCP_TLS_KEY_PATH: server.key };
    const bad: [string, Record<string, string>][] = [
      ["DYN_TCP_TLS_KEY_PATH", { DYN_TCP_TLS_CERT_PATH: server.cert }], ["DYN_TCP_TLS_CERT_PATH", key], ["DYN_TCP_TLS_CLIENT_CA_CERT_PATH", { DYN_TCP_TLS_CLIENT_CA_CERT_PATH: made.ca }],
      ["DYN_TCP_TLS_CLIENT_KEY_PATH", { DYN_TCP_TLS_CLIENT_CERT_PATH: client.cert, DYN_TCP_TLS_CA_CERT_PATH: made.ca }], ["DYN_TCP_TLS_CLIENT_CERT_PATH", { DYN_TCP_TLS_CLIENT_CERT_PATH: client.cert, DYN_TCP_TLS_CLIENT_KEY_PATH: client.key }],
      ["DYN_TCP_TLS_CERT_PATH", { ...key, DYN_TCP_TLS_CERT_PATH: made.path("none.pem") }], ["DYN_TCP_TLS_CERT_PATH", { ...key, DYN_TCP_TLS_CERT_PATH: client.cert }], ["DYN_TCP_TLS_CA_CERT_PATH", { DYN_TCP_TLS_CA_CERT_PATH: server.key }],
    ];
    for (const [variable, patch] of bad) {
      expect(() => tcpTls(environment(patch))).toThrow(UsageError);
      expect(() => tcpTls(environment(patch))).toThrow(variable);
    }
    expect(tcpTls(environment({}))).toEqual({ listener: null, dial: null });
  });

  test.skipIf(!hasNats)("nats-server over TLS: verified, with a client certificate, and refused without", async () => {
    const config = `tls { cert_file: "${server.cert}", key_file: "${server.key}", ca_file: "${made.ca}", verify: true, timeout: 5 }`;
    await using nats = await NatsServer.start(config);
    const link = (patch: Record<string, string>) => NatsLink.open(natsOptions(environment({ NATS_SERVER: `tls://127.0.0.1:${nats.port}`, ...patch })), 1_500);
    const own = { NATS_TLS_CLIENT_CERT_PATH: client.cert, NATS_TLS_CLIENT_KEY_PATH: client.key };
    for (const patch of [{ NATS_TLS_CA_CERT_PATH: made.ca, ...own }, { NATS_TLS_INSECURE: "1", ...own }, { NATS_TLS_CA_CERT_PATH: made.ca, ...own, NATS_SERVER: `tls://localhost:${nats.port}` }]) {
      const opened = await link(patch);
      open.push(opened);
      let heard = 0;
      await opened.subscribe("a", undefined, () => heard++);
      expect(opened.publish("a", Buffer.from("x"))).toBe(true);
      await until("heard over TLS", () => heard === 1);
    }
    for (const patch of [{ NATS_TLS_CA_CERT_PATH: foreign.ca, ...own }, { NATS_TLS_CA_CERT_PATH: made.ca }]) await expect(link(patch)).rejects.toThrow("NATS_SERVER: cannot connect");
  }, 60_000);
});
