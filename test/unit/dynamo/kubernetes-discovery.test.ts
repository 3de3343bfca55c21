import { afterEach, beforeEach, describe, expect, test } from "bun:test";
import { DiscoveryError } from "../../../src/dynamo/discovery/discovery.ts";
import type { ApiAccess } from "../../../src/dynamo/discovery/kubernetes/access.ts";
import { ApiClient } from "../../../src/dynamo/discovery/kubernetes/client.ts";
import { instanceIdOf } from "../../../src/dynamo/discovery/kubernetes/identity.ts";
import { KubernetesDiscovery, type Limits } from "../../../src/dynamo/discovery/kubernetes/kubernetes.ts";
import { instance, instanceRecord, modelRecord } from "../../../src/dynamo/discovery/records.ts";
import { setLogSink } from "../../../src/telemetry/log.ts";
import { eventually } from "../../support/launch.ts";
import { StandIn } from "./kube-stand-in.ts";

const identity = { mode: "pod" as const, podName: "worker-0", podNamespace: "ns1", podUid: "u1", objectName: "worker-0", instanceId: instanceIdOf("worker-0") };
const name = { namespace: "dynamo", component: "backend", endpoint: "generate" };
const KEY = "dynamo/backend/generate/43710f49c0cff";
const record = (port = 1) => instanceRecord(name, instance(name, identity.instanceId, { tcp: `127.0.0.1:${port}/43710f49c0cff/generate` }, "cpu", "json"));
const model = modelRecord(name, identity.instanceId, { display_name: "m" });

let api: StandIn;
const open: KubernetesDiscovery[] = [];
const access = (): ApiAccess => ({ server: api.url, source: "test", proxy: null, credentials: () => ({ authorization: "Bearer secret-token", tls: {} }) });
async function discovery(limits: Partial<Limits> = {}, change: Partial<typeof identity> = {}): Promise<KubernetesDiscovery> {
  const made = await KubernetesDiscovery.open(new ApiClient(access()), { ...identity, ...change }, limits);
  open.push(made);
  return made;
}
const watched = () => eventually(() => api.watchers > 0, "the worker watches its record");
const data = (object = "worker-0") => api.objects.get(object)?.spec.data;

let lines: string[] = [];
const logged = (message: string) => eventually(() => lines.some((line) => line.includes(message)), `log line "${message}"`);

beforeEach(() => {
  api = new StandIn();
  lines = [];
  setLogSink((line) => void lines.push(line));
});
afterEach(async () => {
  for (const item of open.splice(0)) await item.close();
  await api.stop();
  setLogSink((line) => void process.stderr.write(`${line}\n`));
});

describe("requests", () => {
  test("open clears an earlier record, then every change applies the whole object", async () => {
    api.objects.set("worker-0", { metadata: { name: "worker-0", uid: "old" }, spec: { data: { endpoints: { old: {} } } } });
    const d = await discovery();
    expect(d.instanceId).toBe(1186445869714687n);
    expect(data()).toEqual({ endpoints: {}, model_cards: {}, event_channels: {}, event_sources: {} });
    await d.add(model);
    await d.add(record());
    const patch = api.requests("PATCH").at(-1)!;
    expect(patch).toMatchObject({
      path: "/apis/nvidia.com/v1alpha1/namespaces/ns1/dynamoworkermetadatas/worker-0",
      query: { force: "true", fieldManager: "dynamo-worker" },
      headers: { "content-type": "application/apply-patch+yaml", authorization: "Bearer secret-token" },
    });
    expect(Object.keys(data().endpoints)).toEqual([KEY]);
    expect(Object.keys(data().model_cards)).toEqual([KEY]);
    await d.replace(record(2));
    expect(data().endpoints[KEY].transport.tcp).toContain("127.0.0.1:2/");
    await d.remove("v1/instances", KEY);
    await d.remove("v1/instances", "not/there/1");
    expect(data()).toMatchObject({ endpoints: {}, model_cards: { [KEY]: { type: "Model" } } });
    await d.close();
    expect(api.objects.size).toBe(0);
    await d.close();
    expect(() => d.add(record())).toThrow(/discovery is closed/);
  });
  test("changes that come together are written in order", async () => {
    const d = await discovery();
    await Promise.all([d.add(model), d.add(record()), d.remove("v1/mdc", KEY), d.add(model)]);
    expect(Object.keys(data().endpoints)).toEqual([KEY]);
    expect(Object.keys(data().model_cards)).toEqual([KEY]);
  });
  test("a record that exists, or is not there to be replaced", async () => {
    const d = await discovery();
    await d.add(record());
    expect(() => d.add(record(2))).toThrow(`record v1/instances/${KEY} exists`);
    expect(() => d.replace(model)).toThrow(/does not exist/);
    expect(data().endpoints[KEY].transport.tcp).toContain("127.0.0.1:1/");
  });
  test("an identity of this backend cannot be lost", async () => {
    const d = await discovery();
    d.onLost()();
    expect(await d.renew()).toBe(identity.instanceId);
  });
});

