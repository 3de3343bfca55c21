/** One identity after the other: what is registered, in which order, and what survives. */
import { afterEach, describe, expect, test } from "bun:test";
import type { Bucket, DiscoveryRecord } from "../../../src/dynamo/discovery/discovery.ts";
import { DiscoveryError } from "../../../src/dynamo/discovery/discovery.ts";
import { MemoryDiscovery } from "../../../src/dynamo/discovery/memory.ts";
import { type EndpointName, endpointPath, hexId } from "../../../src/dynamo/discovery/records.ts";
import type { EventPlane, TopicPublisher } from "../../../src/dynamo/event-plane/topic-publisher.ts";
import { Membership } from "../../../src/dynamo/membership.ts";
import type { Endpoint, RequestPlane } from "../../../src/dynamo/request-plane/request-plane.ts";
import { DynamoMetrics } from "../../../src/dynamo/system-server/metrics.ts";
import { FakeEngine } from "./fake-engine.ts";
import { until } from "./plane-client.ts";

const endpoint: EndpointName = { namespace: "dynamo", component: "backend", endpoint: "generate" };
const FIRST = 2n ** 63n + 11n;

/** Memory that can forget this process, as etcd does when a lease ends. */
class Forgetful extends MemoryDiscovery {
  readonly log: string[] = [];
  override instanceId = FIRST;
  #lost: string | null = null;
  #listener: (cause: string) => void = () => {};
  /** Called before each record is written. */
  onAdd: (record: DiscoveryRecord) => void = () => {};

