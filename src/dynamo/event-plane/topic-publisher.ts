import { randomBytes } from "node:crypto";
import type { EndpointName, EventTransport } from "../discovery/records.ts";
import { encodeMsgpack } from "../protocol/msgpack.ts";

/** Publishes typed payloads of one topic in Dynamo's envelope. */
export interface TopicPublisher {
  /** 53 bits, never 0; one per publisher, so a restart is a new id space. */
  readonly id: bigint;
  readonly topic: string;
  /** What the channel's record advertises. */
  readonly transport: EventTransport;
  /** Never waits and never throws; whoever misses a message notices by the ids inside. */
  publish(payload: unknown): void;
  /** Called when somebody begins to listen who may have missed what was published before. */
  onListener: () => void;
  /** Called when listeners of old may have missed messages, and hear again. */
  onInterruption: () => void;
  close(): void;
}

/** Where events go. */
export interface EventPlane {
  /** @throws PlaneError when it cannot be reached */
  publisher(topic: string, endpoint: EndpointName): Promise<TopicPublisher>;
  close(): Promise<void>;
}

export const publisherId = (): bigint => (randomBytes(8).readBigUInt64BE() & ((1n << 53n) - 1n)) || 1n;

/** The bytes of one message, the same on every transport. @param sequence counts the publisher's messages from 0 */
export const encodeEnvelope = (publisher: { id: bigint; topic: string }, sequence: bigint, payload: unknown): Buffer =>
  encodeMsgpack({ publisher_id: publisher.id, sequence, published_at: Date.now(), topic: publisher.topic, payload: encodeMsgpack(payload) });
