import { closeSync, fstatSync, openSync, readSync, statSync } from "node:fs";
import { ModelError } from "./types.ts";

/** Words for a failed system call, without the stack. */
export function reason(error: unknown): string {
  return error instanceof Error ? error.message : String(error);
}

/** True when path names a regular file (links followed). Anything else, an unreadable parent included, is false. */
export function isFile(path: string): boolean {
  try {
    return statSync(path).isFile();
  } catch {
    return false;
  }
}

/** "missing", or what stands in its place: a fifo or a directory is there, and still no file. */
export function whyNoFile(path: string): string {
  try {
    const found = statSync(path);
    const kind = found.isDirectory() ? "a directory" : found.isFIFO() ? "a fifo" : found.isSocket() ? "a socket" : "a device";
    return `${kind}, expected a regular file`;
  } catch (error) {
    return (error as NodeJS.ErrnoException).code === "ENOENT" ? "missing" : `cannot be opened: ${reason(error)}`;
  }
}

/** A file held open for bounded reads. Close it. */
export class OpenFile {
  private constructor(
    readonly path: string,
    private readonly fd: number,
    readonly size: number,
  ) {}

  /** @throws ModelError when path is absent, unreadable or not a regular file (a FIFO would block the read). */
  static open(path: string): OpenFile {
    let fd: number;
    try {
      if (!statSync(path).isFile()) throw new ModelError(path, "", "not a regular file");
      fd = openSync(path, "r");
    } catch (error) {
      if (error instanceof ModelError) throw error;
      throw new ModelError(path, "", `cannot be opened: ${reason(error)}`);
    }
    return new OpenFile(path, fd, fstatSync(fd).size);
  }

  /** Exactly length bytes from offset. The caller has bounded length; a range beyond the file is an error that names field. */
  read(offset: number, length: number, field: string): Buffer {
    const out = Buffer.allocUnsafe(length);
    this.readInto(out, offset, field);
    return out;
  }

  readInto(out: Uint8Array, offset: number, field: string): void {
    if (offset + out.length > this.size)
      throw new ModelError(this.path, field, `bytes ${offset}..${offset + out.length} lie beyond the end of the file (${this.size} bytes)`);
    let done = 0;
    while (done < out.length) {
      let count: number;
      try {
        count = readSync(this.fd, out, done, out.length - done, offset + done);
      } catch (error) {
        throw new ModelError(this.path, field, `cannot be read: ${reason(error)}`);
      }
      if (count === 0) throw new ModelError(this.path, field, `the file shrank while it was read (${this.size} bytes at first)`);
      done += count;
    }
  }

  close(): void {
    closeSync(this.fd);
  }
}

export type JsonObject = Record<string, unknown>;

export function isObject(value: unknown): value is JsonObject {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

const utf8 = new TextDecoder("utf-8", { fatal: true });

/** Parses bytes as a JSON object. field names where the text stands. */
export function parseJsonObject(bytes: Uint8Array, path: string, field: string): { text: string; value: JsonObject } {
  let text: string;
  try {
    text = utf8.decode(bytes);
  } catch {
    throw new ModelError(path, field, "not valid UTF-8");
  }
  let value: unknown;
  try {
    value = JSON.parse(text);
  } catch (error) {
    throw new ModelError(path, field, `not valid JSON: ${reason(error)}`);
  }
  if (!isObject(value)) throw new ModelError(path, field, `expected a JSON object, found ${describe(value)}`);
  return { text, value };
}

/** Reads a JSON object from a file of at most maxBytes. */
export function readJsonFile(path: string, maxBytes: number): JsonObject {
  const file = OpenFile.open(path);
  try {
    if (file.size > maxBytes) throw new ModelError(path, "", `${file.size} bytes, expected at most ${maxBytes}`);
    return parseJsonObject(file.read(0, file.size, ""), path, "").value;
  } finally {
    file.close();
  }
}

/** A value from outside, short enough for an error line. */
export function describe(value: unknown): string {
  if (value === undefined) return "nothing";
  let text: string;
  try {
    text = JSON.stringify(value) ?? String(value);
  } catch {
    text = String(value);
  }
  return text.length > 80 ? `${text.slice(0, 77)}...` : text;
}
