import { parseJson } from "../protocol/bigint-json.ts";
import { ByteQueue } from "./byte-queue.ts";

/** One request as it travels to a worker: u16 path | u16 headers (JSON, string to string) | u32 payload, lengths big-endian. */
export interface RequestFrame {
  path: string;
  headers: Record<string, string>;
  /** One two-part message. */
  payload: Buffer;
}

/** The peer does not speak this protocol; the connection cannot be used further. */
export class FrameError extends Error {
  override name = "FrameError";
}

const utf8 = new TextDecoder("utf-8", { fatal: true });
/** "<id hex>/<endpoint>" is far shorter; other protocols' first bytes read as a longer path. */
const MAX_PATH_BYTES = 4096;

function readHeaders(bytes: Uint8Array): Record<string, string> {
  if (bytes.length === 0) return {};
  let value: unknown;
  try {
    value = parseJson(utf8.decode(bytes));
  } catch {
    throw new FrameError(`headers of ${bytes.length} bytes are not JSON`);
  }
  if (typeof value !== "object" || value === null || Array.isArray(value)) throw new FrameError("headers are not a JSON object");
  return Object.fromEntries(Object.entries(value).filter((entry): entry is [string, string] => typeof entry[1] === "string"));
}

/** Pure: bytes in, frames out, whatever the chunk borders. A frame larger than the limit is refused as soon as its lengths are there. */
export class FrameDecoder {
  readonly #queue = new ByteQueue();
  constructor(readonly maxFrameBytes: number) {}

  /** Bytes of a frame that is not complete. */
  get pending(): number {
    return this.#queue.length;
  }

  /** @throws FrameError; the decoder must not be used afterwards */
  push(chunk: Uint8Array): RequestFrame[] {
    this.#queue.append(chunk);
    const frames: RequestFrame[] = [];
    for (let frame = this.#next(); frame !== null; frame = this.#next()) frames.push(frame);
    return frames;
  }

  #limit(bytes: number): void {
    if (bytes > this.maxFrameBytes) throw new FrameError(`frame of ${bytes} bytes is larger than DYN_TCP_MAX_MESSAGE_SIZE = ${this.maxFrameBytes}`);
  }

  #next(): RequestFrame | null {
    const bytes = this.#queue.peek();
    if (bytes.length < 2) return null;
    const pathBytes = bytes.readUInt16BE(0);
    if (pathBytes === 0 || pathBytes > MAX_PATH_BYTES) throw new FrameError(`path of ${pathBytes} bytes, expected 1 to ${MAX_PATH_BYTES}`);
    this.#limit(8 + pathBytes);
    const headersAt = 2 + pathBytes + 2;
    if (bytes.length < headersAt) return null;
    const headersBytes = bytes.readUInt16BE(2 + pathBytes);
    this.#limit(8 + pathBytes + headersBytes);
    const payloadAt = headersAt + headersBytes + 4;
    if (bytes.length < payloadAt) return null;
    const payloadBytes = bytes.readUInt32BE(headersAt + headersBytes);
    this.#limit(payloadAt + payloadBytes);
    if (bytes.length < payloadAt + payloadBytes) return null;
    let path: string;
    try {
      path = utf8.decode(bytes.subarray(2, 2 + pathBytes));
    } catch {
      throw new FrameError(`path of ${pathBytes} bytes is not UTF-8`);
    }
    const headers = readHeaders(bytes.subarray(headersAt, headersAt + headersBytes));
    const payload = bytes.subarray(payloadAt, payloadAt + payloadBytes);
    this.#queue.consume(payloadAt + payloadBytes);
    return { path, headers, payload };
  }
}

/** Answer to one frame, matched by order alone. Empty = accepted. */
export function encodeAck(text: string): Buffer {
  const bytes = Buffer.byteLength(text);
  const out = Buffer.allocUnsafe(4 + bytes);
  out.writeUInt32BE(bytes, 0);
  out.write(text, 4);
  return out;
}

/** For clients of a worker: tests and tools. */
export function encodeFrame(frame: { path: string; headers: Record<string, string>; payload: Uint8Array }): Buffer {
  const path = Buffer.from(frame.path);
  const headers = Buffer.from(JSON.stringify(frame.headers));
  const out = Buffer.allocUnsafe(8 + path.length + headers.length + frame.payload.length);
  let at = out.writeUInt16BE(path.length, 0);
  at += path.copy(out, at);
  at = out.writeUInt16BE(headers.length, at);
  at += headers.copy(out, at);
  at = out.writeUInt32BE(frame.payload.length, at);
  out.set(frame.payload, at);
  return out;
}
