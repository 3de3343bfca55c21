import { createHash, type Hash } from "node:crypto";
import type { OpenFile } from "./files.ts";
import { ModelError } from "./types.ts";

/** All of a header's bytes together; a vocabulary of 250,000 tokens with its merges has about 20 MB. */
const MAX_HEADER_BYTES = 48 << 20;
const WINDOW_BYTES = 256 << 10;

const strict = new TextDecoder("utf-8", { fatal: true });

/**
 * Little-endian reads that walk forward through a file behind a bounded window. Every read is checked against the file's end first, so a count
 * or length from the file never decides an allocation by itself. `field` names what is being read, for errors.
 */
export class GgufReader {
  field = "header";
  private window: Buffer = Buffer.alloc(0);
  /** File offset of window[0]. */
  private windowStart = 0;
  /** Position inside window. */
  private at = 0;
  private readonly hash: Hash = createHash("sha256");

  constructor(private readonly file: OpenFile) {}

  get position(): number {
    return this.windowStart + this.at;
  }

  /** Bytes from here to the end of the file. */
  get remaining(): number {
    return this.file.size - this.position;
  }

  fail(problem: string): ModelError {
    return new ModelError(this.file.path, this.field, problem);
  }

  /** Makes the next bytes available in the window and returns their start. May replace the window: call it before reading `window`. */
  private take(bytes: number): number {
    if (this.at + bytes > this.window.length) this.refill(bytes);
    const start = this.at;
    this.at += bytes;
    return start;
  }

  private refill(bytes: number): void {
    const position = this.position;
    if (bytes > this.remaining) throw this.fail(`takes ${bytes} bytes at byte ${position}, but the file ends at ${this.file.size}`);
    if (position + bytes > MAX_HEADER_BYTES) throw this.fail(`reaches byte ${position + bytes}, expected a header of at most ${MAX_HEADER_BYTES} bytes`);
    this.hash.update(this.window.subarray(0, this.at));
    const length = Math.min(Math.max(bytes, WINDOW_BYTES), this.remaining);
    this.window = this.file.read(position, length, this.field);
    this.windowStart = position;
    this.at = 0;
  }

  u8(): number {
    const at = this.take(1);
    return this.window.readUInt8(at);
  }
  i8(): number {
    const at = this.take(1);
    return this.window.readInt8(at);
  }
  u16(): number {
    const at = this.take(2);
    return this.window.readUInt16LE(at);
  }
  i16(): number {
    const at = this.take(2);
    return this.window.readInt16LE(at);
  }
  u32(): number {
    const at = this.take(4);
    return this.window.readUInt32LE(at);
  }
  i32(): number {
    const at = this.take(4);
    return this.window.readInt32LE(at);
  }
  f32(): number {
    const at = this.take(4);
    return this.window.readFloatLE(at);
  }
  f64(): number {
    const at = this.take(8);
    return this.window.readDoubleLE(at);
  }
  /** 64-bit values stay bigint unless a JS number holds them exactly. */
  u64(): number | bigint {
    const at = this.take(8);
    const high = this.window.readUInt32LE(at + 4);
    return high < 0x20_0000 ? high * 0x1_0000_0000 + this.window.readUInt32LE(at) : this.window.readBigUInt64LE(at);
  }
  i64(): number | bigint {
    const at = this.take(8);
    const value = this.window.readBigInt64LE(at);
    return value >= BigInt(Number.MIN_SAFE_INTEGER) && value <= BigInt(Number.MAX_SAFE_INTEGER) ? Number(value) : value;
  }

  /** A count of things that take at least minBytes each: refused when the rest of the file cannot hold them. */
  count(what: string, minBytes: number, max: number): number {
    const value = this.u64();
    const fits = Math.floor(this.remaining / minBytes);
    if (typeof value === "bigint" || value > fits) throw this.fail(`${what} ${value}, but the rest of the file holds at most ${fits}`);
    if (value > max) throw this.fail(`${what} ${value}, expected at most ${max}`);
    return value;
  }

  /** A length-prefixed string of at most maxBytes. */
  string(maxBytes: number, lenient = false): string {
    const length = this.count("a string of length", 1, maxBytes);
    const start = this.take(length);
    const text = this.window.toString("utf8", start, start + length);
    // A replacement character is either the file's own or stands for bytes that are not UTF-8: only then look closer.
    if (!lenient && text.includes("\ufffd")) this.checkUtf8(start, length);
    return text;
  }

  private checkUtf8(start: number, length: number): void {
    try {
      strict.decode(this.window.subarray(start, start + length));
    } catch {
      throw this.fail("not valid UTF-8");
    }
  }

  /** SHA-256 of everything read so far, hex. Ends the use of this reader's hash. */
  digest(): string {
    this.hash.update(this.window.subarray(0, this.at));
    return this.hash.digest("hex");
  }
}
