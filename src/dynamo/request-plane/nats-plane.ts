import type { Msg } from "@nats-io/transport-node";
import { logger } from "../../telemetry/log.ts";
import { type EndpointName, hexId, type Transport } from "../discovery/records.ts";
import type { NatsLink } from "../nats/link.ts";
import { type Dial, dispatch } from "./dispatch.ts";
import { FrameError } from "./frame-codec.ts";
import type { Endpoint, RequestPlane } from "./request-plane.ts";

/** Queue group of the reference: of several subscribers one gets a request. */
const QUEUE = "q";
const EMPTY = Buffer.alloc(0);

const log = logger("layerscale::dynamo::request_plane");

/** Where an instance is called: "<namespace>_<component>.<endpoint>-<id hex>". */
export const instanceSubject = (name: EndpointName, instanceId: bigint): string => `${name.namespace}_${name.component}.${name.endpoint}-${hexId(instanceId)}`;

function headersOf(message: Msg): Record<string, string> {
  const out: Record<string, string> = {};
  for (const key of message.headers?.keys() ?? []) out[key] = message.headers!.get(key);
  return out;
}

/** Requests as messages of one subject per instance; the acknowledgement is the reply, empty when taken. Core NATS, nothing is stored. */
export class NatsRequestPlane implements RequestPlane {
  readonly #subscriptions = new Map<string, () => Promise<void>>();

  constructor(
    readonly link: NatsLink,
    readonly host: string,
    readonly dial: Dial,
  ) {}

  transport(name: EndpointName, instanceId: bigint): Transport {
    return { nats_tcp: instanceSubject(name, instanceId) };
  }

  async register(name: EndpointName, instanceId: bigint, endpoint: Endpoint): Promise<void> {
    const subject = instanceSubject(name, instanceId);
    this.#subscriptions.set(subject, await this.link.subscribe(subject, QUEUE, (message) => this.#accept(message, subject, endpoint)));
  }

  async unregister(name: EndpointName, instanceId: bigint): Promise<void> {
    const subject = instanceSubject(name, instanceId);
    const stop = this.#subscriptions.get(subject);
    this.#subscriptions.delete(subject);
    await stop?.();
  }

  close(): Promise<void> {
    return this.link.close();
  }

  #accept(message: Msg, subject: string, endpoint: Endpoint): void {
    let ack: string;
    try {
      const payload = Buffer.from(message.data.buffer, message.data.byteOffset, message.data.length);
      ack = dispatch({ path: subject, headers: headersOf(message), payload }, endpoint, this.dial);
    } catch (error) {
      log[error instanceof FrameError ? "warn" : "error"]("request not accepted: no two-part message", { subject, error });
      ack = `Server unavailable: malformed request: ${(error as Error).message}`;
    }
    if (message.reply !== undefined && message.reply !== "") this.link.publish(message.reply, ack === "" ? EMPTY : Buffer.from(ack));
  }
}
