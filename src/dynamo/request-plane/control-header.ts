import { parseJson } from "../protocol/bigint-json.ts";
import { shown } from "../protocol/errors.ts";
import { payloadCodec, type PayloadCodec } from "../protocol/codec.ts";

/** Where the frontend waits for the answer. */
export interface ResponseTarget {
  host: string;
  port: number;
  subject: string;
}

/** First part of a request: who asks, how the body is encoded, where the answer goes. */
export interface ControlHeader {
  id: string;
  codec: PayloadCodec;
  target: ResponseTarget;
  metadata: Record<string, unknown>;
}

export class ControlHeaderError extends Error {
  override name = "ControlHeaderError";
}

type Fields = Record<string, unknown>;
const utf8 = new TextDecoder("utf-8", { fatal: true });

function object(value: unknown, what: string): Fields {
  if (typeof value !== "object" || value === null || Array.isArray(value)) throw new ControlHeaderError(`${what}: expected an object`);
  return value as Fields;
}
function string(fields: Fields, key: string, what: string): string {
  const value = fields[key];
  if (typeof value !== "string" || value === "") throw new ControlHeaderError(`${what}.${key}: expected a string`);
  return value;
}
function json(text: string, what: string): unknown {
  try {
    return parseJson(text);
  } catch {
    throw new ControlHeaderError(`${what}: not JSON`);
  }
}

/** "10.0.0.7:9345", "[::1]:9345", "::1:9345": the port stands behind the last colon. @throws ControlHeaderError */
export function parseAddress(address: string): { host: string; port: number } {
  const colon = address.lastIndexOf(":");
  const host = address.slice(0, Math.max(0, colon)).replace(/^\[(.*)\]$/, "$1");
  const digits = address.slice(colon + 1);
  const port = /^\d{1,5}$/.test(digits) ? Number(digits) : 0;
  if (host === "" || port < 1 || port > 65535) throw new ControlHeaderError(`connection_info.address: expected host:port, got "${address.slice(0, 80)}"`);
  return { host, port };
}

/** @throws ControlHeaderError */
export function parseControlHeader(bytes: Uint8Array): ControlHeader {
  let text: string;
  try {
    text = utf8.decode(bytes);
  } catch {
    throw new ControlHeaderError("control header: not UTF-8");
  }
  const control = object(json(text, "control header"), "control header");
  const requestType = control.request_type ?? "single_in";
  if (requestType !== "single_in") throw new ControlHeaderError(`request_type: expected single_in, got ${shown(requestType)}`);
  const codecName = control.payload_codec ?? undefined;
  const codec = typeof codecName === "string" || codecName === undefined ? payloadCodec(codecName) : null;
  if (!codec) throw new ControlHeaderError(`payload_codec: expected json or msgpack, got ${shown(codecName)}`);
  const connection = object(control.connection_info, "connection_info");
  if (connection.transport !== "tcp_server") throw new ControlHeaderError(`connection_info.transport: expected tcp_server, got ${shown(connection.transport)}`);
  const info = object(json(string(connection, "info", "connection_info"), "connection_info.info"), "connection_info.info");
  const metadata = control.metadata;
  return {
    id: string(control, "id", "control header"),
    codec,
    target: { ...parseAddress(string(info, "address", "connection_info.info")), subject: string(info, "subject", "connection_info.info") },
    metadata: typeof metadata === "object" && metadata !== null && !Array.isArray(metadata) ? (metadata as Fields) : {},
  };
}