  lose(cause = "gone"): void {
    this.#lost = cause;
    this.records.clear();
    this.#listener(cause);
  }
  override onLost(listener: (cause: string) => void = () => {}): () => void {
    this.#listener = listener;
    if (this.#lost !== null) listener(this.#lost);
    return () => (this.#listener = () => {});
  }
  override async renew(): Promise<bigint> {
    this.#lost = null;
    this.records.clear();
    this.log.push(`renew ${hexId(++this.instanceId)}`);
    return this.instanceId;
  }
  override async add(record: DiscoveryRecord): Promise<void> {
    this.onAdd(record);
    if (this.#lost !== null) throw new DiscoveryError(this.#lost);
    await super.add(record);
    this.log.push(`+ ${kind(record.bucket, record.key)}`);
  }
  override async remove(bucket: Bucket, key: string): Promise<void> {
    await super.remove(bucket, key);
    this.log.push(`- ${kind(bucket, key)}`);
  }
  override async close(): Promise<void> {
    await super.close();
    this.log.push("close");
  }
}
const kind = (bucket: string, key: string) => `${bucket.slice(3)} ${/worker_kv_query/.test(key) ? "query" : (/topic\/([\w-]+)/.exec(key)?.[1] ?? key.split("/")[2])}`;
const IN_ORDER = ["event_channels kv-events", "instances query", "event_sources kv-events", "event_channels kv_metrics", "mdc generate", "instances generate"];

/** Knows which paths are served. */
class Plane implements RequestPlane {
  readonly host = "127.0.0.1";
  readonly served = new Map<string, Endpoint>();
  transport(name: EndpointName, id: bigint) {
    return { tcp: `127.0.0.1:1/${endpointPath(name, id)}` };
  }
  async register(name: EndpointName, id: bigint, accept: Endpoint): Promise<void> {
    this.served.set(endpointPath(name, id), accept);
  }
  async unregister(name: EndpointName, id: bigint): Promise<void> {
    this.served.delete(endpointPath(name, id));
  }
  async close(): Promise<void> {}
}
class Events implements EventPlane {
  readonly open: (TopicPublisher & { sent: unknown[] })[] = [];
  #next = 1n;
  async publisher(topic: string): Promise<TopicPublisher> {
    const sent: unknown[] = [];
    const made = {
      id: this.#next++, topic, sent, transport: { kind: "Zmq" as const, config: { endpoint: "tcp://127.0.0.1:1" } }, onListener: () => {}, onInterruption: () => {},
      publish: (payload: unknown) => void sent.push(payload),
      close: () => void this.open.splice(this.open.indexOf(made), 1),
    };
    this.open.push(made);
    return made;
  }
  of(topic: string) {
    return this.open.filter((publisher) => publisher.topic === topic);
  }
  async close(): Promise<void> {}
}

const open: Membership[] = [];
afterEach(async () => {
  for (const item of open.splice(0)) await item.close();
});
async function join(graceMs = 0, prepare: (discovery: Forgetful) => void = () => {}) {
  const discovery = new Forgetful(0n);
  prepare(discovery);
  const [plane, events, engine, metrics] = [new Plane(), new Events(), new FakeEngine({ prefixCache: true }), new DynamoMetrics(endpoint, FIRST)];
  const accept: Endpoint = () => {};
  const membership = await Membership.join({ discovery, plane, events, engine, metrics, endpoint, accept, card: { display_name: "acme/a", source_path: "/models/a" }, codec: "json", graceMs });
  open.push(membership);
  return { discovery, plane, events, engine, metrics, membership, accept };
}
const added = (discovery: Forgetful) => discovery.log.filter((line) => line.startsWith("+ ")).map((line) => line.slice(2));
const page = (n: number, parent: number | null) => ({ kind: "stored" as const, page: n, parent, domain: 0n, tokenIds: Array.from({ length: 16 }, (_, i) => n * 100 + i) });

describe("joining and leaving", () => {
  test("everything in order, and in reverse; the identity goes last", async () => {
    const { discovery, membership } = await join();
    expect(added(discovery)).toEqual(IN_ORDER);
    discovery.log.length = 0;
    await membership.leave();
    expect(discovery.log).toEqual([...IN_ORDER.toReversed().map((item) => `- ${item}`), "close"]);
  });
  test("another model on the endpoint ends the start", async () => {
    const other = { bucket: "v1/mdc" as const, key: "dynamo/backend/generate/7", value: { card_json: { display_name: "acme/b", source_path: "/models/b" } } };
    await expect(join(0, (discovery) => void discovery.records.set("other", other))).rejects.toThrow(/"acme\/a".*"acme\/b"/);
  });
  test("an identity that was lost while loading is replaced before anything is registered", async () => {
    const { discovery, plane } = await join(0, (fresh) => fresh.lose());
    expect([discovery.log[0], added(discovery)]).toEqual([`renew ${hexId(FIRST + 1n)}`, IN_ORDER]);
    expect([...plane.served.keys()]).toContain(`${hexId(FIRST + 1n)}/generate`);
  });
  test("one that is lost in the middle of the start as well", async () => {
    let times = 0;
    const { discovery } = await join(0, (fresh) => (fresh.onAdd = (record) => void (record.bucket === "v1/mdc" && times++ === 0 && fresh.lose())));
    expect(discovery.instanceId).toBe(FIRST + 1n);
    expect([...discovery.records.values()].map((record) => kind(record.bucket, record.key))).toEqual(IN_ORDER);
  });
});

describe("a lost identity", () => {
  test("everything again under the new one: same handler, new publishers, what the cache holds, metrics", async () => {
    const { discovery, plane, events, engine, metrics, membership, accept } = await join();
    engine.emitKv([page(1, null), page(2, 1)]);
    const [old] = events.of("kv-events");
    expect(old!.sent).toHaveLength(1);
    discovery.log.length = 0;
    discovery.lose();
    await until("registered again", () => discovery.log.length === 1 + IN_ORDER.length);
    expect(added(discovery)).toEqual(IN_ORDER);
    const id = hexId(FIRST + 1n);
    expect(membership.instanceId).toBe(FIRST + 1n);
    expect(plane.served.get(`${id}/generate`)).toBe(accept);
    await until("old paths and publishers are gone", () => events.open.length === 2 && [...plane.served.keys()].every((path) => path.startsWith(id)));
    const [now] = events.of("kv-events");
    expect(now!.id).not.toBe(old!.id);
    engine.emitKv([page(3, 2)]);
    // Numbers go on: a router that holds the dump sees no gap.
    expect((now!.sent as { worker_id: bigint; event: { event_id: number } }[][]).flat().map((event) => [event.worker_id, event.event.event_id])).toEqual([[FIRST + 1n, 2]]);
    expect(old!.sent).toHaveLength(1);
    metrics.endpoint("generate").received(1, null);
    const text = await metrics.render();
    expect(text).toContain(`worker_id="${id}"`);
    expect(text).not.toContain(`worker_id="${hexId(FIRST)}"`);
  });
  test("the old path is served until frontends had time to hear of it", async () => {
    const { discovery, plane, accept } = await join(3_600_000);
    discovery.lose();
    await until("registered again", () => added(discovery).length === 2 * IN_ORDER.length);
    expect(plane.served.get(`${hexId(FIRST)}/generate`)).toBe(accept);
  });
  test("lost again while registering: the last one stands alone, complete", async () => {
    const { discovery, plane } = await join();
    let losses = 0;
    discovery.onAdd = (record) => void (record.bucket === "v1/event_sources" && losses++ < 2 && discovery.lose());
    discovery.lose();
    await until("registered under the fourth identity", () => discovery.instanceId === FIRST + 3n && discovery.records.size === IN_ORDER.length, 20_000);
    await until("only its paths are served", () => [...plane.served.keys()].every((path) => path.startsWith(hexId(FIRST + 3n))));
  }, 30_000);
  test("a store that refuses for a while is tried until it does not", async () => {
    const { discovery } = await join();
    let refusals = 0;
    discovery.onAdd = () => {
      if (refusals++ < 2) throw new DiscoveryError("not now");
    };
    discovery.lose();
    await until("registered", () => discovery.records.size === IN_ORDER.length, 20_000);
    expect(refusals).toBeGreaterThan(2);
  }, 30_000);
  test("a worker that leaves does not come back", async () => {
    const { discovery, membership } = await join();
    const leaving = membership.leave();
    discovery.lose();
    await leaving;
    expect(discovery.log.filter((line) => line.startsWith("renew"))).toEqual([]);
    expect(discovery.records.size).toBe(0);
  });
});

describe("changes", () => {
  const control: EndpointName = { ...endpoint, endpoint: "rl" };
  test("a second endpoint, the pause of routing and another card survive a new identity", async () => {
    const { discovery, plane, membership } = await join();
    const accept: Endpoint = () => {};
    await membership.addEndpoint(control, accept);
    await membership.updateCard({ display_name: "acme/a", taints: ["gpu"] });
    await membership.setRoutable(false);
    await membership.setRoutable(false);
    const there = () => [...discovery.records.values()].map((record) => kind(record.bucket, record.key));
    const expected = [...IN_ORDER.slice(0, -1), "instances rl"];
    expect(there()).toEqual(expected);
    discovery.lose();
    await until("registered again", () => discovery.records.size === expected.length);
    expect(there()).toEqual(expected);
    expect(plane.served.get(`${hexId(FIRST + 1n)}/rl`)).toBe(accept);
    const [card] = [...discovery.records.values()].filter((record) => record.bucket === "v1/mdc");
    expect(card!.value).toMatchObject({ instance_id: FIRST + 1n, card_json: { taints: ["gpu"] } });
    await membership.setRoutable(true);
    expect(there()).toEqual([...expected, "instances generate"]);
    discovery.log.length = 0;
    await membership.leave();
    expect(discovery.log.slice(0, 3)).toEqual(["- instances generate", "- instances rl", "- mdc generate"]);
  });
  test("made while the identity is gone, they come with the next one", async () => {
    const { discovery, membership } = await join();
    discovery.onAdd = (record) => void (record.key.includes("/rl/") && discovery.instanceId === FIRST && discovery.lose());
    await membership.addEndpoint(control, () => {});
    await until("registered again with it", () => [...discovery.records.keys()].some((key) => key.includes(`/rl/${hexId(FIRST + 1n)}`)));
  });
});
