/**
 * MessagePack as Dynamo's planes use it: maps with string keys, arrays, nil, bool, integers, floats, str, bin.
 * 64-bit integers outside ±(2^53 - 1) are bigint on both sides.
 */

export class MsgpackError extends Error {
  override name = "MsgpackError";
}

const MAX_DEPTH = 64;
const text = new TextDecoder("utf-8", { fatal: true });

class Writer {
  #buffer = Buffer.allocUnsafe(256);
  #length = 0;

  #room(bytes: number): number {
    const at = this.#length;
    if (at + bytes > this.#buffer.length) {
      const next = Buffer.allocUnsafe(Math.max(at + bytes, this.#buffer.length * 2));
      this.#buffer.copy(next, 0, 0, at);
      this.#buffer = next;
    }
    this.#length = at + bytes;
    return at;
  }
  #byte(value: number): void {
    const at = this.#room(1);
    this.#buffer[at] = value;
  }
  /** A type byte and an unsigned big-endian number of 1, 2 or 4 bytes. */
  #sized(type: number, bytes: 1 | 2 | 4, value: number): void {
    const at = this.#room(1 + bytes);
    this.#buffer[at] = type;
    this.#buffer.writeUIntBE(value, at + 1, bytes);
  }

  value(value: unknown): void {
    if (value === null || value === undefined) return this.#byte(0xc0);
    switch (typeof value) {
      case "boolean":
        return this.#byte(value ? 0xc3 : 0xc2);
      case "number":
        return Number.isSafeInteger(value) && !Object.is(value, -0) ? this.#integer(value) : this.#float(value);
      case "bigint":
        return this.#big(value);
      case "string":
        return this.#string(value);
      case "object":
        if (value instanceof Uint8Array) return this.#bin(value);
        if (Array.isArray(value)) return this.#array(value);
        return this.#map(value as Record<string, unknown>);
      default:
        throw new MsgpackError(`a ${typeof value} has no MessagePack form`);
    }
  }
  #float(value: number): void {
    const at = this.#room(9);
    this.#buffer[at] = 0xcb;
    this.#buffer.writeDoubleBE(value, at + 1);
  }
  #integer(value: number): void {
    if (value >= 0) {
      if (value < 0x80) return this.#byte(value);
      if (value <= 0xff) return this.#sized(0xcc, 1, value);
      if (value <= 0xffff) return this.#sized(0xcd, 2, value);
      if (value <= 0xffffffff) return this.#sized(0xce, 4, value);
      return this.#big(BigInt(value));
    }
    if (value >= -32) return this.#byte(value & 0xff);
    if (value >= -0x80) return this.#sized(0xd0, 1, value & 0xff);
    if (value >= -0x8000) return this.#sized(0xd1, 2, value & 0xffff);
    if (value >= -0x80000000) return this.#sized(0xd2, 4, value >>> 0);
    return this.#big(BigInt(value));
  }
  #big(value: bigint): void {
    if (value >= BigInt(Number.MIN_SAFE_INTEGER) && value <= 0xffffffffn && (value >= 0n || value >= -0x80000000n)) return this.#integer(Number(value));
    const at = this.#room(9);
    if (value >= 0n) {
      if (value > 0xffffffffffffffffn) throw new MsgpackError(`${value} is larger than 64 bits`);
      this.#buffer[at] = 0xcf;
      this.#buffer.writeBigUInt64BE(value, at + 1);
    } else {
      if (value < -0x8000000000000000n) throw new MsgpackError(`${value} is larger than 64 bits`);
      this.#buffer[at] = 0xd3;
      this.#buffer.writeBigInt64BE(value, at + 1);
    }
  }
  #string(value: string): void {
    const bytes = Buffer.byteLength(value);
    if (bytes < 32) this.#byte(0xa0 | bytes);
    else if (bytes <= 0xff) this.#sized(0xd9, 1, bytes);
    else if (bytes <= 0xffff) this.#sized(0xda, 2, bytes);
    else this.#sized(0xdb, 4, bytes);
    const at = this.#room(bytes);
    this.#buffer.write(value, at);
  }
  #bin(value: Uint8Array): void {
    if (value.length <= 0xff) this.#sized(0xc4, 1, value.length);
    else if (value.length <= 0xffff) this.#sized(0xc5, 2, value.length);
    else this.#sized(0xc6, 4, value.length);
    const at = this.#room(value.length);
    this.#buffer.set(value, at);
  }
  #array(value: readonly unknown[]): void {
    if (value.length < 16) this.#byte(0x90 | value.length);
    else if (value.length <= 0xffff) this.#sized(0xdc, 2, value.length);
    else this.#sized(0xdd, 4, value.length);
    for (const item of value) this.value(item);
  }
  #map(value: Record<string, unknown>): void {
    const entries = Object.entries(value).filter(([, item]) => item !== undefined);
    if (entries.length < 16) this.#byte(0x80 | entries.length);
    else if (entries.length <= 0xffff) this.#sized(0xde, 2, entries.length);
    else this.#sized(0xdf, 4, entries.length);
    for (const [key, item] of entries) {
      this.#string(key);
      this.value(item);
    }
  }
  done(): Buffer {
    return this.#buffer.subarray(0, this.#length);
  }
}

