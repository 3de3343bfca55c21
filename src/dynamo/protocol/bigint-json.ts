/** JSON with exact 64-bit integers: ids on the wire are bare numbers that exceed 2^53. */

/** Source-text access of JSON.parse and JSON.rawJSON, which the type library does not list yet. */
type Reviver = (this: unknown, key: string, value: unknown, context: { source?: string }) => unknown;
const raw = (JSON as unknown as { rawJSON(text: string): unknown }).rawJSON;

/** Shortest run of digits that may leave the range of exact doubles. */
const LONG_INTEGER = /\d{16,}/;
const INTEGER = /^-?\d+$/;

const revive: Reviver = (_key, value, { source }) =>
  typeof value === "number" && !Number.isSafeInteger(value) && source !== undefined && INTEGER.test(source) ? BigInt(source) : value;

/**
 * Parses JSON; integers outside ±(2^53 - 1) become bigint, everything else is as JSON.parse gives it.
 * @throws SyntaxError
 */
export function parseJson(text: string): unknown {
  return LONG_INTEGER.test(text) ? JSON.parse(text, revive as (key: string, value: unknown) => unknown) : JSON.parse(text);
}

const plain = (_key: string, value: unknown): unknown => (typeof value === "bigint" ? raw(value.toString()) : value);

/** Writes bigint as a bare number. */
export function stringifyJson(value: unknown): string {
  return JSON.stringify(value, plain);
}
