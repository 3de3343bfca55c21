import { parseJson, stringifyJson } from "./bigint-json.ts";
import { decodeMsgpack, encodeMsgpack } from "./msgpack.ts";

/** Encoding of a request body and of every item that answers it; the frontend names it in the control header. */
export interface PayloadCodec {
  readonly name: "json" | "msgpack";
  /** @throws when the bytes are not a value of this encoding */
  decode(bytes: Uint8Array): unknown;
  encode(value: unknown): Buffer;
}

const utf8 = new TextDecoder("utf-8", { fatal: true });

export const jsonCodec: PayloadCodec = {
  name: "json",
  decode: (bytes) => parseJson(utf8.decode(bytes)),
  encode: (value) => Buffer.from(stringifyJson(value)),
};
export const msgpackCodec: PayloadCodec = { name: "msgpack", decode: decodeMsgpack, encode: encodeMsgpack };

/** null for an encoding this worker does not speak; absent means JSON. */
export function payloadCodec(name: string | undefined): PayloadCodec | null {
  if (name === undefined || name === "json") return jsonCodec;
  return name === "msgpack" ? msgpackCodec : null;
}
