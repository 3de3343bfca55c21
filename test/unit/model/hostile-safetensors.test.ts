/** Case H2: safetensors headers and shard indexes that lie. */
import { afterAll, describe, expect, test } from "bun:test";
import { execFileSync } from "node:child_process";
import { mkdirSync, mkdtempSync, readFileSync, rmSync, truncateSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { ModelError, openModel } from "../../../src/model/model.ts";
import { readSafetensors } from "../../../src/model/safetensors.ts";
import { writeSafetensors } from "../../../scripts/models/writers.ts";
import { tinyModel, writeTinyHf } from "../../support/models.ts";
import { expectRefusal, refusal } from "../../support/model-errors.ts";

const scratch = mkdtempSync(join(tmpdir(), "layerscale-hostile-"));
afterAll(() => rmSync(scratch, { recursive: true }));
const llama = tinyModel("tiny-llama");
const sharded = tinyModel("tiny-qwen2");
const DEADLINE_MS = 120_000;

let count = 0;
function fresh(model = llama): string {
  return writeTinyHf(join(scratch, `model${count++}`), model);
}
/** A model directory whose weights are replaced: header length (its own when null), header text, data bytes. */
function weights(header: string | Uint8Array, { length = null as bigint | null, data = 0 } = {}): string {
  const directory = fresh();
  const text = Buffer.from(header as string);
  const prefix = Buffer.alloc(8);
  prefix.writeBigUInt64LE(length ?? BigInt(text.length));
  writeFileSync(join(directory, "model.safetensors"), Buffer.concat([prefix, text, Buffer.alloc(data)]));
  return directory;
}
const refuse = (directory: string, field: string | RegExp, words?: RegExp) => expectRefusal(directory, "model.safetensors", field, words);
const one = (entry: unknown) => JSON.stringify({ t: entry });
const F32 = { dtype: "F32", shape: [2, 2], data_offsets: [0, 16] };

describe("header", () => {
  test("length", async () => {
    await refuse(weights("{}", { length: 0xffff_ffff_ffff_ffffn }), "header length", /18446744073709551615/);
    await refuse(weights("{}", { length: 0n }), "header length");
    await refuse(weights("{}", { length: 3n }), "header length", /only 2 bytes follow/);
    await refuse(weights("{}", { length: 1n << 40n }), "header length");
    const short = fresh();
    truncateSync(join(short, "model.safetensors"), 7);
    await refuse(short, "header length", /7 bytes/);
    truncateSync(join(short, "model.safetensors"), 0);
    await refuse(short, "header length", /0 bytes/);
  });
  test("a header that the file really holds is still bounded", async () => {
    const directory = fresh();
    const file = join(directory, "model.safetensors");
    const prefix = Buffer.alloc(8);
    prefix.writeBigUInt64LE(1n << 30n);
    writeFileSync(file, prefix);
    truncateSync(file, (1 << 30) + 64); // sparse
    const before = process.memoryUsage.rss();
    await refuse(directory, "header length", /at most/);
    expect(process.memoryUsage.rss() - before).toBeLessThan(64 << 20);
  });
  test("text", async () => {
    await refuse(weights("[]"), "header", /object/);
    await refuse(weights("{} x"), "header", /JSON/);
    await refuse(weights('{"a":'), "header", /JSON/);
    await refuse(weights("[".repeat(100_000)), "header", /JSON/);
    await refuse(weights("null"), "header");
    await refuse(weights(Buffer.from([0x7b, 0x22, 0xff, 0xfe, 0x22, 0x3a, 0x31, 0x7d])), "header", /UTF-8/);
  });
  test("duplicate names", async () => {
    const entry = JSON.stringify(F32);
    await refuse(weights(`{"t":${entry},"u":1,"t":${entry}}`, { data: 16 }), "t", /twice/);
    await refuse(weights(`{"t":${entry},"\\u0074":${entry}}`, { data: 16 }), "t", /twice/);
    await refuse(weights('{"t":{"dtype":"F32","dtype":"F32","shape":[],"data_offsets":[0,4]}}', { data: 4 }), "dtype", /twice/);
  });
  test("metadata", async () => {
    await refuse(weights('{"__metadata__":[]}'), "__metadata__");
    await refuse(weights('{"__metadata__":{"a":1}}'), "__metadata__.a");
  });
});

describe("tensor entries", () => {
  test("shape and bytes disagree", async () => {
    await refuse(weights('{"t":{"dtype":"F32","shape":[1000,1000],"data_offsets":[0,4]}}', { data: 4 }), 'tensor "t" data_offsets', /4 bytes.*4000000/);
    await refuse(weights(one({ ...F32, shape: [4611686018427387904, 4] }), { data: 16 }), 'tensor "t" shape');
    await refuse(weights(one({ ...F32, shape: [2 ** 52, 2 ** 52] }), { data: 16 }), 'tensor "t" data_offsets');
    await refuse(weights(one({ ...F32, shape: [-2, -2] }), { data: 16 }), 'tensor "t" shape');
    await refuse(weights(one({ ...F32, shape: [2.5, 2] }), { data: 16 }), 'tensor "t" shape');
    await refuse(weights(one({ ...F32, shape: "2,2" }), { data: 16 }), 'tensor "t" shape');
    await refuse(weights(one({ ...F32, shape: Array.from({ length: 100 }, () => 1) }), { data: 16 }), 'tensor "t" shape');
  });
  test("offsets", async () => {
    await refuse(weights(one({ ...F32, data_offsets: [16, 0] }), { data: 16 }), 'tensor "t" data_offsets', /backwards/);
    await refuse(weights(one({ ...F32, data_offsets: [0, 17] }), { data: 16 }), 'tensor "t" data_offsets', /beyond/);
    await refuse(weights(one({ ...F32, data_offsets: [0, 1e300] }), { data: 16 }), 'tensor "t" data_offsets');
    await refuse(weights(one({ ...F32, data_offsets: [0] }), { data: 16 }), 'tensor "t" data_offsets');
    await refuse(weights(one({ ...F32, data_offsets: [-16, 0] }), { data: 16 }), 'tensor "t" data_offsets');
    const two = (begin: number) => JSON.stringify({ a: F32, b: { ...F32, data_offsets: [begin, begin + 16] } });
    await refuse(weights(two(8), { data: 24 }), 'tensor "b" data_offsets', /overlaps/);
    await refuse(weights(two(24), { data: 40 }), 'tensor "b" data_offsets', /gap/);
    await refuse(weights(two(0), { data: 16 }), /^tensor "[ab]" data_offsets$/, /overlaps/);
    await refuse(weights(one(F32), { data: 20 }), "header", /end at byte/);
    await refuse(weights(one({ ...F32, data_offsets: [4, 20] }), { data: 20 }), 'tensor "t" data_offsets', /gap/);
  });
  test("dtype", async () => {
    await refuse(weights(one({ ...F32, dtype: "F33" }), { data: 16 }), 'tensor "t" dtype', /F33/);
    await refuse(weights(one({ ...F32, dtype: "toString" }), { data: 16 }), 'tensor "t" dtype');
    await refuse(weights(one({ ...F32, dtype: 1 }), { data: 16 }), 'tensor "t" dtype');
    await refuse(weights(one(5)), 'tensor "t"');
  });
  test("a dtype that no weight may have is refused by name", async () => {
    const directory = fresh();
    const file = join(directory, "model.safetensors");
    // Same number of bits, so only the dtype is wrong.
    writeFileSync(file, Buffer.from(readFileSync(file).toString("latin1").replaceAll('"F32"', '"I32"'), "latin1"));
    await refuse(directory, 'tensor "model.embed_tokens.weight"', /I32 is not supported/);
  });
  test("a tensor that does not begin at a multiple of its element size", async () => {
    const directory = fresh();
    const file = join(directory, "model.safetensors");
    const bytes = readFileSync(file);
    const length = Number(bytes.readBigUInt64LE(0));
    const header = bytes.subarray(8, 8 + length).toString().trimEnd();
    const odd = header.padEnd(header.length + ((4 - ((8 + header.length) % 4)) % 4) + 1, " ");
    const prefix = Buffer.alloc(8);
    prefix.writeBigUInt64LE(BigInt(odd.length));
    writeFileSync(file, Buffer.concat([prefix, Buffer.from(odd), bytes.subarray(8 + length)]));
    await refuse(directory, /^tensor/, /multiple of 4/);
  });
});

test("every cut of the first 4096 bytes", async () => {
  const directory = fresh();
  const file = join(directory, "model.safetensors");
  for (let length = 4095; length >= 0; length--) {
    truncateSync(file, length);
    expect(() => readSafetensors(file)).toThrow(ModelError);
  }
  expect((await refusal(directory)).file).toEndWith("model.safetensors");
}, DEADLINE_MS);

describe("tensor names", () => {
  const rename = (directory: string, from: string, to: string) => {
    const file = join(directory, "model.safetensors");
    writeFileSync(file, Buffer.from(readFileSync(file).toString("latin1").replace(from, to), "latin1"));
    return directory;
  };
  test("missing and unexpected", async () => {
    await expectRefusal(rename(fresh(), "model.norm.weight", "model.nora.weight"), "", 'tensor "model.norm.weight"', /missing, expected shape \[64\]/);
    await expectRefusal(rename(fresh(), "lm_head.weight", "lm_hexd.weight"), "config.json", "tie_word_embeddings", /lm_head\.weight/);
    const extra = fresh();
    const config = join(extra, "config.json");
    writeFileSync(config, readFileSync(config, "utf8").replace('"num_hidden_layers": 3', '"num_hidden_layers": 2'));
    await refuse(extra, /^tensor "model\.layers\.2\./, /unexpected/);
  });
  test("buffers of old checkpoints are not weights", async () => {
    const directory = fresh();
    const tensors = readSafetensors(join(directory, "model.safetensors")).tensors;
    const bytes = readFileSync(join(directory, "model.safetensors"));
    writeSafetensors(join(directory, "model.safetensors"), [
      ...tensors.map((tensor) => ({ name: tensor.name, shape: tensor.shape, dtype: "f32" as const, chunks: () => [bytes.subarray(tensor.offset, tensor.offset + tensor.bytes)] })),
      { name: "model.layers.0.self_attn.rotary_emb.inv_freq", shape: [8], dtype: "f32", chunks: () => [new Uint8Array(32)] },
    ]);
    expect((await openModel(directory)).weights.tensors.length).toBe(tensors.length);
  });
  test("names with control characters stay on one line of the error", async () => {
    const error = await refusal(weights(JSON.stringify({ "a\nb\u0000c": { ...F32, dtype: "\n" } }), { data: 16 }));
    expect(error.message).not.toMatch(/\p{Cc}/u);
  });
});

describe("shards", () => {
  const index = (directory: string) => join(directory, "model.safetensors.index.json");
  const editIndex = (edit: (map: Record<string, unknown>) => unknown) => {
    const directory = fresh(sharded);
    const json = JSON.parse(readFileSync(index(directory), "utf8")) as { weight_map: Record<string, unknown> };
    writeFileSync(index(directory), JSON.stringify({ ...json, weight_map: edit(json.weight_map) }));
    return directory;
  };
  const refuseIndex = (directory: string, field: string | RegExp, words?: RegExp) => expectRefusal(directory, "index.json", field, words);
  const norm = "model.norm.weight";

  test("a whole set opens", async () => {
    expect((await openModel(fresh(sharded))).weights.files.length).toBe(2);
  });
  test("broken index", async () => {
    await refuseIndex(editIndex(() => []), "weight_map");
    await refuseIndex(editIndex((map) => ({ ...map, [norm]: 5 })), `weight_map["${norm}"]`);
    const directory = fresh(sharded);
    writeFileSync(index(directory), "{");
    await refuseIndex(directory, "", /JSON/);
  });
  test("a shard outside the directory", async () => {
    for (const path of ["../model.safetensors", "/etc/passwd", "a/b.safetensors", "..", "x.bin", ".\u0000.safetensors"])
      await refuseIndex(editIndex((map) => ({ ...map, [norm]: path })), `weight_map["${norm}"]`, /beside the index/);
  });
  test("shards that are missing or disagree", async () => {
    const gone = fresh(sharded);
    rmSync(join(gone, "model-00002-of-00002.safetensors"));
    await refuseIndex(gone, "weight_map", /model-00002-of-00002\.safetensors/);
    await refuseIndex(editIndex((map) => ({ ...map, extra: map[norm] })), 'weight_map["extra"]', /does not hold/);
    await refuseIndex(editIndex((map) => ({ ...map, [norm]: map[norm] === "model-00001-of-00002.safetensors" ? "model-00002-of-00002.safetensors" : "model-00001-of-00002.safetensors" })), `weight_map["${norm}"]`, /but the tensor is in/);
    const twice = fresh(sharded);
    writeFileSync(join(twice, "model-00002-of-00002.safetensors"), readFileSync(join(twice, "model-00001-of-00002.safetensors")));
    await expectRefusal(twice, "model-00002-of-00002.safetensors", /^tensor/, /is also in/);
  });
  test("no weights at all", async () => {
    const directory = fresh();
    rmSync(join(directory, "model.safetensors"));
    await expectRefusal(directory, directory, "", /neither model\.safetensors nor/);
  });
});

describe("files that are not what they should be", () => {
  test("a directory or a FIFO in place of a file", async () => {
    const directory = fresh();
    rmSync(join(directory, "tokenizer.json"));
    mkdirSync(join(directory, "tokenizer.json"));
    await expectRefusal(directory, "tokenizer.json", "", /a directory, expected a regular file/);
    const fifo = fresh();
    rmSync(join(fifo, "generation_config.json"));
    execFileSync("mkfifo", [join(fifo, "generation_config.json")]);
    await expectRefusal(fifo, "generation_config.json", "", /not a regular file/);
  });
  test("broken JSON beside the weights", async () => {
    for (const name of ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"]) {
      for (const text of ["", "{", "[]", "null", '"x"', "[".repeat(100_000)]) {
        const directory = fresh();
        writeFileSync(join(directory, name), text);
        await expectRefusal(directory, name, "");
      }
    }
  });
});
