import type { EventTransport } from "../discovery/records.ts";
import { encodeEnvelope, publisherId, type TopicPublisher } from "./topic-publisher.ts";
import { ZmtpPublisher } from "./zmtp-pub.ts";

const VERSION = 1;

/** A topic as a ZeroMQ PUB socket of its own, that routers connect to. */
export class ZmqTopicPublisher implements TopicPublisher {
  readonly id = publisherId();
  #sequence = 0n;

  private constructor(
    readonly topic: string,
    readonly socket: ZmtpPublisher,
  ) {
    socket.onSubscribe = () => this.onListener();
  }

  /** @param host IP to bind and advertise. @throws Error of the socket when it cannot be bound */
  static async start(topic: string, host: string): Promise<ZmqTopicPublisher> {
    return new ZmqTopicPublisher(topic, await ZmtpPublisher.listen(host));
  }

  onListener: () => void = () => {};
  /** Never: each subscriber has a connection of its own, and subscribes anew after it broke. */
  onInterruption: () => void = () => {};

  get transport(): EventTransport {
    return { kind: "Zmq", config: { endpoint: this.socket.endpoint } };
  }

  /** Four parts: topic, publisher id, sequence, versioned envelope. */
  publish(payload: unknown): void {
    const sequence = this.#sequence++;
    const envelope = encodeEnvelope(this, sequence, payload);
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
