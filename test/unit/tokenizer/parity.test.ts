import { describe, expect, setDefaultTimeout, test } from "bun:test";
import { createHash } from "node:crypto";
import { golden, realTokenizer, TOKENIZER_NAMES } from "../../support/tokenizers.ts";

// Large vocabularies on a machine that others use too.
setDefaultTimeout(60_000);

type IdsRow = number[] | [number, string];
interface Golden {
  encoded: IdsRow[];
  /** With control-token text kept plain; 0 = as in `encoded`. */
  plain: (IdsRow | 0)[];
  /** [ids, digest skipping control tokens, digest with them]. */
  decoded: [number[], string, string][];
  withSpecial: number[][];
}

const rows = golden<[string, number?][]>("strings");
const strings = rows.map(([text, times]) => text.repeat(times ?? 1));
const digest = (text: string) => createHash("sha256").update(text).digest("hex").slice(0, 16);
const row = (ids: number[]): IdsRow => (ids.length <= 12 ? ids : [ids.length, digest(ids.join(","))]);
const name = (i: number) => JSON.stringify(rows[i]).slice(0, 60);

describe.each([...TOKENIZER_NAMES])("%s against Python tokenizers", (model) => {
  const expected = golden<Golden>(model);

  test("ids of every hostile string", async () => {
    const tokenizer = await realTokenizer(model);
    expect(strings.length).toBeGreaterThanOrEqual(400);
    expect(expected.encoded.length).toBe(strings.length);
    const wrong = strings.flatMap((text, i) => {
      const got = row(tokenizer.encode(text, { addSpecialTokens: false }));
      return Bun.deepEquals(got, expected.encoded[i]) ? [] : [`${name(i)}: ${JSON.stringify(got)} instead of ${JSON.stringify(expected.encoded[i])}`];
    });
    expect(wrong).toEqual([]);
  });

  test("ids with control-token text kept plain", async () => {
    const tokenizer = await realTokenizer(model);
    const wrong = strings.flatMap((text, i) => {
      const want = expected.plain[i] === 0 ? expected.encoded[i] : expected.plain[i];
      const got = tokenizer.encode(text, { addSpecialTokens: false, parseSpecial: false });
      expect(got.filter((id) => tokenizer.isSpecial(id))).toEqual([]);
      return Bun.deepEquals(row(got), want) ? [] : [`${name(i)}: ${JSON.stringify(row(got))} instead of ${JSON.stringify(want)}`];
    });
    expect(wrong).toEqual([]);
  });

  test("text of random ids, ids outside the vocabulary and the empty list", async () => {
    const tokenizer = await realTokenizer(model);
    const wrong = expected.decoded.flatMap(([ids, skipped, whole], i) => {
      const got = [digest(tokenizer.decode(ids, { skipSpecialTokens: true })), digest(tokenizer.decode(ids, { skipSpecialTokens: false }))];
      return got[0] === skipped && got[1] === whole ? [] : [`list ${i}: ${JSON.stringify(ids)}`];
    });
    expect(wrong).toEqual([]);
    expect(tokenizer.decode([], { skipSpecialTokens: true })).toBe("");
    expect(tokenizer.decode([-1, 2 ** 40, NaN, tokenizer.vocabSize], { skipSpecialTokens: false })).toBe("");
  });

  test("special tokens around a raw prompt", async () => {
    const tokenizer = await realTokenizer(model);
    const got = ["", "hi", "<|begin_of_text|>hi"].map((text) => tokenizer.encode(text, { addSpecialTokens: true }));
    expect(got).toEqual(expected.withSpecial);
  });

  test("every string comes back from its ids, apart from what the normalizer changes", async () => {
    const tokenizer = await realTokenizer(model);
    // SmolLM2's vocabulary lacks a few bytes; the reference drops them too.
    const known = new Set(Array.from({ length: tokenizer.vocabSize }, (_, id) => tokenizer.tokenBytes(id)).flatMap((bytes) => (bytes.length === 1 ? [...bytes] : [])));
    expect(known.size).toBe(model === "smollm2" ? 235 : 256);
    for (const text of strings) {
      const ids = tokenizer.encode(text, { addSpecialTokens: false, parseSpecial: false });
      const kept = Buffer.from(model === "qwen3" ? text.normalize("NFC") : text).filter((byte) => known.has(byte));
      expect(tokenizer.decode(ids, { skipSpecialTokens: true })).toBe(new TextDecoder("utf-8", { ignoreBOM: true }).decode(kept));
    }
  });

  test("token bytes joined are the bytes of the text", async () => {
    const tokenizer = await realTokenizer(model);
    const text = "Hello 你好 😸 똻 é ﷽\n\t<|im_end|> 12";
    const ids = tokenizer.encode(text, { addSpecialTokens: false });
    const bytes = Buffer.concat(ids.map((id) => tokenizer.tokenBytes(id)));
    expect(bytes.toString("utf8")).toBe(text);
    for (const [content, id] of tokenizer.specialTokens) expect(Buffer.from(tokenizer.tokenBytes(id)).toString("utf8")).toBe(content);
    expect(tokenizer.tokenBytes(tokenizer.vocabSize)).toHaveLength(0);
  });

  test("lone surrogates are read as U+FFFD", async () => {
    const tokenizer = await realTokenizer(model);
    const options = { addSpecialTokens: false };
    for (const text of ["\ud83d", "a\ude00b", "\ude00\ud83d", "\ud83d\ud83d\ude00"])
      expect(tokenizer.encode(text, options)).toEqual(tokenizer.encode(text.toWellFormed(), options));
  });
});
