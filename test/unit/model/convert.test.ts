import { afterAll, describe, expect, test } from "bun:test";
import { mkdtempSync, readdirSync, readFileSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { convert } from "../../../scripts/models/convert.ts";
import { dequantize, permuteHeads, quantize, storedBytes } from "../../../scripts/models/quantize.ts";
import { readGguf } from "../../../src/model/gguf.ts";
import { openModel } from "../../../src/model/model.ts";
import { readSafetensors } from "../../../src/model/safetensors.ts";
import { randomWord, tinyModel, writeTinyGguf, writeTinyHf } from "../../support/models.ts";

const scratch = mkdtempSync(join(tmpdir(), "layerscale-convert-"));
afterAll(() => rmSync(scratch, { recursive: true }));

describe("weight formats", () => {
  const bytes = (...values: number[]) => Uint8Array.from(values);
  test("blocks are decoded as their formats define them", () => {
    const nibbles = Array.from({ length: 16 }, (_, i) => i | ((15 - i) << 4)); // low: 0..15, high: 15..0
    // f16 0x3800 = 0.5, 0xbc00 = -1
    const q4_0 = dequantize(bytes(0x00, 0x38, ...nibbles), "q4_0", 32);
    expect([q4_0[0], q4_0[15], q4_0[16], q4_0[31]]).toEqual([-4, 3.5, 3.5, -4]);
    const q4_1 = dequantize(bytes(0x00, 0x38, 0x00, 0xbc, ...nibbles), "q4_1", 32);
    expect([q4_1[0], q4_1[15], q4_1[16], q4_1[31]]).toEqual([-1, 6.5, 6.5, -1]);
    const q8_0 = dequantize(bytes(0x00, 0x38, ...Array.from({ length: 32 }, (_, i) => (i === 0 ? 0x80 : i === 1 ? 0x7f : i))), "q8_0", 32);
    expect([q8_0[0], q8_0[1], q8_0[31]]).toEqual([-64, 63.5, 15.5]);
    expect([...dequantize(bytes(0x80, 0x3f, 0x00, 0xc0), "bf16", 2)]).toEqual([1, -2]);
    expect([...dequantize(bytes(0x00, 0x3c, 0x01, 0x00), "f16", 2)]).toEqual([1, 2 ** -24]);
  });
  test("bf16 rounds to nearest even", () => {
    const bits = (value: number) => Buffer.from(quantize(Float32Array.of(value), "bf16")).readUInt16LE();
    expect(bits(1 + 2 ** -8)).toBe(0x3f80); // tie, even below
    expect(bits(1 + 3 * 2 ** -8)).toBe(0x3f82); // tie, even above
    expect(bits(1 + 2 ** -8 + 2 ** -20)).toBe(0x3f81);
    expect(bits(Infinity)).toBe(0x7f80);
    expect(bits(-0)).toBe(0x8000);
    expect(bits(NaN) & 0x7fff).toBeGreaterThan(0x7f80);
  });
  for (const [dtype, tolerance] of [["f32", 0], ["f16", 2 ** -11], ["bf16", 2 ** -8], ["q8_0", 1 / 254 + 1e-3], ["q4_0", 1 / 8 + 1e-3], ["q4_1", 1 / 15 + 1e-3]] as const)
    test(`${dtype}: encoding keeps every value within half a step`, () => {
      const values = Float32Array.from({ length: 1024 }, (_, i) => (randomWord(9, i) / 2 ** 32 - 0.5) * 2);
      const back = dequantize(quantize(values, dtype), dtype, values.length);
      back.forEach((value, i) => expect(Math.abs(value - values[i]!)).toBeLessThanOrEqual(tolerance));
      expect(quantize(new Float32Array(32), dtype).length).toBe(storedBytes(dtype, 32));
      expect([...dequantize(quantize(new Float32Array(32), dtype), dtype, 32)].every((value) => value === 0)).toBe(true);
    });
  test("interleaving heads", () => {
    // Two heads of 4 rows, one column: halves (0,1 | 2,3) become pairs (0,2), (1,3).
    const rows = Float32Array.of(0, 1, 2, 3, 10, 11, 12, 13);
    expect([...permuteHeads(rows, 2, 1, true)]).toEqual([0, 2, 1, 3, 10, 12, 11, 13]);
    expect([...permuteHeads(permuteHeads(rows, 2, 1, true), 2, 1, false)]).toEqual([...rows]);
  });
});

describe("conversions", () => {
  for (const name of ["tiny-llama", "tiny-llama-linear", "tiny-qwen2-bf16", "tiny-qwen3"])
    test(`${name}: a GGUF becomes the directory it was made from`, async () => {
      const tiny = tinyModel(name);
      const original = writeTinyHf(join(scratch, name), { ...tiny, shards: 1 });
      const made = join(scratch, `${name}-made`);
      await convert(writeTinyGguf(join(scratch, `${name}.gguf`), tiny, "f32"), made, `hf-${tiny.dtype}`);
      const tensors = (directory: string) => {
        const path = join(directory, "model.safetensors");
        const bytes = readFileSync(path);
        return Object.fromEntries(readSafetensors(path).tensors.map((tensor) => [tensor.name, bytes.subarray(tensor.offset, tensor.offset + tensor.bytes).toString("base64")]));
      };
      expect(tensors(made)).toEqual(tensors(original));
      const [a, b] = [await openModel(made), await openModel(original)];
      expect({ ...a.spec, rmsEps: Math.fround(a.spec.rmsEps) }).toEqual({ ...b.spec, rmsEps: Math.fround(b.spec.rmsEps) });
      expect(a.assets.tokenizerJson).toEqual(b.assets.tokenizerJson);
      expect(readdirSync(made).sort()).toEqual(["config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]);
    });
  test("between GGUF formats: metadata kept, vectors f32, a 4-bit file's embedding q8_0", async () => {
    const source = writeTinyGguf(join(scratch, "source.gguf"), tinyModel("tiny-qwen2"), "f32");
    for (const dtype of ["f32", "f16", "bf16", "q8_0", "q4_0", "q4_1"] as const) {
      const path = join(scratch, `to-${dtype}.gguf`);
      await convert(source, path, dtype);
      const model = await openModel(path);
      const type = (name: string) => model.weights.tensors.find((tensor) => tensor.name === name)!.dtype;
      expect(type("blk.0.attn_q.weight")).toBe(dtype);
      expect(type("blk.0.attn_q.bias")).toBe("f32");
      expect(type("token_embd.weight")).toBe(dtype.startsWith("q4") ? "q8_0" : dtype);
      const { "general.file_type": _, ...metadata } = readGguf(path).metadata;
      expect(metadata).toEqual({ ...readGguf(source).metadata });
    }
  });
  test("a GGUF whose rope factors config.json cannot express is refused", async () => {
    const source = writeTinyGguf(join(scratch, "llama3.gguf"), tinyModel("tiny-llama-llama3"), "f32");
    await expect(convert(source, join(scratch, "llama3"), "hf-f32")).rejects.toThrow(/rope_freqs/);
    await expect(convert(source, join(scratch, "x"), "q5_0")).rejects.toThrow(/unknown target q5_0/);
  });
});
