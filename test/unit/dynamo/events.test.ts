import { afterEach, describe, expect, test } from "bun:test";
import { connect, type Socket } from "node:net";
import { createXXHash3 } from "hash-wasm";
import { sequenceHash, tokensHash, xxh3Of64Bytes } from "../../../src/dynamo/event-plane/hashes.ts";
import { KvEventLog } from "../../../src/dynamo/event-plane/kv-event-log.ts";
import { type EventData, KvState } from "../../../src/dynamo/event-plane/kv-state.ts";
import { ZmqTopicPublisher } from "../../../src/dynamo/event-plane/zmq-publisher.ts";
import { encodeMessage } from "../../../src/dynamo/event-plane/zmtp-pub.ts";
import { cacheDomain } from "../../../src/dynamo/handler.ts";
import { decodeMsgpack, encodeMsgpack } from "../../../src/dynamo/protocol/msgpack.ts";
import type { KvEvent } from "../../../src/engine/types.ts";
import { until } from "./plane-client.ts";

const range = (from: number, count: number) => Array.from({ length: count }, (_, i) => from + i);
const hex = (hash: bigint) => hash.toString(16).padStart(16, "0");

describe("block hashes", () => {
  test("vectors of Dynamo's own code", () => {
    expect(hex(tokensHash(range(3, 16), 0n))).toBe("e22977b4ebb9cc09");
    expect(hex(tokensHash(Array(16).fill(0), 0n))).toBe("4ca6490661395090");
    expect(hex(tokensHash(Array(16).fill(0xffffffff), 0n))).toBe("7d8b6f9b721bb4ad");
    const [a, b] = [tokensHash(range(100, 16), 0n), tokensHash(range(116, 16), 0n)];
    expect([a, b].map(hex)).toEqual(["9633b31c7a2562c7", "10ee3bbea3bf72f2"]);
    expect(hex(sequenceHash(sequenceHash(null, a), b))).toBe("38edde460245fc8e");
    const sevens = tokensHash(Array(16).fill(7), 0n);
    const chain = [sequenceHash(null, sevens)];
    chain.push(sequenceHash(chain[0]!, sevens), sequenceHash(sequenceHash(chain[0]!, sevens), sevens));
    expect(chain.map(hex)).toEqual(["79b94e685564154e", "a04e26142fcd2534", "09826aef28082a7b"]);
  });
  test("a salt is its own domain, hashed as the router does", () => {
    expect(cacheDomain("tenant-a") + 1337n).toBe(1948188790972764086n);
    expect(hex(tokensHash(range(3, 16), cacheDomain("tenant-a")))).toBe("3f316c86bb97cb0a");
    expect(cacheDomain("")).toBe(0n);
    expect(cacheDomain("tenant-b")).not.toBe(cacheDomain("tenant-a"));
  });
  test("64-byte XXH3 equals an independent implementation for whole 64-bit seeds", async () => {
    for (let i = 0; i < 200; i++) {
      const bytes = crypto.getRandomValues(new Uint8Array(64));
      const seed = i === 0 ? 0n : i === 1 ? 2n ** 64n - 1n : Buffer.from(crypto.getRandomValues(new Uint8Array(8))).readBigUInt64LE();
      const hasher = await createXXHash3(Number(seed & 0xffffffffn), Number(seed >> 32n));
      expect(hex(xxh3Of64Bytes(bytes, seed))).toBe(hasher.init().update(bytes).digest("hex"));
    }
  });
});

const stored = (page: number, parent: number | null, first = page * 16, domain = 0n): KvEvent => ({ kind: "stored", page, parent, domain, tokenIds: range(first, 16) });
const removed = (page: number): KvEvent => ({ kind: "removed", page });

/** What a router holds after these events; fails on anything it would reject. */
function replay(events: readonly EventData[]): Map<bigint, bigint | null> {
  const held = new Map<bigint, bigint | null>();
  for (const event of events) {
    if (event === "cleared") held.clear();
    else if ("stored" in event) {
      let parent = event.stored.parent_hash;
      expect(parent === null || held.has(parent)).toBe(true);
      expect(event.stored.blocks.length).toBeWithin(1, 129);
      for (const block of event.stored.blocks) {
        expect(held.has(block.block_hash)).toBe(false);
        held.set(block.block_hash, parent);
        parent = block.block_hash;
      }
    } else {
      expect(event.removed.block_hashes.length).toBeWithin(1, 129);
      for (const hash of event.removed.block_hashes) expect(held.delete(hash)).toBe(true);
      for (const parent of held.values()) expect(parent === null || held.has(parent)).toBe(true);
    }
  }
  return held;
}

