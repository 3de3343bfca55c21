import { isIP } from "node:net";
import type { KvSource, TransferInfo } from "../../engine/types.ts";

/** Of the hand-off's fields; one that a later release cannot read as this one gets another number. */
const VERSION = 1;
/** Longest numeric address. */
const MAX_HOST = 45;
/** Far above any layout; what it holds is for the engine to judge. */
const MAX_LAYOUT_BYTES = 1024;

type Fields = Record<string, unknown>;
const isObject = (value: unknown): value is Fields => typeof value === "object" && value !== null && !Array.isArray(value);

/** What a prefill worker answers with and the frontend passes on to a decode worker: `disaggregated_params`. */
export function handoff(copy: bigint, host: string, { port, layout }: TransferInfo, tokens: number): Fields {
  // The id as text: JSON numbers lose bits on the way.
  return { version: VERSION, host, port, transfer_id: copy.toString(), tokens, layout: Buffer.from(layout).toString("base64") };
}

/** Reads `prefill_result` of a request. null = there is none; a text says what is wrong with it. Nothing in it is trusted. */
export function readHandoff(body: unknown): KvSource | string | null {
  const result = isObject(body) ? body.prefill_result : null;
  if (result === undefined || result === null) return null;
  const params = isObject(result) ? result.disaggregated_params : null;
  if (!isObject(params)) return "prefill_result.disaggregated_params is not an object";
  const { version, host, port, transfer_id: id, layout } = params;
  const integer = (value: unknown) => (typeof value === "bigint" ? Number(value) : value);
  if (integer(version) !== VERSION) return `version is not ${VERSION}`;
  if (typeof host !== "string" || host.length > MAX_HOST || isIP(host) === 0) return "host is not a numeric address";
  const to = integer(port);
  if (typeof to !== "number" || !Number.isInteger(to) || to < 1 || to > 65535) return "port is not a number from 1 to 65535";
  if (typeof id !== "string" || !/^\d{1,20}$/.test(id) || BigInt(id) >= 2n ** 64n) return "transfer_id is not a 64-bit number written as text";
  if (typeof layout !== "string" || layout.length > MAX_LAYOUT_BYTES * 2 || !/^[A-Za-z0-9+/]+={0,2}$/.test(layout)) return "layout is not text in base64";
  return { host, port: to, id: BigInt(id), layout: new Uint8Array(Buffer.from(layout, "base64")) };
}