/** Keys whose value is undefined are left out. @throws MsgpackError for what has no form */
export function encodeMsgpack(value: unknown): Buffer {
  const writer = new Writer();
  writer.value(value);
  return writer.done();
}

class Reader {
  #at = 0;
  constructor(readonly bytes: Buffer) {}

  get rest(): number {
    return this.bytes.length - this.#at;
  }
  #take(bytes: number): number {
    if (bytes > this.rest) throw new MsgpackError(`cut off at byte ${this.#at}: ${bytes} more expected, ${this.rest} there`);
    const at = this.#at;
    this.#at += bytes;
    return at;
  }
  #unsigned(bytes: 1 | 2 | 4): number {
    return this.bytes.readUIntBE(this.#take(bytes), bytes);
  }
  #string(bytes: number): string {
    const at = this.#take(bytes);
    return text.decode(this.bytes.subarray(at, at + bytes));
  }
  #bin(bytes: number): Uint8Array {
    const at = this.#take(bytes);
    return this.bytes.subarray(at, at + bytes);
  }
  /** A claimed count is checked against the bytes that are left, so it never sizes an allocation. */
  #count(count: number, least: number): number {
    if (count * least > this.rest) throw new MsgpackError(`${count} items claimed, ${this.rest} bytes left`);
    return count;
  }
  #array(count: number, depth: number): unknown[] {
    const out: unknown[] = [];
    for (let i = this.#count(count, 1); i > 0; i--) out.push(this.value(depth + 1));
    return out;
  }
  #map(count: number, depth: number): Record<string, unknown> {
    const out: [string, unknown][] = [];
    for (let i = this.#count(count, 2); i > 0; i--) {
      const key = this.value(depth + 1);
      if (typeof key !== "string") throw new MsgpackError(`map key of type ${typeof key}, expected a string`);
      out.push([key, this.value(depth + 1)]);
    }
    return Object.fromEntries(out);
  }
  #exact(value: bigint): number | bigint {
    return value >= BigInt(Number.MIN_SAFE_INTEGER) && value <= BigInt(Number.MAX_SAFE_INTEGER) ? Number(value) : value;
  }

  value(depth = 0): unknown {
    if (depth > MAX_DEPTH) throw new MsgpackError(`nested deeper than ${MAX_DEPTH}`);
    const type = this.bytes[this.#take(1)]!;
    if (type < 0x80) return type;
    if (type < 0x90) return this.#map(type & 15, depth);
    if (type < 0xa0) return this.#array(type & 15, depth);
    if (type < 0xc0) return this.#string(type & 31);
    if (type >= 0xe0) return type - 256;
    switch (type) {
      case 0xc0:
        return null;
      case 0xc2:
        return false;
      case 0xc3:
        return true;
      case 0xc4:
        return this.#bin(this.#unsigned(1));
      case 0xc5:
        return this.#bin(this.#unsigned(2));
      case 0xc6:
        return this.#bin(this.#unsigned(4));
      case 0xca:
        return this.bytes.readFloatBE(this.#take(4));
      case 0xcb:
        return this.bytes.readDoubleBE(this.#take(8));
      case 0xcc:
        return this.#unsigned(1);
      case 0xcd:
        return this.#unsigned(2);
      case 0xce:
        return this.#unsigned(4);
      case 0xcf:
        return this.#exact(this.bytes.readBigUInt64BE(this.#take(8)));
      case 0xd0:
        return this.bytes.readInt8(this.#take(1));
      case 0xd1:
        return this.bytes.readInt16BE(this.#take(2));
      case 0xd2:
        return this.bytes.readInt32BE(this.#take(4));
      case 0xd3:
        return this.#exact(this.bytes.readBigInt64BE(this.#take(8)));
      case 0xd9:
        return this.#string(this.#unsigned(1));
      case 0xda:
        return this.#string(this.#unsigned(2));
      case 0xdb:
        return this.#string(this.#unsigned(4));
      case 0xdc:
        return this.#array(this.#unsigned(2), depth);
      case 0xdd:
        return this.#array(this.#unsigned(4), depth);
      case 0xde:
        return this.#map(this.#unsigned(2), depth);
      case 0xdf:
        return this.#map(this.#unsigned(4), depth);
      default:
        throw new MsgpackError(`type byte 0x${type.toString(16)} is not used here`);
    }
  }
}

/** @throws MsgpackError, TypeError for text that is not UTF-8 */
export function decodeMsgpack(bytes: Uint8Array): unknown {
  const reader = new Reader(Buffer.from(bytes.buffer, bytes.byteOffset, bytes.byteLength));
  const value = reader.value();
  if (reader.rest > 0) throw new MsgpackError(`${reader.rest} bytes after the value`);
  return value;
}
