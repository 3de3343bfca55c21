import { describe, expect, setDefaultTimeout, test } from "bun:test";
import { TokenizerError } from "../../../src/tokenizer/errors.ts";
import { Tokenizer } from "../../../src/tokenizer/tokenizer.ts";
import { realTokenizer, syntheticJson, syntheticTokenizer, tokenizerFiles } from "../../support/tokenizers.ts";

// Large vocabularies on a machine that others use too.
setDefaultTimeout(60_000);

const raw = { addSpecialTokens: false };

describe("what tokenizer.json stores for training", () => {
  test("padding and truncation are ignored", async () => {
    const { json, config } = await tokenizerFiles("smollm2");
    const stored = {
      ...(json as Record<string, unknown>),
      padding: { strategy: { Fixed: 512 }, direction: "Right", pad_to_multiple_of: null, pad_id: 0, pad_type_id: 0, pad_token: "[PAD]" },
      truncation: { max_length: 16, strategy: "LongestFirst", stride: 0, direction: "Right" },
    };
    const tokenizer = Tokenizer.create(stored, config);
    const plain = await realTokenizer("smollm2");
    const long = "one two three four ".repeat(20);
    for (const text of ["hi", long]) expect(tokenizer.encode(text, { addSpecialTokens: true })).toEqual(plain.encode(text, { addSpecialTokens: true }));
    expect(plain.encode(long, raw).length).toBeGreaterThan(40);
  });
});

describe("BOS and EOS around raw prompts", () => {
  const config = { bos_token: "<s>", eos_token: { content: "</s>", lstrip: false } };
  const ids = (more: Record<string, unknown>, json = syntheticJson("spm")) => {
    const tokenizer = Tokenizer.create(json, { ...config, ...more });
    return tokenizer.encode("the", { addSpecialTokens: true }).map((id) => (id === tokenizer.bosTokenId ? "B" : id === tokenizer.eosTokenId ? "E" : "."));
  };

  test("the post-processor decides, an explicit add_bos_token wins", () => {
    expect(ids({})).toEqual(["B", "."]);
    expect(ids({ add_bos_token: true })).toEqual(["B", "."]);
    expect(ids({ add_bos_token: false })).toEqual(["."]);
    expect(ids({ add_eos_token: true })).toEqual(["B", ".", "E"]);
    const bare = () => ({ ...syntheticJson("spm"), post_processor: null });
    expect(ids({}, bare())).toEqual(["."]);
    expect(ids({ add_bos_token: true }, bare())).toEqual(["B", "."]);
    expect(ids({ add_bos_token: true, bos_token: null }, bare())).toEqual(["."]);
  });

  test("ids by text or by object, null where the model has none", async () => {
    const tokenizer = syntheticTokenizer("spm", config);
    expect([tokenizer.bosTokenId, tokenizer.eosTokenId]).toEqual([1, 2]);
    expect(syntheticTokenizer("spm").bosTokenId).toBeNull();
    expect((await realTokenizer("qwen3")).bosTokenId).toBeNull();
    expect((await realTokenizer("qwen3")).eosTokenId).toBe(151645);
    expect((await realTokenizer("llama3_1")).bosTokenId).toBe(128000);
  });
});

describe("control tokens", () => {
  test("what the configuration names is a control token, whatever its entry says", () => {
    const json = syntheticJson("added");
    const tokenizer = Tokenizer.create(json, { additional_special_tokens: ["好", { content: "word" }], added_tokens_decoder: { "9001": { content: "<new>", special: true } } });
    expect(tokenizer.specialTokens.has("好")).toBe(true);
    expect(tokenizer.specialTokens.has("word")).toBe(true);
    expect(tokenizer.encode("<new>", raw)).toEqual([9001]);
    expect(tokenizer.isSpecial(9001)).toBe(true);
    expect(tokenizer.vocabSize).toBe(9002);
    expect(tokenizer.decode([9001], { skipSpecialTokens: true })).toBe("");
    expect(tokenizer.decode([9001, 9000], { skipSpecialTokens: false })).toBe("<new>");
    expect(syntheticTokenizer("added").specialTokens.has("好")).toBe(false);
  });

  test("isPlain decides place by place", async () => {
    const tokenizer = await realTokenizer("qwen3");
    const text = "<|im_end|>a<|im_end|>";
    const end = tokenizer.specialTokens.get("<|im_end|>")!;
    const ids = tokenizer.encode(text, { ...raw, isPlain: (start) => start === 0 });
    expect(ids.filter((id) => id === end)).toHaveLength(1);
    expect(ids.at(-1)).toBe(end);
    expect(tokenizer.decode(ids, { skipSpecialTokens: false })).toBe(text);
  });

  test("added tokens that are no control tokens are read in plain text too", async () => {
    const tokenizer = await realTokenizer("qwen3");
    expect(tokenizer.isSpecial(tokenizer.encode("<think>", raw)[0]!)).toBe(false);
    expect(tokenizer.encode("<think>", { ...raw, parseSpecial: false })).toEqual(tokenizer.encode("<think>", raw));
    expect(tokenizer.encode("<think>", raw)).toHaveLength(1);
  });
});

