import { logger } from "../../telemetry/log.ts";
import { type EndpointName, endpointSegments, type EventTransport } from "../discovery/records.ts";
import { escapeSegment } from "../discovery/escape.ts";
import type { NatsLink } from "../nats/link.ts";
import { encodeEnvelope, type EventPlane, publisherId, type TopicPublisher } from "./topic-publisher.ts";

/** After the server's return: frontends pause up to 4 s between their attempts. */
const LISTENERS_RETURN_MS = 5_000;

const log = logger("layerscale::dynamo::event_plane");

/** Core NATS, bare envelopes: whoever does not listen at the moment misses the message. */
class NatsTopicPublisher implements TopicPublisher {
  readonly id = publisherId();
  readonly #prefix: string;
  readonly #subject: string;
  #sequence = 0n;
  #lost = 0;
  /** Never: who listens is known to nats-server alone. */
  onListener: () => void = () => {};
  onInterruption: () => void = () => {};

  constructor(
    readonly topic: string,
    endpoint: EndpointName,
    readonly link: NatsLink,
    readonly onClose: () => void,
  ) {
    this.#prefix = endpointSegments(endpoint).join(".");
    this.#subject = `${this.#prefix}.${escapeSegment(topic)}`;
  }

  get transport(): EventTransport {
    return { kind: "Nats", config: { subject_prefix: this.#prefix } };
  }

  publish(payload: unknown): void {
    const message = encodeEnvelope(this, this.#sequence, payload);
    if (message.length > this.link.maxPayload && Array.isArray(payload) && payload.length > 1) {
      const half = payload.length >> 1;
      this.publish(payload.slice(0, half));
      this.publish(payload.slice(half));
      return;
    }
    this.#sequence += 1n;
    if (this.link.publish(this.#subject, message)) return;
    if (this.#lost++ === 0) log.warn("events do not reach nats-server; routers ask for what they miss", { topic: this.topic, bytes: message.length, maxPayload: this.link.maxPayload });
  }

  close(): void {
    this.onClose();
  }
}

/** All topics over one connection, which is the event plane's own: a burst of events delays no acknowledgement of the request plane. */
export class NatsEventPlane implements EventPlane {
  readonly #publishers = new Set<NatsTopicPublisher>();
  #again: ReturnType<typeof setTimeout> | undefined;

  constructor(readonly link: NatsLink) {
    link.onReturn = () => {
      this.#interrupted();
      clearTimeout(this.#again);
      this.#again = setTimeout(() => this.#interrupted(), LISTENERS_RETURN_MS);
    };
  }

  #interrupted(): void {
    for (const publisher of this.#publishers) publisher.onInterruption();
  }

  async publisher(topic: string, endpoint: EndpointName): Promise<TopicPublisher> {
    const made: NatsTopicPublisher = new NatsTopicPublisher(topic, endpoint, this.link, () => this.#publishers.delete(made));
    this.#publishers.add(made);
    return made;
  }

  close(): Promise<void> {
    clearTimeout(this.#again);
    return this.link.close();
  }
}
