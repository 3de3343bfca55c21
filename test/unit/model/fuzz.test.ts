/** Valid tiny files with random damage: opening one gives a model or a ModelError, nothing else, and never takes much memory. */
import { afterAll, expect, test } from "bun:test";
import { mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { ModelError, openModel } from "../../../src/model/model.ts";
import { setLogSink } from "../../../src/telemetry/log.ts";
import { randomWord, tinyModel, writeTinyGguf, writeTinyHf } from "../../support/models.ts";

const scratch = mkdtempSync(join(tmpdir(), "layerscale-fuzz-"));
setLogSink(() => {});
afterAll(() => {
  rmSync(scratch, { recursive: true });
  setLogSink((line) => void process.stderr.write(line + "\n"));
});
/** Per test; the proofs run longer. */
const ROUNDS = process.env.LAYERSCALE_PROOFS ? 20_000 : 400;
const DEADLINE_MS = process.env.LAYERSCALE_PROOFS ? 1_800_000 : 120_000;

/** A reproducible stream of integers below a limit. */
function stream(seed: number): (limit: number) => number {
  let index = 0;
  return (limit) => randomWord(seed, index++) % limit;
}

/** Values that sit on edges of the formats' fields. */
const EDGES = [0n, 1n, 2n, 0x7fn, 0xffn, 0x7fff_ffffn, 0xffff_ffffn, 1n << 31n, 1n << 32n, 1n << 53n, (1n << 63n) - 1n, 1n << 63n, (1n << 64n) - 1n];

/** One to four edits inside the first `reach` bytes: bit flips, edge values over 4 or 8 bytes, removed or doubled stretches, cuts. */
function damage(bytes: Buffer, reach: number, next: (limit: number) => number): Buffer {
  let out = Buffer.from(bytes);
  for (let edits = 1 + next(4); edits > 0; edits--) {
    const at = next(Math.max(1, Math.min(reach, out.length - 8)));
    switch (next(6)) {
      case 0:
        out[at] = out[at]! ^ (1 << next(8));
        break;
      case 1:
        out[at] = next(256);
        break;
      case 2: {
        const edge = Buffer.alloc(8);
        edge.writeBigUInt64LE(EDGES[next(EDGES.length)]!);
        edge.copy(out, at, 0, next(2) ? 8 : 4);
        break;
      }
      case 3:
        out = Buffer.concat([out.subarray(0, at), out.subarray(at + 1 + next(16))]);
        break;
      case 4:
        out = Buffer.concat([out.subarray(0, at + 1 + next(16)), out.subarray(at)]);
        break;
      case 5:
        if (next(4) === 0) out = out.subarray(0, at);
        break;
    }
    if (out.length < 16) break;
  }
  return out;
}

/** Opens path; anything but a model or a ModelError fails with what is needed to run it again. */
async function outcome(path: string, label: string): Promise<"opened" | "refused"> {
  const before = process.memoryUsage.rss();
  try {
    const model = await openModel(path);
    for (const tensor of model.weights.tensors)
      expect(tensor.offset + tensor.bytes).toBeLessThanOrEqual(model.weights.files[tensor.file]!.bytes);
    return "opened";
  } catch (error) {
    if (!(error instanceof ModelError)) throw new Error(`${label}: ${String(error)}`, { cause: error });
    expect(error.message).not.toContain("\n");
    return "refused";
  } finally {
    expect(process.memoryUsage.rss() - before).toBeLessThan(64 << 20);
  }
}

for (const name of ["tiny-llama", "tiny-qwen3"])
  test(`GGUF headers: ${name}`, async () => {
    const path = writeTinyGguf(join(scratch, `${name}.gguf`), tinyModel(name), "q8_0");
    const bytes = readFileSync(path);
    const headerEnd = bytes.indexOf("blk.1.ffn_down.weight");
    const seen = { opened: 0, refused: 0 };
    for (let round = 0; round < ROUNDS; round++) {
      writeFileSync(path, damage(bytes, headerEnd, stream(round)));
      seen[await outcome(path, `round ${round}`)]++;
    }
    expect(seen.refused).toBeGreaterThan(ROUNDS / 10);
  }, DEADLINE_MS);

test("safetensors headers", async () => {
  const directory = writeTinyHf(join(scratch, "weights"), tinyModel("tiny-llama"));
  const path = join(directory, "model.safetensors");
  const bytes = readFileSync(path);
  const seen = { opened: 0, refused: 0 };
  for (let round = 0; round < ROUNDS; round++) {
    writeFileSync(path, damage(bytes, 8 + Number(bytes.readBigUInt64LE(0)), stream(1000 + round)));
    seen[await outcome(directory, `round ${round}`)]++;
  }
  expect(seen.refused).toBeGreaterThan(ROUNDS / 2);
}, DEADLINE_MS);

/** JSON values that a key of a configuration may hold by mistake. */
const VALUES: unknown[] = [null, true, false, 0, -1, 1, 2, 3, 1.5, 1e308, 2 ** 31, 2 ** 53, "", "silu", "64", [], [0], ["full_attention"], {}, { a: 1 }, { type: "linear", factor: 2 }, { rope_type: "yarn" }];

test("configuration values", async () => {
  const directory = writeTinyHf(join(scratch, "config"), tinyModel("tiny-qwen2"));
  const names = ["config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json", "model.safetensors.index.json"];
  const originals = new Map(names.map((name) => [name, JSON.parse(readFileSync(join(directory, name), "utf8")) as Record<string, unknown>]));
  const keys = ["rope_scaling", "rope_parameters", "layer_types", "head_dim", "partial_rotary_factor", "quantization_config", "text_config", "temperature", "top_p", "chat_template", "__proto__", "constructor"];
  const next = stream(77);
  const seen = { opened: 0, refused: 0 };
  for (let round = 0; round < ROUNDS; round++) {
    const name = names[next(10) < 6 ? 0 : next(names.length)]!;
    const original = originals.get(name)!;
    const all = [...Object.keys(original), ...keys];
    const key = all[next(all.length)]!;
    // Written as text, so that "__proto__" is a key like any other.
    const members = Object.entries({ ...original }).filter(([k]) => k !== key).map(([k, v]) => `${JSON.stringify(k)}:${JSON.stringify(v)}`);
    writeFileSync(join(directory, name), `{${[...members, `${JSON.stringify(key)}:${JSON.stringify(VALUES[next(VALUES.length)])}`].join(",")}}`);
    seen[await outcome(directory, `round ${round}: ${name} ${key}`)]++;
    writeFileSync(join(directory, name), JSON.stringify(original));
  }
  expect(seen.opened).toBeGreaterThan(0);
  expect(seen.refused).toBeGreaterThan(0);
}, DEADLINE_MS);