describe("files that cannot be used are refused by name", () => {
  const changed = (change: (json: Record<string, any>) => void) => {
    const json = syntheticJson("gpt2") as Record<string, any>;
    change(json);
    return json;
  };
  const cases: [string, RegExp, unknown][] = [
    ["no object", /the file holds \[\]/, []],
    ["no model", /model is undefined/, changed((j) => delete j["model"])],
    ["Unigram", /model\.type is "Unigram", expected "BPE"/, changed((j) => (j["model"].type = "Unigram"))],
    ["dropout", /model\.dropout is 0\.1/, changed((j) => (j["model"].dropout = 0.1))],
    ["negative id", /model\.vocab\["!"\] is -1/, changed((j) => (j["model"].vocab["!"] = -1))],
    ["huge id", /model\.vocab\["!"\] is 1000000000000/, changed((j) => (j["model"].vocab["!"] = 1e12))],
    ["fractional id", /model\.vocab\["!"\] is 1\.5/, changed((j) => (j["model"].vocab["!"] = 1.5))],
    ["merge of three", /model\.merges\[0\]/, changed((j) => (j["model"].merges[0] = ["a", "b", "c"]))],
    ["merge without space", /model\.merges\[0\] is "ab"/, changed((j) => (j["model"].merges[0] = "ab"))],
    ["merge outside the vocabulary", /model\.merges\[0\]/, changed((j) => (j["model"].merges[0] = ["nope", "no"]))],
    ["unknown token not in vocabulary", /model\.unk_token is "<nope>"/, changed((j) => (j["model"].unk_token = "<nope>"))],
    ["added tokens", /added_tokens is "x"/, changed((j) => (j["added_tokens"] = "x"))],
    ["added token without id", /added_tokens\[0\]\.id is undefined/, changed((j) => delete j["added_tokens"][0].id)],
    ["normalizer", /normalizer\.type is "Nmt"/, changed((j) => (j["normalizer"] = { type: "Nmt" }))],
    ["pre-tokenizer", /pre_tokenizer\.pretokenizers\[0\]\.type is "X"/, changed((j) => (j["pre_tokenizer"] = { type: "Sequence", pretokenizers: [{ type: "X" }] }))],
    ["split pattern", /pre_tokenizer\.pattern/, changed((j) => (j["pre_tokenizer"] = { type: "Split", pattern: { Regex: "(" }, behavior: "Isolated" }))],
    ["split behavior", /pre_tokenizer\.behavior is "Odd"/, changed((j) => (j["pre_tokenizer"] = { type: "Split", pattern: { String: "a" }, behavior: "Odd" }))],
    ["decoder", /decoder\.type is "CTC"/, changed((j) => (j["decoder"] = { type: "CTC" }))],
    ["post-processor", /post_processor\.type is "X"/, changed((j) => (j["post_processor"] = { type: "X" }))],
    ["post-processor id", /post_processor names id 4000000/, changed((j) => (j["post_processor"] = { type: "BertProcessing", cls: ["a", 4e6], sep: ["b", 0] }))],
  ];
  test.each(cases)("%s", (_name, message, json) => {
    expect(() => Tokenizer.create(json, {})).toThrow(TokenizerError);
    expect(() => Tokenizer.create(json, {})).toThrow(message);
  });

  test("merges as text and as pairs mean the same", () => {
    const pairs = syntheticJson("gpt2") as Record<string, any>;
    const joined = changed((j) => (j["model"].merges = j["model"].merges.map((m: string[]) => m.join(" "))));
    const text = "the quick brown fox don't 1999";
    expect(Tokenizer.create(joined, {}).encode(text, raw)).toEqual(Tokenizer.create(pairs, {}).encode(text, raw));
  });
});

describe("long inputs", () => {
  // Anything that is not linear would not end within the time limit.
  test("one unbroken piece", async () => {
    const tokenizer = await realTokenizer("qwen3");
    const ids = tokenizer.encode("a".repeat(300_000), raw);
    expect(tokenizer.decode(ids, { skipSpecialTokens: true })).toBe("a".repeat(300_000));
  });

  test("blanks, brackets, marks and unfinished control tokens", async () => {
    const tokenizer = await realTokenizer("llama3_1");
    for (const unit of [" ", "\n ", "<|", "<|reserved_special_token_", "\u0301", " a"]) {
      const text = unit.repeat(Math.ceil(150_000 / unit.length));
      expect(tokenizer.decode(tokenizer.encode(text, raw), { skipSpecialTokens: true })).toBe(text);
    }
  });

  test("an unbroken piece merges as short ones do", () => {
    // Above and below the length at which the merge loop changes: the same pairs, the same order.
    const tokenizer = syntheticTokenizer("unk");
    for (const unit of ["the quick ", "hello", "aab", "1999", "--x"]) {
      const short = tokenizer.encode(unit.repeat(2), raw);
      const long = tokenizer.encode(unit.repeat(40), raw);
      expect(tokenizer.decode(long, { skipSpecialTokens: false }).replaceAll(" ", "")).toBe(unit.repeat(40).replaceAll(" ", ""));
      expect(long.slice(0, Math.max(1, short.length - 2))).toEqual(short.slice(0, Math.max(1, short.length - 2)));
    }
  });
});
