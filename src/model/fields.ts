import { describe, type JsonObject } from "./files.ts";
import { ModelError } from "./types.ts";

/** Typed reads from a parsed object (config.json, GGUF metadata). null counts as absent. A wrong type or range is a ModelError naming file and key. */
export class Fields {
  constructor(
    readonly file: string,
    private readonly values: JsonObject,
    /** Prepended to keys, for look-up and in messages: "llama." in GGUF metadata. */
    private readonly prefix = "",
    /** Prepended in messages only: "rope_parameters." for a nested object. */
    private readonly path = "",
  ) {}

  isEmpty(): boolean {
    return Object.keys(this.values).length === 0;
  }

  raw(key: string): unknown {
    const full = this.prefix + key;
    return Object.hasOwn(this.values, full) ? (this.values[full] ?? undefined) : undefined;
  }

  has(key: string): boolean {
    return this.raw(key) !== undefined;
  }

  /** True for an explicit null, which some configurations mean differently from an absent key. */
  isNull(key: string): boolean {
    return Object.hasOwn(this.values, this.prefix + key) && this.values[this.prefix + key] === null;
  }

  fail(key: string, problem: string): ModelError {
    return new ModelError(this.file, this.path + this.prefix + key, problem);
  }

  private wrong(key: string, expected: string): ModelError {
    return this.fail(key, `expected ${expected}, found ${describe(this.raw(key))}`);
  }

  /** A whole number in [min, max]; fallback when absent; an error when absent without fallback. */
  int(key: string, min: number, max: number, fallback?: number): number {
    const value = this.raw(key);
    if (value === undefined && fallback !== undefined) return fallback;
    if (typeof value !== "number" || !Number.isInteger(value) || value < min || value > max)
      throw this.wrong(key, `a whole number from ${min} to ${max}`);
    return value;
  }

  optionalInt(key: string, min: number, max: number): number | null {
    return this.has(key) ? this.int(key, min, max) : null;
  }

  /** A finite number in [min, max]. */
  number(key: string, min: number, max: number, fallback?: number): number {
    const value = this.raw(key);
    if (value === undefined && fallback !== undefined) return fallback;
    if (typeof value !== "number" || !Number.isFinite(value) || value < min || value > max)
      throw this.wrong(key, `a number from ${min} to ${max}`);
    return value;
  }

  optionalNumber(key: string, min: number, max: number): number | null {
    return this.has(key) ? this.number(key, min, max) : null;
  }

  bool(key: string, fallback: boolean): boolean {
    const value = this.raw(key);
    if (value === undefined) return fallback;
    if (typeof value !== "boolean") throw this.wrong(key, "true or false");
    return value;
  }

  string(key: string): string | null {
    const value = this.raw(key);
    if (value === undefined) return null;
    if (typeof value !== "string") throw this.wrong(key, "a string");
    return value;
  }

  object(key: string): Fields | null {
    const value = this.raw(key);
    if (value === undefined) return null;
    if (typeof value !== "object" || Array.isArray(value)) throw this.wrong(key, "an object");
    return new Fields(this.file, value as JsonObject, "", `${this.path}${this.prefix}${key}.`);
  }

  strings(key: string): string[] | null {
    const value = this.raw(key);
    if (value === undefined) return null;
    if (!Array.isArray(value) || !value.every((item) => typeof item === "string")) throw this.wrong(key, "a list of strings");
    return value;
  }

  /** One id or a list of ids, each in [0, vocab). */
  tokenIds(key: string, vocab: number): number[] | null {
    const value = this.raw(key);
    if (value === undefined) return null;
    const list: unknown[] = Array.isArray(value) ? value : [value];
    for (const id of list)
      if (typeof id !== "number" || !Number.isInteger(id) || id < 0 || id >= vocab) throw this.wrong(key, `token ids below ${vocab}`);
    return [...new Set(list as number[])];
  }
}