describe("pages to router events", () => {
  test("a chain is one event from its root; a branch names its parent", () => {
    const state = new KvState();
    const first = state.apply([stored(1, null), stored(2, 1), stored(3, 2)]);
    expect(first.length).toBe(1);
    const blocks = (first[0] as { stored: { parent_hash: bigint | null; blocks: { block_hash: bigint }[] } }).stored;
    expect([blocks.parent_hash, blocks.blocks.length]).toEqual([null, 3]);
    const branch = state.apply([stored(9, 2, 900)]);
    expect((branch[0] as typeof first[0] & { stored: { parent_hash: bigint } }).stored.parent_hash).toBe(blocks.blocks[1]!.block_hash);
  });
  test("long chains are cut at 128 blocks and stay connected", () => {
    const state = new KvState();
    const events = state.apply(range(0, 300).map((i) => stored(i, i === 0 ? null : i - 1)));
    expect(events.length).toBe(3);
    expect(replay(events).size).toBe(300);
    expect(state.apply(range(0, 300).reverse().map(removed)).length).toBe(3);
    expect(state.size).toBe(0);
  });
  test("two pages with the same content are one block until both are gone", () => {
    const state = new KvState();
    expect(state.apply([stored(1, null, 5), stored(2, null, 5)]).length).toBe(1);
    expect(state.apply([removed(1)])).toEqual([]);
    expect(state.apply([removed(2)]).length).toBe(1);
  });
  test("an unknown parent is reported to the caller and not to the router; unknown removals are nothing", () => {
    const orphans: KvEvent[] = [];
    const state = new KvState();
    expect(state.apply([stored(5, 4), removed(77)], (event) => orphans.push(event))).toEqual([]);
    expect(orphans.length).toBe(1);
  });
  test("domains do not share blocks", () => {
    const state = new KvState();
    state.apply([stored(1, null, 5), stored(2, null, 5, cacheDomain("a")), stored(3, null, 5, cacheDomain("b"))]);
    expect(state.size).toBe(3);
  });
  test("random traces: a replay, and a dump, hold what the cache holds", () => {
    let seed = 12345;
    const random = (n: number) => (seed = (Math.imul(seed, 1103515245) + 12345) >>> 0) % n;
    const state = new KvState();
    const all: EventData[] = [];
    const live = new Map<number, number | null>();
    for (let i = 0; i < 3000; i++) {
      const leaves = [...live.keys()].filter((page) => ![...live.values()].includes(page));
      if (live.size > 60 || (live.size > 0 && random(3) === 0)) {
        const page = leaves[random(leaves.length)]!;
        live.delete(page);
        all.push(...state.apply([removed(page)]));
      } else {
        const page = range(0, 100).find((id) => !live.has(id))!;
        const parent = live.size === 0 || random(4) === 0 ? null : [...live.keys()][random(live.size)]!;
        live.set(page, parent);
        all.push(...state.apply([stored(page, parent, i * 16)]));
      }
    }
    const held = replay(all);
    expect(held.size).toBe(live.size);
    expect(replay(state.dump())).toEqual(held);
  });
});

