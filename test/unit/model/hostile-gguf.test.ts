/** Case H1: GGUF headers that lie. Every one is refused naming file and field, without a large allocation. */
import { afterAll, describe, expect, test } from "bun:test";
import { mkdtempSync, readFileSync, rmSync, truncateSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { ModelError, openModel } from "../../../src/model/model.ts";
import { readGguf } from "../../../src/model/gguf.ts";
import { type GgufEntry, ggufEntry, ggufString, writeGguf } from "../../../scripts/models/writers.ts";
import { tinyGgufEntries, tinyGgufTensors, tinyModel, writeTinyGguf } from "../../support/models.ts";
import { expectRefusal, refusal } from "../../support/model-errors.ts";

const scratch = mkdtempSync(join(tmpdir(), "layerscale-hostile-"));
afterAll(() => rmSync(scratch, { recursive: true }));
const llama = tinyModel("tiny-llama");
const qwen2 = tinyModel("tiny-qwen2");
const DEADLINE_MS = 120_000;

let count = 0;
function file(bytes: Uint8Array): string {
  const path = join(scratch, `case${count++}.gguf`);
  writeFileSync(path, bytes);
  return path;
}
function u32(value: number): Buffer {
  const out = Buffer.alloc(4);
  out.writeUInt32LE(value);
  return out;
}
function u64(value: bigint): Buffer {
  const out = Buffer.alloc(8);
  out.writeBigUInt64LE(value);
  return out;
}
const repeat = <T>(value: T, length: number): T[] => Array.from({ length }, () => value);
const MAGIC = Buffer.from("GGUF");
/** Magic, version 3, counts, then whatever follows. */
const header = (tensors: bigint, keys: bigint, ...rest: Uint8Array[]) => file(Buffer.concat([MAGIC, u32(3), u64(tensors), u64(keys), ...rest, Buffer.alloc(256)]));
const stringKey = (key: string, value: string) => ggufEntry({ key, type: "STRING", value });
/** One tensor, described by its raw fields. */
const tensor = (dims: bigint[], { name = "t", type = 0, offset = 0n, dimCount = dims.length } = {}) =>
  header(1n, 0n, ggufString(name), u32(dimCount), ...dims.map(u64), u32(type), u64(offset));
/** A complete tiny model with edited metadata. */
function edited(edit: (entries: GgufEntry[]) => GgufEntry[], model = llama): string {
  const path = join(scratch, `case${count++}.gguf`);
  writeGguf(path, edit(tinyGgufEntries(model)), tinyGgufTensors(model, "f32"));
  return path;
}
const set = (key: string, type: GgufEntry["type"], value: unknown, model = llama) =>
  edited((entries) => [...entries.filter((entry) => entry.key !== key), { key, type, value }], model);
const without = (key: string) => edited((entries) => entries.filter((entry) => entry.key !== key));
const refuse = (path: string, field: string | RegExp, words?: RegExp) => expectRefusal(path, path, field, words);

describe("head of the file", () => {
  test("magic and version", async () => {
    await refuse(file(Buffer.from("GGU")), "magic");
    await refuse(file(Buffer.from("GGML3333333333333333")), "magic");
    await refuse(file(Buffer.concat([MAGIC, u32(1), u64(0n), u64(0n)])), "version", /1, expected 2 or 3/);
    await refuse(file(Buffer.concat([MAGIC, u32(4), u64(0n), u64(0n)])), "version");
    await refuse(file(Buffer.concat([MAGIC, u32(0x03000000), u64(0n), u64(0n)])), "version", /big-endian/);
  });
  test("counts larger than the file", async () => {
    await refuse(header(1n << 61n, 0n), "tensor_count");
    await refuse(header(0xffff_ffff_ffff_ffffn, 0n), "tensor_count", /18446744073709551615/);
    await refuse(header(0n, 1n << 61n), "metadata_kv_count");
    await refuse(header(0n, 1000n), "metadata_kv_count");
    await refuse(header(1000n, 0n), "tensor_count");
  });
  test("every cut of the first 4096 bytes", async () => {
    const path = writeTinyGguf(join(scratch, "cut.gguf"), llama, "f32");
    expect(readGguf(path).tensors.size).toBeGreaterThan(0);
    for (let length = 4095; length >= 0; length--) {
      truncateSync(path, length);
      const error = await refusal(path);
      expect(error.field).not.toBe("");
    }
  }, DEADLINE_MS);
  test("every cut of the tensor list", () => {
    const path = writeTinyGguf(join(scratch, "cut2.gguf"), llama, "f32");
    const bytes = readFileSync(path);
    const start = bytes.indexOf("token_embd.weight") - 8;
    for (let length = Math.min(bytes.length - 1, start + 2600); length >= start; length--) {
      truncateSync(path, length);
      expect(() => readGguf(path)).toThrow(ModelError);
    }
  }, DEADLINE_MS);
  test("data cut short", async () => {
    const path = writeTinyGguf(join(scratch, "cut3.gguf"), llama, "f32");
    truncateSync(path, readFileSync(path).length - 64);
    await refuse(path, /^tensor "/, /beyond the end/);
  });
});

describe("metadata", () => {
  test("key and string lengths", async () => {
    await refuse(header(0n, 1n, u64(1n << 63n)), "key 0 of 1", /9223372036854775808/);
    await refuse(header(0n, 1n, u64(400n)), "key 0 of 1");
    await refuse(header(0n, 1n, ggufString("a"), u32(8), u64(1n << 40n)), "a");
    await refuse(header(0n, 1n, u64(2n), Buffer.from([0xff, 0xfe])), "key 0 of 1", /UTF-8/);
  });
  test("value types and arrays", async () => {
    await refuse(header(0n, 1n, ggufString("a"), u32(13)), "a", /value type 13/);
    await refuse(header(0n, 1n, ggufString("a"), u32(7), Buffer.from([2])), "a", /BOOL of value 2/);
    await refuse(header(0n, 1n, ggufString("a"), u32(9), u32(0), u64(1n << 62n)), "a", /array of length/);
    await refuse(header(0n, 1n, ggufString("a"), u32(9), u32(8), u64(100n)), "a", /array of length 100/);
    await refuse(header(0n, 1n, ggufString("a"), u32(9), u32(9), u64(1n)), "a", /arrays/);
    await refuse(header(0n, 1n, ggufString("a"), u32(9), u32(99), u64(1n)), "a", /value type 99/);
    await refuse(header(0n, 2n, stringKey("a", "x"), stringKey("a", "y")), "a", /twice/);
  });
  test("an array that the file really holds is still bounded", async () => {
    const bytes = Buffer.concat([MAGIC, u32(3), u64(0n), u64(1n), ggufString("a"), u32(9), u32(0), u64(3_000_000n), Buffer.alloc(3_000_064)]);
    await refuse(file(bytes), "a", /at most 2097152/);
  });
  test("alignment", async () => {
    await refuse(set("general.alignment", "UINT32", 0), "general.alignment", /power of two/);
    await refuse(set("general.alignment", "UINT32", 3), "general.alignment", /power of two/);
    await refuse(set("general.alignment", "UINT32", 0x80000000), "general.alignment", /power of two/);
    await refuse(set("general.alignment", "INT32", 32), "general.alignment", /INT32/);
    await refuse(set("general.alignment", "STRING", "32"), "general.alignment", /STRING/);
  });
  test("architecture and shapes", async () => {
    await refuse(without("general.architecture"), "general.architecture", /missing/);
    await refuse(set("general.architecture", "STRING", "mamba"), "general.architecture", /recurrent/);
    await refuse(set("general.architecture", "STRING", "gemma3"), "general.architecture", /llama, qwen2, qwen3/);
    await refuse(set("general.architecture", "UINT32", 7), "general.architecture", /string/);
    await refuse(set("llama.block_count", "UINT32", 100000), "llama.block_count", /1024/);
    await refuse(set("llama.block_count", "UINT32", 4), 'tensor "blk.3.attn_norm.weight"', /missing/);
    await refuse(set("llama.block_count", "UINT32", 2), /^tensor "blk\.2\./, /unexpected/);
    await refuse(set("llama.embedding_length", "UINT64", 1n << 60n), "llama.embedding_length");
    await refuse(set("llama.embedding_length", "UINT32", 128), /^tensor/, /shape/);
    await refuse(set("llama.attention.head_count", "UINT32", 0), "llama.attention.head_count");
    await refuse(set("llama.attention.head_count", "INT32", [4, 4, 2]), "llama.attention.head_count", /differ/);
    await refuse(set("llama.attention.head_count", "INT32", [4, 4]), "llama.attention.head_count", /block_count 3/);
    await refuse(set("llama.attention.head_count_kv", "UINT32", 3), "llama.attention.head_count_kv", /divide/);
    await refuse(set("llama.attention.key_length", "UINT32", 15), "llama.attention.key_length", /even/);
    await refuse(set("llama.attention.value_length", "UINT32", 32), "llama.attention.value_length");
    await refuse(set("llama.context_length", "UINT32", 0), "llama.context_length");
    await refuse(without("llama.attention.layer_norm_rms_epsilon"), "llama.attention.layer_norm_rms_epsilon");
  });
  test("what the forward pass does not do", async () => {
    await refuse(set("llama.expert_count", "UINT32", 8), "llama.expert_count");
    await refuse(set("qwen2.attention.sliding_window", "UINT32", 4096, qwen2), "qwen2.attention.sliding_window");
    await refuse(set("llama.rope.dimension_count", "UINT32", 8), "llama.rope.dimension_count", /partial/);
    await refuse(set("llama.rope.scaling.type", "STRING", "yarn"), "llama.rope.scaling.type", /yarn/);
    await refuse(set("llama.rope.scaling.attn_factor", "FLOAT32", 1.5), "llama.rope.scaling.attn_factor");
    await refuse(set("llama.attention.scale", "FLOAT32", 0.5), "llama.attention.scale");
    await refuse(set("llama.logit_scale", "FLOAT32", 0.25), "llama.logit_scale");
    await refuse(set("llama.attention.causal", "BOOL", false), "llama.attention.causal");
    await refuse(set("split.count", "UINT16", 3), "split.count");
  });
  test("one value per layer, all equal, is fine", async () => {
    expect((await openModel(set("llama.attention.head_count_kv", "INT32", [2, 2, 2]))).spec.kvHeads).toBe(2);
  });
});

describe("tokenizer", () => {
  const key = (name: string) => `tokenizer.ggml.${name}`;
  test("kind and pre-tokenizer", async () => {
    await refuse(set(key("model"), "STRING", "llama"), key("model"), /"llama".*gpt2/);
    await refuse(without(key("model")), key("model"));
    await refuse(set(key("pre"), "STRING", "tekken"), key("pre"), /tekken/);
    await refuse(set(key("pre"), "STRING", "toString"), key("pre"));
  });
  test("lists", async () => {
    await refuse(without(key("tokens")), key("tokens"), /missing/);
    await refuse(set(key("tokens"), "STRING", []), key("tokens"));
    await refuse(set(key("tokens"), "UINT8", [1, 2, 3]), key("tokens"), /strings/);
    await refuse(set(key("tokens"), "STRING", repeat("x", 385)), key("tokens"), /384 rows/);
    await refuse(edited((entries) => entries.map((entry) => (entry.key === key("tokens") ? { ...entry, value: ["A", ...(entry.value as string[]).slice(1)] } : entry))), key("tokens"), /same text/);
    await refuse(set(key("token_type"), "FLOAT32", repeat(1, 384)), key("token_type"), /FLOAT32/);
    await refuse(set(key("token_type"), "INT32", [1]), key("token_type"), /1 entries/);
    await refuse(set(key("scores"), "UINT8", repeat(1, 384)), key("scores"), /UINT8.*FLOAT32/);
    await refuse(set(key("scores"), "FLOAT32", [0]), key("scores"), /1 entries/);
    await refuse(without(key("merges")), key("merges"), /missing/);
    for (const merge of ["ab", " a", "a ", "a b c", ""]) await refuse(set(key("merges"), "STRING", [merge]), key("merges"), /entry 0/);
  });
  test("ids", async () => {
    await refuse(set(key("eos_token_id"), "UINT32", 384), key("eos_token_id"), /384/);
    await refuse(set(key("bos_token_id"), "UINT32", 0xffffffff), key("bos_token_id"));
    await refuse(set(key("eot_token_id"), "STRING", "259"), key("eot_token_id"));
  });
});

describe("tensors", () => {
  test("dimensions", async () => {
    await refuse(tensor([(1n << 42n) + 1n]), 'tensor "t"', /beyond the end/);
    await refuse(tensor([(1n << 42n) + 1n, (1n << 42n) + 1n]), 'tensor "t"', /too many elements/);
    await refuse(tensor([1n << 63n]), 'tensor "t"', /9223372036854775808/);
    await refuse(tensor([0n]), 'tensor "t"', /dimension 0 is 0/);
    await refuse(tensor([4n, 0n]), 'tensor "t"', /dimension 1 is 0/);
    await refuse(tensor([1n, 1n, 1n, 1n, 1n]), 'tensor "t"', /5 dimensions/);
    await refuse(tensor([1n], { dimCount: 0 }), 'tensor "t"', /0 dimensions/);
    await refuse(tensor([1n], { dimCount: 0xffffffff }), 'tensor "t"', /4294967295 dimensions/);
  });
  test("types", async () => {
    await refuse(tensor([32n], { type: 12 }), 'tensor "t"', /Q4_K is not supported.*Q8_0/);
    await refuse(tensor([32n], { type: 4242 }), 'tensor "t"', /number 4242/);
    await refuse(tensor([33n], { type: 8 }), 'tensor "t"', /33 columns.*32/);
  });
  test("offsets", async () => {
    await refuse(tensor([4n], { offset: 1n << 63n }), 'tensor "t"', /beyond the end/);
    await refuse(tensor([4n], { offset: 1n << 52n }), 'tensor "t"', /beyond the end/);
    await refuse(tensor([4n], { offset: 4n }), 'tensor "t"', /alignment/);
    const info = (name: string, offset: bigint) => Buffer.concat([ggufString(name), u32(1), u64(16n), u32(0), u64(offset)]);
    await refuse(header(2n, 0n, info("a", 0n), info("b", 32n)), 'tensor "b"', /overlaps tensor "a"/);
    await refuse(header(2n, 0n, info("a", 0n), info("a", 64n)), 'tensor "a"', /twice/);
  });
  test("rope factors", async () => {
    const source = tinyModel("tiny-llama-llama3");
    const broken = (shape: number[], values: number[]) => {
      const path = join(scratch, `case${count++}.gguf`);
      const tensors = tinyGgufTensors(source, "f32").filter((t) => t.name !== "rope_freqs.weight");
      writeGguf(path, tinyGgufEntries(source), [...tensors, { name: "rope_freqs.weight", shape, dtype: "f32", chunks: () => [new Uint8Array(Float32Array.from(values).buffer)] }]);
      return path;
    };
    await refuse(broken([4], [1, 1, 1, 1]), 'tensor "rope_freqs.weight"', /expected F32 of \[16\]/);
    await refuse(broken([16], repeat(0, 16)), 'tensor "rope_freqs.weight"', /value 0 is 0/);
    await refuse(broken([16], repeat(NaN, 16)), 'tensor "rope_freqs.weight"', /NaN/);
  });
});

test("refusals take little memory", async () => {
  const paths = [
    header(1n << 61n, 1n << 61n),
    header(0n, 1n, u64(1n << 63n)),
    header(0n, 1n, ggufString("a"), u32(9), u32(8), u64(1n << 40n)),
    tensor([(1n << 42n) + 1n]),
    set("llama.block_count", "UINT32", 0xffffffff),
  ];
  const before = process.memoryUsage.rss();
  for (const path of paths) await refusal(path);
  expect(process.memoryUsage.rss() - before).toBeLessThan(64 << 20);
});
