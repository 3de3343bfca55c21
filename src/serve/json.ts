import { badRequest, HttpError } from "./http-errors.ts";

/** Levels of nesting that a body may have; far above any real request, far below what a parser's stack stands. */
const MAX_DEPTH = 128;

export interface JsonBody {
  fields: Record<string, unknown>;
  /** The text behind the fields, for numbers that a double cannot hold. */
  text: string;
}

/** Bytes that are no JSON make it doubtful where the next request on this connection would start, so it is closed. */
const malformed = (problem: string): HttpError => new HttpError(400, "invalid_request_error", problem, { headers: { connection: "close" } });

const QUOTE = 0x22;
const BACKSLASH = 0x5c;

/**
 * Parses a request body that must be one JSON object.
 * Refused with 400 before the parser sees them: no body, bytes that are not UTF-8, nesting beyond MAX_DEPTH,
 * an object with the same key twice (which of the two is meant differs from reader to reader).
 */
export function parseJsonObject(bytes: Uint8Array): JsonBody {
  if (bytes.length === 0) throw badRequest("the request has no body; expected a JSON object");
  let text: string;
  try {
    text = new TextDecoder("utf-8", { fatal: true }).decode(bytes);
  } catch {
    throw malformed("the body is not valid UTF-8");
  }
  checkStructure(bytes);
  let value: unknown;
  try {
    value = JSON.parse(text);
  } catch (error) {
    throw malformed(`the body is not valid JSON: ${(error as Error).message.replace(/^JSON Parse error: /, "").slice(0, 200)}`);
  }
  if (typeof value !== "object" || value === null || Array.isArray(value))
    throw badRequest(`the body must be a JSON object, got ${value === null ? "null" : Array.isArray(value) ? "an array" : `a ${typeof value}`}`);
  return { fields: value as Record<string, unknown>, text };
}

/** One pass over the bytes, strings skipped at memory speed. Grammar is the parser's business, depth and keys are ours. */
function checkStructure(bytes: Uint8Array): void {
  /** Per open bracket: the keys seen so far (an object) or null (an array). */
  const open: (Set<string> | null)[] = [];
  for (let at = 0; at < bytes.length; at++) {
    const byte = bytes[at];
    if (byte === QUOTE) {
      const end = stringEnd(bytes, at);
      if (end < 0) return;
      const keys = open.at(-1);
      if (keys && nextIsColon(bytes, end + 1)) {
        const key = keyText(bytes.subarray(at, end + 1));
        if (keys.has(key)) throw badRequest(`the body has the key ${JSON.stringify(key.slice(0, 64))} twice in one object`);
        keys.add(key);
      }
      at = end;
    } else if (byte === 0x7b || byte === 0x5b) {
      if (open.length === MAX_DEPTH) throw malformed(`the body is nested more than ${MAX_DEPTH} levels deep`);
      open.push(byte === 0x7b ? new Set() : null);
    } else if (byte === 0x7d || byte === 0x5d) {
      open.pop();
    }
  }
}

/** Index of the quote that closes the string opened at `start`; -1 when it never closes. */
function stringEnd(bytes: Uint8Array, start: number): number {
  for (let quote = bytes.indexOf(QUOTE, start + 1); quote >= 0; quote = bytes.indexOf(QUOTE, quote + 1)) {
    let slashes = 0;
    while (bytes[quote - 1 - slashes] === BACKSLASH && quote - 1 - slashes > start) slashes++;
    if (slashes % 2 === 0) return quote;
  }
  return -1;
}

function nextIsColon(bytes: Uint8Array, from: number): boolean {
  let at = from;
  while (bytes[at] === 0x20 || bytes[at] === 0x0a || bytes[at] === 0x0d || bytes[at] === 0x09) at++;
  return bytes[at] === 0x3a;
}

/** The key with escapes resolved, so that "a" and "\u0061" are the same; raw when the escape itself is broken. */
function keyText(quoted: Uint8Array): string {
  const raw = new TextDecoder().decode(quoted);
  if (!raw.includes("\\")) return raw.slice(1, -1);
  try {
    return JSON.parse(raw) as string;
  } catch {
    return raw;
  }
}

/** The digits of a top-level integer that JSON.parse rounded; null when the field is no plain integer there. */
export function exactInteger(body: JsonBody, field: string): bigint | null {
  const sources = new Map<unknown, string>();
  const root: unknown = JSON.parse(body.text, function (this: unknown, key: string, value: unknown, context?: { source?: string }) {
    // `this` is the object that holds the field, so that a nested field of the same name is not taken for it.
    if (key === field && context?.source !== undefined) sources.set(this, context.source);
    return value;
  } as (key: string, value: unknown) => unknown);
  const source = sources.get(root);
  return source !== undefined && /^-?\d+$/.test(source) ? BigInt(source) : null;
}
