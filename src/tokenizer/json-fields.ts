import { TokenizerError } from "./errors.ts";

/** Typed access to tokenizer.json: its content is outside data, so every read is checked. */
export type Json = Record<string, unknown>;

export function isObject(value: unknown): value is Json {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

export function shown(value: unknown): string {
  const text = JSON.stringify(value) ?? String(value);
  return text.length > 80 ? text.slice(0, 77) + "..." : text;
}

export function fail(field: string, value: unknown, expected: string): never {
  throw new TokenizerError(`tokenizer.json: ${field} is ${shown(value)}, expected ${expected}`);
}

export function objectAt(parent: Json, key: string, field: string): Json {
  const value = parent[key];
  return isObject(value) ? value : fail(field, value, "an object");
}

export function arrayAt(parent: Json, key: string, field: string): unknown[] {
  const value = parent[key];
  return Array.isArray(value) ? value : fail(field, value, "an array");
}

/** A flag that may be absent or null. */
export function flagAt(parent: Json, key: string, fallback: boolean, field: string): boolean {
  const value = parent[key] ?? fallback;
  return typeof value === "boolean" ? value : fail(field, value, "true or false");
}

export function stringAt(parent: Json, key: string, field: string): string {
  const value = parent[key];
  return typeof value === "string" ? value : fail(field, value, "a string");
}

/** Largest id accepted: ids index arrays, so a hostile file must not be able to ask for a huge one. */
export const MAX_TOKEN_ID = (1 << 22) - 1;

export function tokenIdOf(value: unknown, field: string): number {
  if (typeof value !== "number" || !Number.isInteger(value) || value < 0 || value > MAX_TOKEN_ID)
    return fail(field, value, `an integer from 0 to ${MAX_TOKEN_ID}`);
  return value;
}
