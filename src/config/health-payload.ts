import { readFileSync, statSync } from "node:fs";
import type { UsageError } from "./flags.ts";

const MAX_BYTES = 1 << 20;

/** A health check's request: a JSON object as text, or @FILE that holds one. */
export function readPayload(value: string, fail: (expected: string) => UsageError): Readonly<Record<string, unknown>> {
  const text = value.startsWith("@") ? readText(value.slice(1), fail) : value;
  let payload: unknown;
  try {
    payload = JSON.parse(text);
  } catch (error) {
    throw fail(`a JSON object or @FILE (${(error as Error).message})`);
  }
  if (typeof payload !== "object" || payload === null || Array.isArray(payload)) throw fail("a JSON object or @FILE");
  return payload as Record<string, unknown>;
}

function readText(path: string, fail: (expected: string) => UsageError): string {
  try {
    const { size, isFile } = regular(path);
    if (!isFile) throw fail("a regular file behind @");
    if (size > MAX_BYTES) throw fail(`a file of at most ${MAX_BYTES} bytes behind @`);
    return readFileSync(path, "utf8");
  } catch (error) {
    if ((error as Error).name === "UsageError") throw error;
    throw fail(`a readable file behind @ (${(error as Error).message})`);
  }
}

/** Looked at before it is opened: a fifo would wait for a writer. */
function regular(path: string): { size: number; isFile: boolean } {
  const stat = statSync(path);
  return { size: stat.size, isFile: stat.isFile() };
}
