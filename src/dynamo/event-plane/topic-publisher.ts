import { randomBytes } from "node:crypto";
import { encodeMsgpack } from "../protocol/msgpack.ts";
import { ZmtpPublisher } from "./zmtp-pub.ts";

const VERSION = 1;

/** 53 bits, never 0; one per publisher, so a restart is a new id space. */
const publisherId = (): bigint => (randomBytes(8).readBigUInt64BE() & ((1n << 53n) - 1n)) || 1n;

/** Publishes typed payloads of one topic in Dynamo's envelope. */
export class TopicPublisher {
  readonly id = publisherId();
  #sequence = 0n;

  private constructor(
    readonly topic: string,
    readonly socket: ZmtpPublisher,
  ) {}

  static async start(topic: string, host: string): Promise<TopicPublisher> {
    return new TopicPublisher(topic, await ZmtpPublisher.listen(host));
  }

  publish(payload: unknown): void {
    const sequence = this.#sequence++;
    const envelope = encodeMsgpack({ publisher_id: this.id, sequence, published_at: Date.now(), topic: this.topic, payload: encodeMsgpack(payload) });
    const ids = Buffer.allocUnsafe(16);
    ids.writeBigUInt64BE(this.id, 0);
    ids.writeBigUInt64BE(sequence, 8);
    const head = Buffer.allocUnsafe(5);
    head[0] = VERSION;
    head.writeUInt32BE(envelope.length, 1);
    this.socket.send([Buffer.from(this.topic), ids.subarray(0, 8), ids.subarray(8), Buffer.concat([head, envelope])]);
  }

  close(): void {
    this.socket.close();
  }
}
