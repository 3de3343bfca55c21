/** Discovery in a real etcd, with the real frontend. */
import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { execFileSync } from "node:child_process";
import { mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { EtcdServer, hasEtcd, type ServerTls } from "../../support/etcd-server.ts";
import { eventually, launch, type Launched, required } from "../../support/launch.ts";
import { PlaneCall, requestBody } from "../../unit/dynamo/plane-client.ts";
import { Deployment, LIMIT_MS, NAME, type Worker } from "./support.ts";

const TEST_MS = 3 * LIMIT_MS;
const variables = (server: EtcdServer, more: Record<string, string> = {}) => ({ DYN_DISCOVERY_BACKEND: "etcd", ETCD_ENDPOINTS: server.url, ...more });
const exact = { ignore_eos: true };
const hex = (decimal: string) => BigInt(decimal).toString(16);
/** A worker of its own, without a frontend; the load and the warm-up of the real model. */
const alone = (env: Record<string, string>): Launched =>
  launch(["dynamo", "--model", required("LAYERSCALE_TEST_GGUF"), "--served-model-name", NAME, "--max-total-tokens", "16384"], {
    env: { DYN_TCP_RPC_HOST: "127.0.0.1", DYN_SYSTEM_PORT: "0", DYN_SYSTEM_HOST: "127.0.0.1", DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS: "0", ...env },
  });
/** Kinds of keys in order: what is registered first stands first. */
const kinds = (keys: readonly string[]) => keys.map((key) => (key.includes("worker_kv_query") ? "query endpoint" : key.replace(/^v1\/(\w+)\/.*?(topic\/[\w-]+)?(\/[0-9a-f]+)$/, "$1 $2").trim()));
const IN_ORDER = ["event_channels topic/kv-events", "query endpoint", "event_sources topic/kv-events", "event_channels topic/kv_metrics", "mdc", "instances"];

describe.skipIf(!hasEtcd)("a worker in etcd, KV-aware", () => {
  let server: EtcdServer;
  let d: Deployment;
  let worker: Worker;
  beforeAll(async () => {
    server = await EtcdServer.start();
    d = await Deployment.start("kv", [], undefined, { all: variables(server) });
    worker = await d.worker();
  }, TEST_MS);
  afterAll(async () => {
    await d?.[Symbol.asyncDispose]();
    await server?.[Symbol.asyncDispose]();
  }, TEST_MS);
  const registered = async (id: string) => (await server.keys()).filter((key) => key === `v1/instances/dynamo/backend/generate/${id}`).length === 1;
  /** The instance that the worker goes by now. */
  const current = () => (worker.process.logs.findLast((line) => line.message === "worker registered again") ?? { instance: worker.instance }).instance as string;

  test("all records stand under one lease, whose id is the instance's, in the order of registration", async () => {
    const records = (await server.records()).filter(({ key, lease }) => key.startsWith("v1/") && hex(lease) === worker.instance);
    expect(kinds(records.map(({ key }) => key))).toEqual(IN_ORDER);
    const instance = records.at(-1)!;
    // Ids lie above 2^53: they stand as whole numbers in the text.
    expect(BigInt(instance.lease)).toBeGreaterThan(2n ** 53n);
    expect(instance.value).toContain(`"instance_id":${instance.lease},`);
    expect(instance.key).toBe(`v1/instances/dynamo/backend/generate/${worker.instance}`);
    expect((await d.ask("completions", "The sea is", { max_tokens: 4, ...exact })).usage?.completion_tokens).toBe(4);
  }, TEST_MS);

  test("a record that somebody deletes is written again, by the same worker", async () => {
    const key = `v1/instances/dynamo/backend/generate/${worker.instance}`;
    await server.delete(key);
    await eventually(async () => (await server.keys()).includes(key), "the record is back", LIMIT_MS);
    await d.served();
    expect(current()).toBe(worker.instance);
  }, TEST_MS);

  test("a revoked lease: a new one and a new instance within 5 s, streams run on, the cache is told again", async () => {
    const prompt = Array.from({ length: 100 }, (_, i) => 1000 + i * 37);
    await d.ask("completions", prompt, { max_tokens: 2, ...exact });
    const before = current();
    const leave = new AbortController();
    const response = await d.request("completions", "Once upon a time", { max_tokens: 7_000, stream: true, ...exact }, leave.signal);
    let received = "";
    void (async () => {
      const decoder = new TextDecoder();
      for await (const chunk of response.body!) received += decoder.decode(chunk, { stream: true });
    })().catch(() => {});
    const events = () => received.split("\n").filter((line) => line.startsWith("data: ")).length;
    await eventually(() => events() > 3, "the stream begins", LIMIT_MS);
    await server.revoke(BigInt(`0x${before}`).toString());
    const revokedAt = performance.now();
    await eventually(async () => current() !== before && registered(current()), "registered under a new id", LIMIT_MS);
    expect(performance.now() - revokedAt).toBeLessThan(5_000);
    // The stream of the old identity still brings new text to its client.
    const seen = events();
    await eventually(() => events() > seen + 20, "more of the stream", LIMIT_MS);
    expect(received).not.toContain('"error"');
    leave.abort();
    await d.served();
    // The router heard from the new instance what the cache still holds: 6 of the prompt's 7 pages.
    await eventually(async () => (await d.ask("completions", prompt, { max_tokens: 2, nvext: { extra_fields: ["timing"] }, ...exact })).nvext.timing?.kv_hit_rate > 0.8, "the router knows the prompt", LIMIT_MS);
    expect((await fetch(`${worker.system}/metrics`).then((response) => response.text())).match(/worker_id="[0-9a-f]+"/g)!.every((label) => label === `worker_id="${current()}"`)).toBe(true);
  }, TEST_MS);

  test("SIGTERM takes the records away in reverse order, then the lease; the process ends with 0", async () => {
    const id = current();
    const changes = await server.watch();
    worker.process.signal("SIGTERM");
    expect(await worker.process.exit(LIMIT_MS)).toBe(0);
    const removed = changes.filter(({ type }) => type === "delete").map(({ key }) => key);
    expect(kinds(removed.filter((key) => key.endsWith(id) || /topic/.test(key)))).toEqual(IN_ORDER.toReversed());
    expect((await server.leases()).map(hex)).not.toContain(id);
  }, TEST_MS);
});

describe.skipIf(!hasEtcd)("a worker and an etcd that goes away", () => {
  let server: EtcdServer;
  let worker: Launched;
  beforeAll(async () => {
    server = await EtcdServer.start();
    worker = alone(variables(server));
    await worker.log("worker ready", LIMIT_MS);
  }, TEST_MS);
  afterAll(async () => {
    await worker?.[Symbol.asyncDispose]();
    await server?.[Symbol.asyncDispose]();
  }, TEST_MS);
  const instances = async () => (await server.records()).filter(({ key }) => key.startsWith("v1/instances/dynamo/backend/generate/"));
  const address = async () => (JSON.parse((await instances())[0]!.value) as { transport: { tcp: string } }).transport.tcp;
  /** A stream straight from the worker: a frontend of Dynamo 1.5 may itself end when its etcd does. */
  const stream = async (count: number) => {
    const call = await PlaneCall.send(await address(), requestBody({ token_ids: [504, 1000, 30], sampling: { temperature: 0 }, stop: { max_tokens: count, ignore_eos: true } }));
    await eventually(() => call.tokens.length > 2, "tokens", LIMIT_MS);
    return call;
  };
  /** A stream that outlasts what a test does to etcd, on any machine. */
  const endless = () => stream(8_000);
  /** It was not cut: tokens keep coming, and they are those of a stream that nothing happened to. */
  const runsOn = async (call: PlaneCall) => {
    const now = call.tokens.length;
    await eventually(() => call.tokens.length > now + 20 || call.ended, "more tokens", LIMIT_MS);
    expect([call.errors, call.ended]).toEqual([[], false]);
    call.control("kill");
    const tokens = call.tokens.slice(0, now + 20);
    call.close();
    const calm = await stream(tokens.length);
    await eventually(() => calm.ended, "the stream ends", LIMIT_MS);
    calm.close();
    expect(calm.tokens).toEqual(tokens);
  };
  const lines = (message: string) => worker.logs.filter((line) => line.message === message).length;

  test("kill -9, a while, a restart with its data: the same instance, streams run on", async () => {
    const before = await instances();
    const open = await endless();
    await server.kill();
    await worker.log("lease not renewed, trying on", LIMIT_MS);
    await server.up();
    await worker.log("etcd answers again", LIMIT_MS);
    expect((await instances()).map(({ key }) => key)).toEqual(before.map(({ key }) => key));
    await runsOn(open);
    expect(lines("worker registered again")).toBe(0);
  }, TEST_MS);

  test("back empty: all records under a new lease within 5 s of its return, streams run on, a frontend is served", async () => {
    const [before] = await instances();
    const path = await address();
    const open = await endless();
    await server.kill();
    await server.up("empty");
    const returnedAt = performance.now();
    const [now] = await eventually(async () => {
      const found = await instances();
      return found.length > 0 ? found : null;
    }, "registered again", LIMIT_MS);
    expect(performance.now() - returnedAt).toBeLessThan(5_000);
    expect(now!.lease).not.toBe(before!.lease);
    expect(kinds((await server.records()).filter(({ lease }) => lease === now!.lease).map(({ key }) => key))).toEqual(IN_ORDER);
    await runsOn(open);
    // The listener is the same, the path is not; the old one is withdrawn once frontends had time to notice.
    expect((await address()).split("/")[0]).toBe(path.split("/")[0]!);
    await eventually(async () => (await PlaneCall.send(path, requestBody())).ack!.startsWith("Server unavailable: unknown endpoint"), "the old path is gone", LIMIT_MS);
    await using d = await Deployment.start("round-robin", [], undefined, { all: variables(server) });
    await d.served();
  }, TEST_MS);

  test("back empty again and again: the last identity stands alone", async () => {
    for (let i = 0; i < 3; i += 1) {
      const again = lines("worker registered again");
      await server.kill();
      await server.up("empty");
      await eventually(() => lines("worker registered again") > again, "registered again", LIMIT_MS);
    }
    expect(await instances()).toHaveLength(1);
    await runsOn(await endless());
  }, TEST_MS);

  test("SIGTERM while etcd is away: the process ends with 0, in time", async () => {
    await server.kill();
    const at = performance.now();
    worker.signal("SIGTERM");
    expect(await worker.exit(LIMIT_MS)).toBe(0);
    expect(performance.now() - at).toBeLessThan(30_000);
  }, TEST_MS);
});

/** A certificate authority, a certificate of the server and one of a client, made now. */
function certificates(folder: string): ServerTls {
  const openssl = (...words: string[]) => execFileSync("openssl", words, { cwd: folder, stdio: ["ignore", "ignore", "pipe"] });
  const curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"];
  const path = (name: string) => join(folder, name);
  for (const ca of ["ca", "stranger"]) openssl("req", "-x509", ...curve, "-keyout", `${ca}.key`, "-out", `${ca}.crt`, "-days", "2", "-subj", `/CN=${ca}`);
  for (const name of ["server", "client"]) {
    openssl("req", ...curve, "-keyout", `${name}.key`, "-out", `${name}.csr`, "-subj", `/CN=${name}`);
    // etcd's gateway shows the server's certificate to etcd itself, so it must be good for clients too.
    writeFileSync(path(`${name}.ext`), "subjectAltName=IP:127.0.0.1,DNS:localhost\nextendedKeyUsage=serverAuth,clientAuth\n");
    openssl("x509", "-req", "-in", `${name}.csr`, "-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-out", `${name}.crt`, "-days", "2", "-extfile", `${name}.ext`);
  }
  const [ca, cert, key] = ["ca.crt", "client.crt", "client.key"].map((name) => path(name)) as [string, string, string];
  const client = Object.fromEntries(Object.entries({ ca, cert, key }).map(([name, file]) => [name, readFileSync(file, "utf8")])) as ServerTls["client"];
  return { ca, cert: path("server.crt"), key: path("server.key"), client };
}

describe.skipIf(!hasEtcd)("ways to etcd", () => {
  const folder = mkdtempSync(join(tmpdir(), "layerscale-pki-"));
  afterAll(() => rmSync(folder, { recursive: true, force: true }));
  /** Starts, is registered, and leaves nothing behind. */
  const works = async (server: EtcdServer, env: Record<string, string>) => {
    await using worker = alone(env);
    await worker.log("worker ready", LIMIT_MS);
    expect(kinds(await server.keys())).toEqual(IN_ORDER);
    worker.signal("SIGTERM");
    expect(await worker.exit(LIMIT_MS)).toBe(0);
    expect(await server.keys()).toEqual([]);
  };
  /** Ends with one line that names the variable. */
  const refused = async (env: Record<string, string>, code: number, words: RegExp) => {
    await using worker = alone(env);
    expect(await worker.exit(LIMIT_MS)).toBe(code);
    expect(worker.stderr.split("\n").findLast((line) => line.startsWith("error: "))).toMatch(words);
  };

  test("TLS with client certificates, by files and by their texts; what does not fit is told", async () => {
    const tls = certificates(folder);
    await using server = await EtcdServer.start(tls);
    const files = { ETCD_AUTH_CA: tls.ca, ETCD_AUTH_CLIENT_CERT: join(folder, "client.crt"), ETCD_AUTH_CLIENT_KEY: join(folder, "client.key") };
    // A proxy of the environment is for other traffic.
    await works(server, variables(server, { ...files, HTTPS_PROXY: "http://127.0.0.1:1" }));
    await works(server, variables(server, { ETCD_ENDPOINTS: `127.0.0.1:${server.port}`, ETCD_AUTH_CA: tls.client.ca, ETCD_AUTH_CLIENT_CERT: tls.client.cert, ETCD_AUTH_CLIENT_KEY: tls.client.key }));
    await refused(variables(server, { ...files, ETCD_AUTH_CA: join(folder, "stranger.crt") }), 1, /ETCD_ENDPOINTS: .*127\.0\.0\.1.*certificate/);
    await refused(variables(server, { ETCD_AUTH_CA: tls.ca }), 1, /ETCD_ENDPOINTS: .*TLS/);
    await refused(variables(server, { ...files, ETCD_AUTH_CLIENT_KEY: "" }), 2, /ETCD_AUTH_CLIENT_CERT.*ETCD_AUTH_CLIENT_KEY/);
    await refused(variables(server, { ...files, ETCD_AUTH_CA: join(folder, "none.crt") }), 2, /ETCD_AUTH_CA.*none\.crt/);
    await refused(variables(server, { ...files, ETCD_ENDPOINTS: `http://127.0.0.1:${server.port}` }), 2, /ETCD_ENDPOINTS.*https/);
  }, TEST_MS);

  test("user and password: also after etcd forgot its tokens; a wrong one and one without rights are told", async () => {
    await using server = await EtcdServer.start();
    await server.secure("worker", "secret");
    const login = { ETCD_AUTH_USERNAME: "worker", ETCD_AUTH_PASSWORD: "secret" };
    await refused(variables(server, { ...login, ETCD_AUTH_PASSWORD: "wrong" }), 1, /ETCD_AUTH_USERNAME, ETCD_AUTH_PASSWORD: user "worker"/);
    await refused(variables(server), 1, /user name is empty.*ETCD_AUTH_USERNAME is not set/);
    await refused(variables(server, { ...login, ETCD_AUTH_PASSWORD: "" }), 2, /ETCD_AUTH_USERNAME and ETCD_AUTH_PASSWORD/);
    await using worker = alone(variables(server, login));
    await worker.log("worker ready", LIMIT_MS);
    await server.kill();
    await worker.log("lease not renewed, trying on", LIMIT_MS);
    await server.up();
    await worker.log("etcd answers again", LIMIT_MS);
    await server.login("secret");
    expect(kinds(await server.keys())).toEqual(IN_ORDER);
    const [instance] = (await server.keys()).slice(-1);
    await server.delete(instance!);
    await eventually(async () => (await server.keys()).includes(instance!), "the record is back", LIMIT_MS);
    worker.signal("SIGTERM");
    expect(await worker.exit(LIMIT_MS)).toBe(0);
    expect(await server.keys()).toEqual([]);
  }, TEST_MS);

  test("several endpoints: a dead one is passed over, and a living one takes over when the first dies", async () => {
    await using first = await EtcdServer.start();
    await using second = await EtcdServer.start();
    await works(second, variables(second, { ETCD_ENDPOINTS: `http://127.0.0.1:1,${second.url}`, HTTP_PROXY: "http://127.0.0.1:1" }));
    // Two clusters of one member each: the second does not know the lease, which is a lost identity, and gets everything.
    await using worker = alone(variables(first, { ETCD_ENDPOINTS: `${first.url},${second.url}` }));
    await worker.log("worker ready", LIMIT_MS);
    expect(kinds(await first.keys())).toEqual(IN_ORDER);
    await first.kill();
    await eventually(async () => kinds(await second.keys()).length === IN_ORDER.length, "registered at the second", LIMIT_MS);
    expect(kinds(await second.keys())).toEqual(IN_ORDER);
  }, TEST_MS);

  test("no etcd: the worker says what it tries, and a stop is obeyed at once", async () => {
    await using worker = alone({ DYN_DISCOVERY_BACKEND: "etcd", ETCD_ENDPOINTS: "http://127.0.0.1:1" });
    const line = await worker.log("etcd does not answer yet", LIMIT_MS);
    expect(line.error).toContain("http://127.0.0.1:1");
    worker.signal("SIGTERM");
    expect(await worker.exit(LIMIT_MS)).toBe(0);
  }, TEST_MS);
});