describe("event log", () => {
  const filled = () => {
    const log = new KvEventLog(10258968989132066979n);
    for (let i = 0; i < 1100; i++) log.append([stored(i, null)]);
    return log;
  };
  const query = (patch: Record<string, unknown> = {}) => ({ worker_id: 10258968989132066979n, dp_rank: 0, start_event_id: null, end_event_id: null, kind: "recovery", ...patch });
  test("ids start at 1 and have no gap, whatever the batches", () => {
    const log = new KvEventLog(5n);
    const ids = [log.append([stored(1, null), stored(2, 1)]), log.append([]), log.append([removed(2), removed(1)]), log.append([{ kind: "cleared" }])].flat().map((event) => event.event.event_id);
    expect(ids).toEqual([1, 2, 3]);
  });
  test("without a start the whole tree, with the last id", () => {
    const answer = filled().answer(query()) as { TreeDump: { events: unknown[]; last_event_id: number } };
    expect([answer.TreeDump.events.length, answer.TreeDump.last_event_id]).toEqual([1100, 1100]);
    expect(new KvEventLog(10258968989132066979n).answer(query())).toEqual({ TreeDump: { events: [], last_event_id: 0, reset_scope: "all" } });
  });
  test("a range that is remembered comes event by event, an older one as the tree", () => {
    const log = filled();
    const events = (log.answer(query({ start_event_id: 1090, end_event_id: 1095 })) as { Events: { events: { event: { event_id: number } }[] } }).Events.events;
    expect(events.map((event) => event.event.event_id)).toEqual(range(1090, 6));
    expect(log.answer(query({ start_event_id: 2 }))).toHaveProperty("TreeDump");
    expect(log.answer(query({ start_event_id: 77 }))).toHaveProperty("Events");
  });
  test("questions it cannot answer", () => {
    const log = filled();
    expect(log.answer(query({ start_event_id: 1101, end_event_id: 1101 }))).toEqual({ TooNew: { requested_start: 1101, requested_end: 1101, newest_available: 1100 } });
    expect(log.answer(query({ start_event_id: 5, end_event_id: 3 }))).toEqual({ InvalidRange: { start_id: 5, end_id: 3 } });
    for (const body of [null, "x", query({ worker_id: 5 }), query({ dp_rank: 1 }), query({ start_event_id: "a" }), query({ worker_id: {} })]) expect(log.answer(body)).toHaveProperty("Error");
  });
  test("on the wire an event has the bytes of the reference", () => {
    const data: EventData = { stored: { parent_hash: null, start_position: null, blocks: [{ block_hash: 1n, tokens_hash: 2n, mm_extra_info: null }, { block_hash: 2n ** 64n - 1n, tokens_hash: 300n, mm_extra_info: null }] } };
    const event = { worker_id: 16336188162382127633n, storage_tier: "device", residency_domain: "worker", event: { event_id: 1, data, dp_rank: 0 } };
    expect(encodeMsgpack([event]).toString("hex")).toBe(REFERENCE_EVENT);
  });
});
const REFERENCE_EVENT = "9184a9776f726b65725f6964cfe2b5cc94b2ba6211ac73746f726167655f74696572a6646576696365b07265736964656e63795f646f6d61696ea6776f726b6572a56576656e7483a86576656e745f696401a46461746181a673746f72656483ab706172656e745f68617368c0ae73746172745f706f736974696f6ec0a6626c6f636b739283aa626c6f636b5f6861736801ab746f6b656e735f6861736802ad6d6d5f65787472615f696e666fc083aa626c6f636b5f68617368cfffffffffffffffffab746f6b656e735f68617368cd012cad6d6d5f65787472615f696e666fc0a764705f72616e6b00";

/** Enough of a ZMTP subscriber to see raw bytes. */
class Subscriber {
  bytes = Buffer.alloc(0);
  constructor(readonly socket: Socket) {
    socket.on("data", (chunk: Buffer) => (this.bytes = Buffer.concat([this.bytes, chunk])));
    socket.on("error", () => {});
  }
  static to(publisher: ZmqTopicPublisher, topic: string, greeting = subscriberGreeting()): Subscriber {
    const self = new Subscriber(connect(publisher.socket.port, "127.0.0.1"));
    self.socket.write(Buffer.concat([greeting, Buffer.from("0419055245414459" + "0b536f636b65742d54797065" + "00000003" + "535542", "hex"), Buffer.from([0, topic.length + 1, 1]), Buffer.from(topic)]));
    return self;
  }
}
function subscriberGreeting(): Buffer {
  const greeting = Buffer.alloc(64);
  greeting.set([0xff, 0, 0, 0, 0, 0, 0, 0, 1, 0x7f, 3, 1]);
  greeting.write("NULL", 12);
  return greeting;
}
const HANDSHAKE = 64 + 2 + 0x19;