describe("list", () => {
  const card = (object: string, endpoint = "generate") => ({ metadata: { name: object }, spec: { data: { model_cards: { [`dynamo/backend/${endpoint}/${object}`]: { card_json: { display_name: object } } }, endpoints: null } } });
  test("pages of records, of ready pods only", async () => {
    const d = await discovery();
    for (const item of ["a", "b", "c", "d"]) api.objects.set(item, card(item));
    api.objects.set("e", card("e", "other"));
    api.extra.set("/apis/discovery.k8s.io/v1/namespaces/ns1/endpointslices", [
      { endpoints: [{ conditions: { ready: true }, targetRef: { name: "a" } }, { conditions: { ready: false }, targetRef: { name: "b" } }] },
      { endpoints: [{ conditions: { ready: true }, targetRef: { name: "d" } }] },
      { endpoints: [{ conditions: { ready: true }, targetRef: { name: "e" } }] },
    ]);
    expect((await d.list("v1/mdc", "dynamo/backend/generate/")).map((r) => r.key)).toEqual(["dynamo/backend/generate/a", "dynamo/backend/generate/d"]);
    expect(await d.list("v1/instances", "")).toEqual([]);
    const slices = api.seen.filter((request) => request.path.endsWith("/endpointslices"));
    expect(slices.map(({ query }) => query.labelSelector)).toEqual(["nvidia.com/dynamo-discovery-enabled=true", "nvidia.com/dynamo-discovery-enabled=true", "nvidia.com/dynamo-discovery-enabled=true", "nvidia.com/dynamo-discovery-enabled=true"]);
  });
  test("container mode looks at pods", async () => {
    const d = await discovery({}, { mode: "container" as never, objectName: "worker-0-engine-0" });
    api.objects.set("p-engine-1", card("p-engine-1"));
    api.extra.set("/api/v1/namespaces/ns1/pods", [{ metadata: { name: "p" }, status: { containerStatuses: [{ name: "engine-1", ready: true }] } }]);
    expect((await d.list("v1/mdc", "")).map((r) => r.key)).toEqual(["dynamo/backend/generate/p-engine-1"]);
  });
});

