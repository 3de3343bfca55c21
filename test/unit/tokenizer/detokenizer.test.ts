import { describe, expect, setDefaultTimeout, test } from "bun:test";
import { Detokenizer } from "../../../src/tokenizer/detokenizer.ts";
import type { Tokenizer } from "../../../src/tokenizer/tokenizer.ts";
import { Utf8Stream } from "../../../src/tokenizer/utf8-stream.ts";
import { Random } from "../../support/random.ts";
import { realTokenizer, synthetic, syntheticTokenizer, TOKENIZER_NAMES } from "../../support/tokenizers.ts";

// Large vocabularies on a machine that others use too.
setDefaultTimeout(60_000);

const HARD = "Repeat exactly: 😸 똻 é ﷽ 👨‍👩‍👧‍👦 e\u0301 \ufeff日本 <|im_end|></s> ok";

/** Pushes of random size joined; also checks that U+FFFD never comes out before the whole text has one at that place. */
function streamed(tokenizer: Tokenizer, ids: number[], skipSpecialTokens: boolean, random: Random): string {
  const whole = tokenizer.decode(ids, { skipSpecialTokens });
  const stream = new Detokenizer(tokenizer, { skipSpecialTokens });
  let text = "";
  for (let at = 0; at < ids.length; ) {
    const size = 1 + random.below(3);
    text += stream.push(ids.slice(at, at + size));
    at += size;
    if (!whole.startsWith(text)) throw new Error(`${JSON.stringify(text)} does not begin ${JSON.stringify(whole)}`);
  }
  return text + stream.flush();
}

/** Ids with many neighbours that share characters: single bytes, control tokens, unknown ids, pieces of real text. */
function randomIds(tokenizer: Tokenizer, random: Random, single: number[], textIds: number[]): number[] {
  return Array.from({ length: random.below(40) }, () => {
    const kind = random.next();
    if (kind < 0.35) return random.pick(single);
    if (kind < 0.45) return random.pick([...tokenizer.specialTokens.values(), 0]);
    if (kind < 0.6) return random.pick(textIds);
    return kind < 0.65 ? tokenizer.vocabSize + random.below(3) : random.below(tokenizer.vocabSize);
  });
}

const all: [string, () => Promise<Tokenizer>][] = [
  ...TOKENIZER_NAMES.map((name): [string, () => Promise<Tokenizer>] => [name, () => realTokenizer(name)]),
  ...Object.keys(synthetic().tokenizers).map((name): [string, () => Promise<Tokenizer>] => [name, () => Promise.resolve(syntheticTokenizer(name))]),
];

describe.each(all)("%s", (name, open) => {
  test("joined pushes are the whole text, for random ids", async () => {
    const tokenizer = await open();
    const random = new Random(11);
    const textIds = tokenizer.encode(HARD, { addSpecialTokens: false });
    const bytes = Array.from({ length: tokenizer.vocabSize }, (_, id) => id).filter((id) => {
      const token = tokenizer.tokenBytes(id);
      return token.length === 1 && token[0]! >= 0x80;
    });
    const single = bytes.length > 0 ? bytes : [1];
    const rounds = (TOKENIZER_NAMES as readonly string[]).includes(name) ? 1500 : 200;
    for (let round = 0; round < rounds; round++) {
      const ids = randomIds(tokenizer, random, single, textIds.length > 0 ? textIds : [1]);
      for (const skip of [true, false]) expect(streamed(tokenizer, ids, skip, random)).toBe(tokenizer.decode(ids, { skipSpecialTokens: skip }));
    }
  });
});

describe("characters split over tokens", () => {
  test.each([...TOKENIZER_NAMES, "spm"])("%s: no U+FFFD, text leaves with its last byte", async (name) => {
    const tokenizer = name === "spm" ? syntheticTokenizer("spm") : await realTokenizer(name as "qwen3");
    const byteId = (byte: number) => {
      for (let id = 0; id < tokenizer.vocabSize; id++) {
        const bytes = tokenizer.tokenBytes(id);
        if (bytes.length === 1 && bytes[0] === byte) return id;
      }
      throw new Error(`no token for byte ${byte}`);
    };
    const stream = new Detokenizer(tokenizer, { skipSpecialTokens: true });
    const out = [0xf0, 0x9f, 0x98, 0xb8, 0xe4, 0xbd, 0xa0].map((byte) => stream.push([byteId(byte)]));
    expect(out).toEqual(["", "", "", "😸", "", "", "你"]);
    expect(stream.flush()).toBe("");
  });

  test("the hard prompt survives token by token", async () => {
    for (const name of TOKENIZER_NAMES) {
      const tokenizer = await realTokenizer(name);
      const stream = new Detokenizer(tokenizer, { skipSpecialTokens: true });
      const ids = tokenizer.encode(HARD, { addSpecialTokens: false, parseSpecial: false });
      const text = ids.map((id) => stream.push([id])).join("") + stream.flush();
      expect(text).not.toContain("\ufffd");
      if (name !== "qwen3") expect(text).toBe(HARD);
      else expect(text).toBe(HARD.normalize("NFC"));
    }
  });

  test("a text that ends inside a character", async () => {
    const tokenizer = await realTokenizer("qwen3");
    const ids = tokenizer.encode("똻", { addSpecialTokens: false });
    const stream = new Detokenizer(tokenizer, { skipSpecialTokens: true });
    expect(ids.length).toBeGreaterThan(1);
    expect(stream.push(ids.slice(0, -1))).toBe("");
    expect(stream.flush()).toBe("\ufffd");
    expect(stream.flush()).toBe("");
  });
});

describe("the space before the first word", () => {
  test("is dropped at the start of a text, kept in a continuation", () => {
    const tokenizer = syntheticTokenizer("spm");
    const ids = tokenizer.encode("the quick", { addSpecialTokens: false });
    const text = (continuation: boolean) => {
      const stream = new Detokenizer(tokenizer, { skipSpecialTokens: true, continuation });
      return ids.map((id) => stream.push([id])).join("") + stream.flush();
    };
    expect(text(false)).toBe("the quick");
    expect(text(true)).toBe(" the quick");
  });
});

describe("Utf8Stream", () => {
  test("any split of random bytes gives what TextDecoder makes of the whole", () => {
    const random = new Random(5);
    const interesting = [0x00, 0x41, 0x7f, 0x80, 0x8f, 0x90, 0x9f, 0xa0, 0xbf, 0xc0, 0xc2, 0xdf, 0xe0, 0xe1, 0xed, 0xef, 0xbb, 0xf0, 0xf1, 0xf4, 0xf5, 0xff];
    for (let round = 0; round < 5000; round++) {
      const bytes = Uint8Array.from({ length: random.below(12) }, () => random.pick(interesting));
      const stream = new Utf8Stream("part");
      let text = "";
      for (let at = 0; at < bytes.length; ) {
        const size = 1 + random.below(4);
        text += stream.push(bytes.subarray(at, at + size));
        at += size;
      }
      expect(text + stream.flush()).toBe(new TextDecoder("utf-8", { ignoreBOM: true }).decode(bytes));
    }
  });

  test("per byte: one U+FFFD for each invalid byte, valid characters stay", () => {
    const stream = new Utf8Stream("byte");
    expect(stream.push(Uint8Array.of(0xff, 0xe4, 0xbd)) + stream.push(Uint8Array.of(0xa0, 0xed, 0xa0, 0x80, 0xf0, 0x9f)) + stream.flush()).toBe("\ufffd你\ufffd\ufffd\ufffd\ufffd\ufffd");
  });
});
