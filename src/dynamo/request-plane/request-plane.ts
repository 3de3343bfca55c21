import type { EndpointName, Transport } from "../discovery/records.ts";
import type { ControlHeader } from "./control-header.ts";
import type { ResponseStream } from "./response-stream.ts";

/** A request that was acknowledged. */
export interface IncomingRequest {
  control: ControlHeader;
  headers: Record<string, string>;
  /** Encoded as control.codec says. */
  body: Buffer;
  /** Bytes of the two-part message. */
  bytes: number;
  /** performance.now() when its last byte arrived. */
  receivedAt: number;
  /** Dials the frontend and opens the answer, within a bounded time. @throws Error when the frontend cannot be reached */
  answer(): Promise<ResponseStream>;
}

/** Either takes the request, or says why not now; must not throw and not wait. */
export type Endpoint = (request: IncomingRequest) => { refused: string } | void;

/** How requests reach this process. Answers always travel on a TCP connection that the worker dials. */
export interface RequestPlane {
  /** IP literal that listeners of this process bind and advertise. */
  readonly host: string;
  /** What the record of an instance advertises. */
  transport(name: EndpointName, instanceId: bigint): Transport;
  /** Requests are served when this resolves, so the record may be written. One plane serves any number of endpoints and identities. */
  register(name: EndpointName, instanceId: bigint, endpoint: Endpoint): Promise<void>;
  unregister(name: EndpointName, instanceId: bigint): Promise<void>;
  /** Takes no further request. Answers in work are not touched. */
  close(): Promise<void>;
}

/** A plane that cannot be opened as configured, in one line for people. */
export class PlaneError extends Error {
  override name = "PlaneError";
}
