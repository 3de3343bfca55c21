import { ByteQueue } from "./byte-queue.ts";
import { FrameError } from "./frame-codec.ts";

/** u64 header length | u64 data length | u64 checksum (0, never checked) | header | data, big-endian. */
export interface TwoPart {
  header: Buffer;
  data: Buffer;
}

export const PREFIX_BYTES = 24;

/** Lengths of the next message, refused when together they exceed the limit. */
function lengths(bytes: Buffer, most: number): { header: number; data: number } {
  // The upper halves must be zero, so nothing here leaves the range of exact doubles.
  const header = bytes.readUInt32BE(0) === 0 ? bytes.readUInt32BE(4) : Infinity;
  const data = bytes.readUInt32BE(8) === 0 ? bytes.readUInt32BE(12) : Infinity;
  if (PREFIX_BYTES + header + data > most) throw new FrameError(`message of ${header} + ${data} bytes exceeds ${most}`);
  return { header, data };
}

/** A buffer that holds exactly one message. @throws FrameError */
export function decodeTwoPart(bytes: Buffer): TwoPart {
  if (bytes.length < PREFIX_BYTES) throw new FrameError(`message of ${bytes.length} bytes, shorter than its prefix of ${PREFIX_BYTES}`);
  const { header, data } = lengths(bytes, bytes.length);
  if (PREFIX_BYTES + header + data !== bytes.length) throw new FrameError(`message of ${bytes.length} bytes announces ${header} + ${data}`);
  return { header: bytes.subarray(PREFIX_BYTES, PREFIX_BYTES + header), data: bytes.subarray(PREFIX_BYTES + header) };
}

export function encodeTwoPart(header: Uint8Array | null, data: Uint8Array | null): Buffer {
  const headerBytes = header?.length ?? 0;
  const dataBytes = data?.length ?? 0;
  const out = Buffer.allocUnsafe(PREFIX_BYTES + headerBytes + dataBytes);
  out.fill(0, 0, PREFIX_BYTES);
  out.writeUInt32BE(headerBytes, 4);
  out.writeUInt32BE(dataBytes, 12);
  if (header) out.set(header, PREFIX_BYTES);
  if (data) out.set(data, PREFIX_BYTES + headerBytes);
  return out;
}

/** Messages out of a byte stream, whatever the chunk borders. */
export class TwoPartDecoder {
  readonly #queue = new ByteQueue();
  constructor(readonly maxMessageBytes: number) {}

  /** @throws FrameError; the decoder must not be used afterwards */
  push(chunk: Uint8Array): TwoPart[] {
    this.#queue.append(chunk);
    const out: TwoPart[] = [];
    while (this.#queue.length >= PREFIX_BYTES) {
      const bytes = this.#queue.peek();
      const { header, data } = lengths(bytes, this.maxMessageBytes);
      const total = PREFIX_BYTES + header + data;
      if (bytes.length < total) break;
      out.push({ header: bytes.subarray(PREFIX_BYTES, PREFIX_BYTES + header), data: bytes.subarray(PREFIX_BYTES + header, total) });
      this.#queue.consume(total);
    }
    return out;
  }
}
