import { describe, expect, setDefaultTimeout, test } from "bun:test";
import { Detokenizer } from "../../../src/tokenizer/detokenizer.ts";
import { synthetic, syntheticTokenizer } from "../../support/tokenizers.ts";

// Large vocabularies on a machine that others use too.
setDefaultTimeout(60_000);

/** Small made-up tokenizers with the features that the real ones do not use, against Python tokenizers. */
describe.each(Object.keys(synthetic().tokenizers))("%s", (name) => {
  const { texts, tokenizers } = synthetic();
  const expected = tokenizers[name]!;
  const tokenizer = syntheticTokenizer(name);

  test("ids", () => {
    expect(texts.map((text) => tokenizer.encode(text, { addSpecialTokens: false }))).toEqual(expected.encoded);
  });

  test("ids with special tokens around", () => {
    const got = texts.slice(0, expected.special.length).map((text) => tokenizer.encode(text, { addSpecialTokens: true }));
    expect(got).toEqual(expected.special);
  });

  test("text, whole and streamed", () => {
    for (const [ids, skipped, whole] of expected.decoded) {
      expect(tokenizer.decode(ids, { skipSpecialTokens: true })).toBe(skipped);
      expect(tokenizer.decode(ids, { skipSpecialTokens: false })).toBe(whole);
      const stream = new Detokenizer(tokenizer, { skipSpecialTokens: true });
      expect(ids.map((id) => stream.push([id])).join("") + stream.flush()).toBe(skipped);
    }
  });
});
