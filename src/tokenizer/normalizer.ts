import { SequenceNormalizer } from "@huggingface/tokenizers";
import { arrayAt, fail, isObject } from "./json-fields.ts";
import type { Json } from "./json-fields.ts";

/** Text of one section (what lies between added tokens) → normalized text; null where the file has no normalizer. */
export type Normalize = ((text: string) => string) | null;

const KNOWN = new Set([
  "BertNormalizer", "Precompiled", "Replace", "NFC", "NFD", "NFKC", "NFKD", "Strip", "StripAccents", "Lowercase", "Prepend",
]);

export function createNormalizer(value: unknown): Normalize {
  if (value === null || value === undefined) return null;
  const normalizers = conforming(value, "normalizer");
  if (normalizers.length === 0) return null;
  const library = new SequenceNormalizer({ type: "Sequence", normalizers } as unknown as ConstructorParameters<typeof SequenceNormalizer>[0]);
  return (text) => (text === "" ? "" : library.normalize(text));
}

/** Flattens sequences and checks types. The library puts `content` into a JS replacement pattern, where `$` is special. */
function conforming(value: unknown, field: string): Json[] {
  if (!isObject(value)) return fail(field, value, "an object");
  const type = value["type"];
  if (type === "Sequence")
    return arrayAt(value, "normalizers", `${field}.normalizers`).flatMap((n, i) => conforming(n, `${field}.normalizers[${i}]`));
  if (typeof type !== "string" || !KNOWN.has(type)) return fail(`${field}.type`, type, [...KNOWN].join(", "));
  if (type === "Replace" && typeof value["content"] === "string")
    return [{ ...value, content: value["content"].replaceAll("$", "$$$$") }];
  return [value];
}
