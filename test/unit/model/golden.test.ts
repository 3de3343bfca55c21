import { afterAll, describe, expect, test } from "bun:test";
import { createHash } from "node:crypto";
import { mkdtempSync, readdirSync, readFileSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { type LoadedModel, openModel } from "../../../src/model/model.ts";
import { readGolden } from "../../support/golden.ts";
import { TINY_MODELS, writeTinyGguf, writeTinyHf } from "../../support/models.ts";
import { ReferenceModel } from "../../support/reference-model.ts";

const scratch = mkdtempSync(join(tmpdir(), "layerscale-golden-"));
afterAll(() => rmSync(scratch, { recursive: true }));

/** Steps of the continuation that are compared, to keep a float64 pass in TypeScript short. */
const STEPS = 16;
/** Longest prompt compared for GGUF files; directories get all of them. */
const GGUF_PROMPT = 33;

const DEADLINE_MS = 120_000;

/** Largest difference from the reference's top-20 log-probabilities. */
function worst(model: LoadedModel, name: string, maxPrompt: number): number {
  const reference = new ReferenceModel(model);
  let worst = 0;
  for (const prompt of readGolden(name).prompts.filter((prompt) => prompt.tokens.length <= maxPrompt)) {
    const rows = reference.logprobs([...prompt.tokens, ...prompt.greedy.slice(0, STEPS - 1)]).slice(prompt.tokens.length - 1);
    rows.forEach((row, step) => {
      for (const { id, logprob } of prompt.top[step]!) worst = Math.max(worst, Math.abs(row[id]! - logprob));
    });
  }
  return worst;
}

for (const tiny of TINY_MODELS) {
  describe(tiny.name, () => {
    const directory = writeTinyHf(join(scratch, tiny.name), tiny);

    test("weights are the bytes the golden data was made from", () => {
      const hash = createHash("sha256");
      for (const file of readdirSync(directory).filter((name) => name.endsWith(".safetensors")).sort()) hash.update(readFileSync(join(directory, file)));
      expect(hash.digest("hex")).toBe(readGolden(tiny.name).source);
    });

    test("rotary frequencies equal the reference's", async () => {
      const { invFreq } = (await openModel(directory)).spec.rope;
      const expected = readGolden(tiny.name).invFreq;
      expect(invFreq.length).toBe(expected.length);
      // The reference's power function is within one unit in the last place of float32.
      invFreq.forEach((freq, i) => expect(Math.abs(freq / expected[i]! - 1)).toBeLessThan(2.5e-7));
    });

    test("log-probabilities equal the reference's, read from the directory", async () => {
      expect(worst(await openModel(directory), tiny.name, Infinity)).toBeLessThan(1e-3);
    }, DEADLINE_MS);

    test("log-probabilities equal the reference's, read from a GGUF", async () => {
      const path = writeTinyGguf(join(scratch, `${tiny.name}.gguf`), tiny, tiny.dtype);
      expect(worst(await openModel(path), tiny.name, GGUF_PROMPT)).toBeLessThan(1e-3);
    }, DEADLINE_MS);
  });
}