describe("ZMTP publisher", () => {
  const open: ZmqTopicPublisher[] = [];
  const publisher = async (topic = "kv-events") => {
    const made = await ZmqTopicPublisher.start(topic, "127.0.0.1");
    open.push(made);
    return made;
  };
  afterEach(() => {
    for (const item of open.splice(0)) item.close();
  });

  test("frames: more flag, short and long lengths", () => {
    expect(encodeMessage([Buffer.from("a"), Buffer.alloc(255, 1)]).subarray(0, 5).toString("hex")).toBe("010161" + "00ff");
    expect(encodeMessage([Buffer.alloc(256, 1)]).subarray(0, 9).toString("hex")).toBe("02" + "0000000000000100");
  });
  test("a subscriber gets greeting, READY and whole messages in Dynamo's envelope", async () => {
    const pub = await publisher();
    let subscribed = 0;
    pub.onListener = () => subscribed++;
    const sub = Subscriber.to(pub, "kv-events");
    await until("subscription", () => subscribed === 1);
    pub.publish([{ x: 1 }]);
    await until("message", () => sub.bytes.length > HANDSHAKE);
    expect(sub.bytes.subarray(0, 12).toString("hex")).toBe("ff00000000000000017f0300");
    expect(sub.bytes.toString("latin1", 12, 16)).toBe("NULL");
    expect(sub.bytes.subarray(64, 67).toString("hex")).toBe("041905");
    const message = sub.bytes.subarray(HANDSHAKE);
    expect(message.toString("latin1", 0, 11)).toBe("\x01\x09kv-events");
    expect(message.subarray(11, 13).toString("hex")).toBe("0108");
    expect(message.readBigUInt64BE(13)).toBe(pub.id);
    expect(message.readBigUInt64BE(23)).toBe(0n);
    const body = message.subarray(33);
    expect([body[0], body.readUInt32BE(1)]).toEqual([1, body.length - 5]);
    const envelope = decodeMsgpack(body.subarray(5)) as { publisher_id: number; sequence: number; topic: string; payload: Uint8Array };
    expect([BigInt(envelope.publisher_id), envelope.sequence, envelope.topic]).toEqual([pub.id, 0, "kv-events"]);
    expect(decodeMsgpack(envelope.payload)).toEqual([{ x: 1 }]);
    sub.socket.destroy();
  });
  test("other topics are not sent, and unsubscribing ends it", async () => {
    const pub = await publisher();
    let subscribed = 0;
    pub.onListener = () => subscribed++;
    const [other, sub] = [Subscriber.to(pub, "kv_metrics"), Subscriber.to(pub, "kv")];
    await until("subscriptions", () => subscribed === 2);
    pub.publish([]);
    await until("message", () => sub.bytes.length > HANDSHAKE);
    expect(other.bytes.length).toBe(HANDSHAKE);
    const before = sub.bytes.length;
    sub.socket.write(Buffer.from("0003006b76", "hex"));
    // The next subscription tells that the cancellation was read.
    sub.socket.write(Buffer.from("00020178", "hex"));
    await until("second subscription", () => subscribed === 3);
    pub.publish([]);
    other.socket.write(Buffer.concat([Buffer.from([0, 10, 1]), Buffer.from("kv-events")]));
    await until("third subscription", () => subscribed === 4);
    pub.publish([]);
    await until("message for the other", () => other.bytes.length > HANDSHAKE);
    expect(sub.bytes.length).toBe(before);
    for (const item of [other, sub]) item.socket.destroy();
  });
  test("what is no subscriber is cut off", async () => {
    const pub = await publisher();
    const bad = subscriberGreeting();
    bad.write("PLAIN", 12);
    for (const greeting of [bad, Buffer.alloc(64), Buffer.concat([subscriberGreeting(), Buffer.from("02ffffffffffffffff", "hex")])]) {
      const sub = Subscriber.to(pub, "kv-events", greeting);
      await until("closed", () => sub.socket.destroyed);
    }
  });
  test("a subscriber that does not read loses messages instead of filling memory", async () => {
    const pub = await publisher();
    let subscribed = 0;
    pub.onListener = () => subscribed++;
    const slow = Subscriber.to(pub, "kv-events");
    await until("subscription", () => subscribed === 1);
    slow.socket.pause();
    const payload = "x".repeat(1 << 20);
    for (let i = 0; i < 64; i++) pub.publish(payload);
    slow.socket.resume();
    let size = -1;
    // Everything that was kept arrives, then nothing more.
    await until("quiet", async () => {
      const before = size;
      size = slow.bytes.length;
      await new Promise((resolve) => setTimeout(resolve, 50));
      return before === size && size > HANDSHAKE;
    });
    expect(slow.bytes.length).toBeLessThan(40 << 20);
    expect(slow.bytes.length).toBeGreaterThan(1 << 20);
    slow.socket.destroy();
  });
});