describe("a server in trouble", () => {
  test.each([409, 429, 500, 503])("%d is tried again, whatever the call", async (status) => {
    api.fail("DELETE", status);
    api.fail("PATCH", status, 2);
    const d = await discovery();
    api.fail("PATCH", status, 2);
    await d.add(record());
    expect(api.requests("PATCH").length).toBe(5 + 1);
    expect(Object.keys(data().endpoints)).toEqual([KEY]);
    api.fail("GET", status);
    expect(await d.list("v1/mdc", "")).toEqual([]);
    api.fail("DELETE", status);
    await d.close();
    expect(api.objects.size).toBe(0);
  });
  test("the server's own wish for a pause is followed", async () => {
    api.fail("PATCH", 429, 1, { "retry-after": "1" });
    await discovery();
    expect(lines.flatMap((line) => /"retryMs":(\d+)/.exec(line)?.[1] ?? [])).toEqual(["1000"]);
  });
  test.each([
    [400, /400 made up 400/],
    [401, /401 made up 401; the token or client certificate is not accepted/],
    [403, /403 made up 403; the pod's service account needs get, list, watch, create, patch and delete/],
    [422, /422 made up 422/],
  ])("%d is an error at once", async (status, message) => {
    api.fail("PATCH", status);
    expect(() => discovery()).toThrow(message);
    expect(api.requests("PATCH").length).toBe(1);
  });
  test("an API server without the resource is told from one without the object", async () => {
    api.faults.push({ method: "PATCH", response: () => new Response("404 page not found\n", { status: 404 }) });
    expect(() => discovery()).toThrow(/404 404 page not found; the cluster has no DynamoWorkerMetadata resource/);
  });
  test("errors name the server and where its address comes from, never the token", async () => {
    api.fail("DELETE", 403);
    const error = (await discovery().catch((e: unknown) => e)) as Error;
    expect(error).toBeInstanceOf(DiscoveryError);
    expect(error.message).toContain(`Kubernetes API server ${api.url} (test), DELETE /apis/nvidia.com/v1alpha1/namespaces/ns1/dynamoworkermetadatas/worker-0: 403`);
    expect(error.message).not.toContain("secret-token");
    const odd: ApiAccess = { ...access(), credentials: () => ({ authorization: "Bearer a\nsecret-token", tls: {} }) };
    const header = (await KubernetesDiscovery.open(new ApiClient(odd), identity).catch((e: unknown) => e)) as Error;
    expect(header.message).toBe("test: the token holds characters that no header can carry");
  });
  test("nobody listens: bounded, and said", async () => {
    const { url } = api;
    await api.stop();
    const error = (await discovery({ openMs: 400 }).catch((e: unknown) => e)) as Error;
    expect(error).toBeInstanceOf(DiscoveryError);
    expect(error.message).toContain(url);
  });
  test("a server that comes up late is waited for", async () => {
    const { port } = api;
    await api.stop();
    const opening = discovery();
    await logged("API server does not take the request yet");
    api = new StandIn(port);
    await (await opening).add(record());
    expect(JSON.parse(open[0]!.metadata())).toEqual(data());
  });
  test("an add that fails leaves nothing behind", async () => {
    const d = await discovery();
    await d.add(model);
    api.fail("PATCH", 403);
    expect(() => d.add(record())).toThrow(/403/);
    api.fail("PATCH", 403);
    expect(() => d.replace(modelRecord(name, identity.instanceId, { display_name: "other" }))).toThrow(/403/);
    await d.add(record());
    expect(data().model_cards[KEY].card_json.display_name).toBe("m");
  });
  test("a remove that fails is made good later, without anything else happening", async () => {
    const d = await discovery({ removeMs: 300 });
    await d.add(model);
    await d.add(record());
    await watched();
    // A new watch begins after these writes: no event is on its way any more.
    const watches = api.requests("WATCH").length;
    api.cut();
    await eventually(() => api.watchers > 0 && api.requests("WATCH").length > watches, "a new watch");
    api.fail("PATCH", 503, 6);
    expect(() => d.remove("v1/instances", KEY)).toThrow(/503/);
    await eventually(() => Object.keys(data().endpoints).length === 0, "the removal arrives");
    expect(Object.keys(data().model_cards)).toEqual([KEY]);
  });
  test("a server known to be away holds up neither removals nor the end", async () => {
    const d = await discovery({ addMs: 200, removeMs: 600_000, closeMs: 600_000 });
    await d.add(record());
    await api.stop();
    expect(() => d.add(model)).toThrow(/Unable to connect|ECONN/);
    expect(() => d.remove("v1/instances", KEY)).toThrow(/Unable to connect|ECONN/);
    await d.close();
  });
  test("close is bounded without a server", async () => {
    const d = await discovery({ closeMs: 300 });
    await d.add(record());
    await watched();
    await api.stop();
    await d.close();
    expect(() => d.remove("v1/instances", KEY)).toThrow(/closed/);
  });
  test("a server that comes back without the object gets it again", async () => {
    const d = await discovery();
    await d.add(record());
    await watched();
    const { port } = api;
    await api.stop();
    api = new StandIn(port);
    await eventually(() => data()?.endpoints[KEY], "the record is written again");
  });
});

describe("the own record is followed", () => {
  test("deleted by somebody: written again", async () => {
    const d = await discovery();
    await d.add(record());
    await watched();
    api.remove("worker-0");
    await eventually(() => data()?.endpoints[KEY], "the record is back");
  });
  test("changed by somebody: written again; own writes are not", async () => {
    const d = await discovery();
    await watched();
    await d.add(model);
    await d.add(record());
    api.put("worker-0", (object) => ({ ...object, spec: { data: {} } }));
    await eventually(() => data()?.endpoints?.[KEY], "the record is whole");
    expect(api.requests("PATCH").length).toBe(4);
  });
  test("another pod of the same name takes over: its record stays", async () => {
    const d = await discovery();
    await d.add(record());
    await watched();
    api.put("worker-0", () => ({ metadata: { name: "worker-0", ownerReferences: [{ kind: "Pod", name: "worker-0", uid: "u2" }] }, spec: { data: { endpoints: { other: {} } } } }));
    await logged("another pod of the same name has taken the record over");
    expect(() => d.add(model)).toThrow(/belongs to another pod now \(uid u2\)/);
    await d.close();
    expect(api.objects.get("worker-0").metadata.ownerReferences[0].uid).toBe("u2");
  });
  test("close does not remove a successor's record that was never seen", async () => {
    const d = await discovery();
    await watched();
    api.objects.get("worker-0").metadata.ownerReferences[0].uid = "u2";
    await d.close();
    expect(api.objects.size).toBe(1);
  });
  test("a version that is too old, a watch that ends and one that is refused: it goes on", async () => {
    const d = await discovery();
    await d.add(record());
    await watched();
    api.say({ type: "ERROR", object: { code: 410, message: "too old" } });
    api.cut();
    await watched();
    api.fail("WATCH", 403, 3);
    api.cut();
    await watched();
    api.remove("worker-0");
    await eventually(() => data()?.endpoints[KEY], "the record is back");
    expect(api.requests("WATCH").length).toBeGreaterThanOrEqual(6);
  });
});
