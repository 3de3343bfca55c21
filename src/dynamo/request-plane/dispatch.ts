import { logger } from "../../telemetry/log.ts";
import { ControlHeaderError, parseControlHeader, type ResponseTarget } from "./control-header.ts";
import type { Endpoint } from "./request-plane.ts";
import type { ResponseStream } from "./response-stream.ts";
import { decodeTwoPart } from "./two-part.ts";

/** Opens the answer to a request. */
export type Dial = (target: ResponseTarget) => Promise<ResponseStream>;

export interface Delivery {
  /** As it was addressed, for the words of a refusal. */
  path: string;
  headers: Record<string, string>;
  /** One two-part message. */
  payload: Buffer;
  peer?: string;
}

const log = logger("layerscale::dynamo::request_plane");

/**
 * Hands one request to its endpoint.
 * @returns the acknowledgement: "" when it was taken
 * @throws FrameError when the payload is no two-part message
 */
export function dispatch(delivery: Delivery, endpoint: Endpoint | undefined, dial: Dial): string {
  const receivedAt = performance.now();
  const refusal = take(delivery, endpoint, dial, receivedAt);
  if (refusal === null) return "";
  log.warn("request not accepted", { reason: refusal, peer: delivery.peer });
  // Any other text counts as accepted and would leave the client waiting; this prefix fails fast.
  return `Server unavailable: ${refusal}`;
}

function take({ path, headers, payload }: Delivery, endpoint: Endpoint | undefined, dial: Dial, receivedAt: number): string | null {
  if (!endpoint) return `unknown endpoint ${path.slice(0, 200)}`;
  const { header, data } = decodeTwoPart(payload);
  try {
    const control = parseControlHeader(header);
    return endpoint({ control, headers, body: data, bytes: payload.length, receivedAt, answer: () => dial(control.target) })?.refused ?? null;
  } catch (error) {
    if (!(error instanceof ControlHeaderError)) throw error;
    return `malformed request: ${error.message}`;
  }
}
