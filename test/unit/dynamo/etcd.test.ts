/** Discovery in etcd against a stand-in of its gateway that can misbehave on purpose; the end-to-end tests use the real one. */
import { afterEach, describe, expect, test } from "bun:test";
import { mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { createServer, type Server } from "node:net";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { readDynamoEnvironment } from "../../../src/config/env.ts";
import { UsageError } from "../../../src/config/flags.ts";
import { DiscoveryError } from "../../../src/dynamo/discovery/discovery.ts";
import { EtcdDiscovery } from "../../../src/dynamo/discovery/etcd/etcd.ts";
import { EtcdGateway, EtcdUnreachable } from "../../../src/dynamo/discovery/etcd/gateway.ts";
import { type EtcdOptions, etcdOptions } from "../../../src/dynamo/discovery/etcd/options.ts";
import { Gateway, plain } from "./etcd-gateway.ts";
import { until } from "./plane-client.ts";

const open: { close?: () => unknown; stop?: () => unknown }[] = [];
afterEach(async () => {
  for (const item of open.splice(0).reverse()) await (item.close ?? item.stop)?.call(item);
});
function gateway(): Gateway {
  const made = new Gateway();
  open.push(made);
  return made;
}
const options = (endpoints: string[], more: Partial<EtcdOptions> = {}): EtcdOptions => ({ endpoints, leaseTtlSeconds: 10, user: null, tls: null, ...more });
/** Leases of 1 s are renewed every third of it, which keeps these tests short. */
async function discovery(g: Gateway, more: Partial<EtcdOptions> = {}, alive?: () => boolean): Promise<EtcdDiscovery> {
  const made = await EtcdDiscovery.open(options([g.url], { leaseTtlSeconds: 1, ...more }), alive, 5_000);
  open.push(made);
  return made;
}
const record = (key: string, value: unknown = { type: "Endpoint" }) => ({ bucket: "v1/instances" as const, key, value });

describe("records", () => {
  test("identity is the lease's id, to the last bit, also in what is written", async () => {
    const g = gateway();
    const d = await discovery(g);
    expect(d.instanceId).toBe(9_223_372_036_854_775_000n);
    await d.add(record("a/b/c/7fff", { instance_id: d.instanceId }));
    expect(g.keys.get("v1/instances/a/b/c/7fff")).toEqual({ value: Buffer.from('{"instance_id":9223372036854775000}').toString("base64"), lease: "9223372036854775000" });
    expect(await d.list("v1/instances", "a/b/")).toEqual([record("a/b/c/7fff", { instance_id: 9_223_372_036_854_775_000n })]);
  });
  test("what exists is not overwritten; a write whose answer was lost is no conflict", async () => {
    const g = gateway();
    const d = await discovery(g);
    g.keys.set("v1/instances/a", { value: "e30=", lease: "1" });
    await expect(d.add(record("a"))).rejects.toThrow(/cannot write record v1\/instances\/a: it exists/);
    let lost = false;
    g.before = (path) => {
      if (path !== "/v3/kv/txn" || lost) return null;
      lost = true;
      g.keys.set("v1/instances/b", { value: Buffer.from('{"type":"Endpoint"}').toString("base64"), lease: d.instanceId.toString() });
      return Response.json({ error: "etcdserver: request timed out", code: 14 }, { status: 503 });
    };
    await d.add(record("b"));
    await expect(d.add(record("b", { type: "other" }))).rejects.toThrow(DiscoveryError);
  });
  test("listing takes the prefix and nothing beside it, and skips what is not JSON", async () => {
    const g = gateway();
    const d = await discovery(g);
    for (const [key, value] of [["n/c/e/1", "{}"], ["n/c/e/2", "{"], ["n/c/e2/3", "{}"], ["n/c/d/4", "{}"]] as const) g.keys.set(`v1/instances/${key}`, { value: Buffer.from(value).toString("base64"), lease: "1" });
    expect((await d.list("v1/instances", "n/c/e/")).map(({ key }) => key)).toEqual(["n/c/e/1"]);
  });
  test("replace gives another value; close revokes the lease and with it everything", async () => {
    const g = gateway();
    const d = await discovery(g);
    await d.add(record("a"));
    await d.replace(record("a", { taints: ["gpu"] }));
    expect(plain(g.keys.get("v1/instances/a")!.value)).toBe('{"taints":["gpu"]}');
    await d.close();
    expect([g.keys.size, g.leases.size, g.calls.at(-1)]).toEqual([0, 0, "/v3/lease/revoke"]);
  });
  test("a deleted record is written again, a removed one is not", async () => {
    const g = gateway();
    const d = await discovery(g);
    await d.add(record("a"));
    await d.add(record("b"));
    await d.remove("v1/instances", "b");
    g.keys.clear();
    await until("the record is back", () => g.keys.has("v1/instances/a"));
    const beats = () => g.calls.filter((path) => path === "/v3/lease/timetolive").length;
    const seen = beats();
    await until("two more renewals", () => beats() >= seen + 2);
    expect([...g.keys.keys()]).toEqual(["v1/instances/a"]);
  });
});

describe("a lost lease", () => {
  test("is told once, also to who asks later; a new one is another identity without records", async () => {
    const g = gateway();
    const d = await discovery(g);
    const [first, causes, late] = [d.instanceId, [] as string[], [] as string[]];
    d.onLost((cause) => causes.push(cause));
    await d.add(record("a"));
    g.forget();
    await until("told", () => causes.length > 0);
    d.onLost((cause) => late.push(cause));
    expect([causes.length, late]).toEqual([1, causes]);
    await expect(d.add(record("b"))).rejects.toThrow(/unknown to etcd/);
    await d.remove("v1/instances", "a");
    expect(await d.renew()).toBe(first + 1n);
    expect([d.instanceId, g.keys.size]).toEqual([first + 1n, 0]);
    await d.add(record("a"));
    expect(g.keys.get("v1/instances/a")!.lease).toBe(String(first + 1n));
  });
  test("is noticed by a write as well", async () => {
    const g = gateway();
    const d = await discovery(g, { leaseTtlSeconds: 100 });
    let cause = "";
    d.onLost((why) => (cause = why));
    g.forget();
    await expect(d.add(record("a"))).rejects.toThrow(/lease not found/);
    expect(cause).toContain("lease not found");
  });
  test("silence is no loss: an etcd that comes back with its leases keeps the identity", async () => {
    const g = gateway();
    const d = await discovery(g);
    let cause = "";
    d.onLost((why) => (cause = why));
    let refused = 0;
    g.before = () => (refused++, Response.json({ error: "etcdserver: no leader", code: 14 }, { status: 503 }));
    await until("several failures", () => refused > 3);
    g.before = () => null;
    g.calls.length = 0;
    await until("renewed", () => g.calls.includes("/v3/lease/timetolive"));
    expect(cause).toBe("");
  });
  test("a good lease that is given up takes its records along", async () => {
    const g = gateway();
    const d = await discovery(g);
    await d.add(record("a"));
    await d.renew();
    expect([g.keys.size, [...g.leases]]).toEqual([0, [d.instanceId.toString()]]);
  });
  test("renewing waits for etcd, and ends when discovery is closed", async () => {
    const g = gateway();
    const d = await discovery(g);
    g.before = () => Response.json({ error: "etcdserver: no leader", code: 14 }, { status: 503 });
    const renewal = d.renew();
    await d.close();
    await expect(renewal).rejects.toThrow(DiscoveryError);
  });
  test("a process that hangs does not renew", async () => {
    const g = gateway();
    let [well, asked] = [true, 0];
    await discovery(g, {}, () => (asked++, well));
    const beats = () => g.calls.filter((path) => path === "/v3/lease/keepalive").length;
    await until("a renewal", () => beats() > 0);
    well = false;
    await until("asked once more", ((before) => () => asked > before)(asked));
    const seen = beats();
    await until("asked several times", ((before) => () => asked > before + 2)(asked));
    expect(beats()).toBe(seen);
    well = true;
    await until("renewals go on", () => beats() > seen);
  });
});

describe("endpoints", () => {
  /** Accepts connections and says nothing. */
  async function silent(): Promise<{ url: string; readonly connections: number }> {
    let connections = 0;
    const server: Server = createServer(() => void connections++);
    await new Promise<void>((resolve) => server.listen(0, "127.0.0.1", resolve));
    open.push({ close: () => void server.close() });
    return {
      url: `http://127.0.0.1:${(server.address() as { port: number }).port}`,
      get connections() {
        return connections;
      },
    };
  }
  test("dead and silent ones are passed over, and the good one is asked first from then on", async () => {
    const g = gateway();
    const quiet = await silent();
    const asked = new EtcdGateway(options(["http://127.0.0.1:1", quiet.url, g.url]));
    for (let i = 0; i < 3; i += 1) await asked.call("/v3/lease/grant", { TTL: "10" }, 0);
    expect([quiet.connections, g.leases.size]).toEqual([1, 3]);
  });
  test("none that answers: bounded, and each is named with its reason", async () => {
    const quiet = await silent();
    const error = await EtcdDiscovery.open(options(["http://127.0.0.1:1", quiet.url]), undefined, 1_000).catch((e: unknown) => e as Error);
    expect(error).toBeInstanceOf(DiscoveryError);
    expect((error as Error).message).toMatch(/^ETCD_ENDPOINTS: etcd does not answer: http:\/\/127\.0\.0\.1:1: .*ECONNREFUSED.*; http:.*: no answer within 2 s$/);
  });
  test("a server that is no etcd is told at once", async () => {
    const g = gateway();
    g.before = () => new Response("404 page not found", { status: 404 });
    await expect(EtcdDiscovery.open(options([g.url]))).rejects.toThrow(/ETCD_ENDPOINTS: etcd refuses: .*404.*--enable-grpc-gateway/);
    g.before = () => Response.json({ ID: "-5" });
    await expect(EtcdDiscovery.open(options([g.url]))).rejects.toThrow(/unexpected lease id "-5"/);
  });
  test("closing ends what is in progress", async () => {
    const asked = new EtcdGateway(options([(await silent()).url]));
    const pending = asked.call("/v3/lease/grant", {}, 60_000);
    await asked.close(null);
    await expect(pending).rejects.toBeInstanceOf(EtcdUnreachable);
  });
});

describe("authentication", () => {
  const user = { name: "worker", password: "secret" };
  test("the token goes along bare, and is replaced when etcd forgot it, answers nothing, or finds it old", async () => {
    const g = gateway();
    let token = 1;
    let mode: "refuse" | "silence" | "old" = "refuse";
    g.before = (path, request, body) => {
      if (path === "/v3/auth/authenticate") {
        expect(body).toEqual(user);
        return Response.json({ token: `token.${token}` });
      }
      if (request.headers.get("authorization") === `token.${token}`) return null;
      if (mode === "refuse") return Response.json({ error: "etcdserver: invalid auth token", code: 16 }, { status: 401 });
      if (mode === "old") return Response.json({ error: "auth: revision in header is old", code: 3 }, { status: 400 });
      // etcd 3.6 ends the connection here; to this side both are silence.
      return new Promise<Response>(() => {});
    };
    const d = await discovery(g, { user, leaseTtlSeconds: 100 });
    for (const [i, next] of (["refuse", "silence", "old"] as const).entries()) {
      mode = next;
      token += 1;
      await d.add(record(`k${i}`));
    }
    expect(g.keys.size).toBe(3);
  });
  test("a wrong password is told at once, by the variables", async () => {
    const g = gateway();
    g.before = () => Response.json({ error: "etcdserver: authentication failed, invalid user ID or password", code: 3 }, { status: 400 });
    await expect(EtcdDiscovery.open(options([g.url], { user }))).rejects.toThrow(/ETCD_AUTH_USERNAME, ETCD_AUTH_PASSWORD: user "worker" is not accepted/);
  });
  test("without authentication in etcd the user is not needed; without rights the user is named", async () => {
    const g = gateway();
    g.before = (path) => (path === "/v3/auth/authenticate" ? Response.json({ error: "etcdserver: authentication is not enabled", code: 9 }, { status: 400 }) : null);
    const d = await discovery(g, { user, leaseTtlSeconds: 100 });
    await d.add(record("a"));
    g.before = (path) => (path === "/v3/auth/authenticate" ? Response.json({ token: "t" }) : Response.json({ error: "etcdserver: permission denied", code: 7 }, { status: 403 }));
    await expect(d.add(record("b"))).rejects.toThrow(/permission denied; ETCD_AUTH_USERNAME = "worker"/);
  });
});

describe("options", () => {
  const read = (env: Record<string, string>) => etcdOptions(readDynamoEnvironment(env));
  test("defaults, bare addresses, several endpoints", () => {
    expect(read({})).toEqual({ endpoints: ["http://localhost:2379"], leaseTtlSeconds: 10, user: null, tls: null });
    expect(read({ ETCD_ENDPOINTS: "etcd-0:2379, http://[::1]:2379/", ETCD_LEASE_TTL: "30" })).toMatchObject({ endpoints: ["http://etcd-0:2379", "http://[::1]:2379"], leaseTtlSeconds: 30 });
    expect(read({ ETCD_ENDPOINTS: "etcd-0:2379", ETCD_AUTH_CA: "-----BEGIN CERTIFICATE-----\nx" })).toMatchObject({ endpoints: ["https://etcd-0:2379"], tls: { ca: "-----BEGIN CERTIFICATE-----\nx" } });
  });
  const bad: [string, Record<string, string>][] = [
    ["ETCD_ENDPOINTS", { ETCD_ENDPOINTS: "," }], ["ETCD_ENDPOINTS", { ETCD_ENDPOINTS: "ftp://a" }], ["ETCD_ENDPOINTS", { ETCD_ENDPOINTS: "http://a/path" }], ["ETCD_ENDPOINTS", { ETCD_ENDPOINTS: "http://u@a" }],
    ["ETCD_LEASE_TTL", { ETCD_LEASE_TTL: "0" }], ["ETCD_LEASE_TTL", { ETCD_LEASE_TTL: "x" }], ["ETCD_AUTH_PASSWORD", { ETCD_AUTH_USERNAME: "u" }], ["ETCD_AUTH_USERNAME", { ETCD_AUTH_PASSWORD: "p" }],
    ["ETCD_AUTH_CLIENT_KEY", { ETCD_AUTH_CLIENT_CERT: "-----BEGIN C" }], ["ETCD_AUTH_CA", { ETCD_AUTH_CA: "/nonexistent/ca.pem" }], ["ETCD_ENDPOINTS", { ETCD_ENDPOINTS: "http://a:1", ETCD_AUTH_CA: "-----BEGIN C" }],
  ];
  test.each(bad)("%s: %p is refused by name", (name, env) => {
    expect(() => read(env)).toThrow(UsageError);
    expect(() => read(env)).toThrow(name);
  });
  test("a file that is no PEM is refused; the password is in no message", () => {
    const folder = mkdtempSync(join(tmpdir(), "ls-pem-"));
    try {
      writeFileSync(join(folder, "ca"), "hello");
      expect(() => read({ ETCD_AUTH_CA: join(folder, "ca") })).toThrow(/ETCD_AUTH_CA: expected a PEM file/);
    } finally {
      rmSync(folder, { recursive: true });
    }
    expect(() => read({ ETCD_AUTH_PASSWORD: "topsecret" })).not.toThrow(/topsecret/);
  });
});
