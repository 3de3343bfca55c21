import { describe, expect, test } from "bun:test";
import type { KvEvent } from "../../../src/engine/types.ts";
import { KvEventLog, type RouterEvent } from "../../../src/dynamo/event-plane/kv-event-log.ts";
import { KvEventPlane } from "../../../src/dynamo/event-plane/kv-event-plane.ts";
import type { TopicPublisher } from "../../../src/dynamo/event-plane/topic-publisher.ts";
import { instance } from "../../../src/dynamo/discovery/records.ts";
import { DynamoMetrics } from "../../../src/dynamo/system-server/metrics.ts";
import { FakeEngine } from "./fake-engine.ts";

const endpoint = { namespace: "dynamo", component: "backend", endpoint: "generate" };
const workerId = 0xe0634cbc480eab4dn;

/** A plane that keeps what is published. */
async function start() {
  const published: RouterEvent[][] = [];
  const publishers: TopicPublisher[] = [];
  const eventLog = new KvEventLog(workerId);
  const metrics = new DynamoMetrics(endpoint, workerId);
  const plane = await KvEventPlane.start({
    engine: new FakeEngine({ prefixCache: true }), endpoint, workerId, eventLog, metrics,
    plane: { host: "127.0.0.1", transport: () => ({ nats_tcp: "s" }), register: async () => {}, unregister: async () => {}, close: async () => {} },
    events: {
      close: async () => {},
      publisher: async (topic) => {
        const made: TopicPublisher = {
          id: 5n, topic, transport: { kind: "Nats", config: { subject_prefix: "p" } }, onListener() {}, onInterruption() {}, close() {},
          publish: (payload) => void (topic === "kv-events" && published.push(payload as RouterEvent[])),
        };
        publishers.push(made);
        return made;
      },
    },
    instance: (name) => instance(name, workerId, { nats_tcp: "s" }, "cpu", "json"),
  });
  return { plane, published, eventLog, metrics, events: publishers.find(({ topic }) => topic === "kv-events")! };
}
let page = 0;
const chain = (pages: number): KvEvent[] => Array.from({ length: pages }, (_, i) => ({ kind: "stored", page: ++page, parent: i === 0 ? null : page - 1, domain: 0n, tokenIds: Array.from({ length: 16 }, (_, t) => page * 16 + t) }));
const ids = (messages: RouterEvent[][]) => messages.flat().map(({ event }) => event.event_id);
const blocks = (message: RouterEvent[]) => message.reduce((sum, { event }) => sum + (event.data !== "cleared" && "stored" in event.data ? event.data.stored.blocks.length : 0), 0);

describe("messages", () => {
  test("carry at most 128 events and 8192 blocks, in order and without a gap", async () => {
    const { plane, published, eventLog } = await start();
    plane.publish(eventLog.append(Array.from({ length: 300 }, () => chain(1)).flat()));
    plane.publish(eventLog.append(Array.from({ length: 100 }, () => chain(128)).flat()));
    expect(published.map((message) => message.length)).toEqual([128, 128, 44, 64, 36]);
    expect(Math.max(...published.map(blocks))).toBe(8192);
    expect(ids(published)).toEqual(Array.from({ length: 400 }, (_, i) => i + 1));
    plane.close();
  });
  test("an interruption brings the latest 1024 events again, under the same ids; not those of another identity", async () => {
    const { plane, published, eventLog, events } = await start();
    eventLog.append(Array.from({ length: 1100 }, () => chain(1)).flat());
    events.onInterruption();
    expect(ids(published)).toEqual(Array.from({ length: 1024 }, (_, i) => i + 77));
    published.length = 0;
    eventLog.rename(7n);
    eventLog.append(chain(1));
    events.onInterruption();
    expect(published).toEqual([]);
    plane.close();
  });
});

test("the query endpoint's series go with its identity", async () => {
  const { plane, metrics } = await start();
  const series = async () => (await metrics.render()).split("\n").filter((line) => line.includes("worker_kv_query_source_5"));
  expect((await series()).length).toBeGreaterThan(5);
  plane.close();
  expect(await series()).toEqual([]);
});
