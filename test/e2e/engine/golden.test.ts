/**
 * The native library against references that are not ours: test/golden holds what transformers computed in f32 on the same (dequantised) weights.
 * f32 weights: |Δ logprob| ≤ 1e-3 on the top 20 · bf16: ≤ 0.05 on the top 5 · quantised: ≤ 0.08 on the top 5; greedy tokens equal but at near-ties (gap < 0.02).
 * The same numbers hold cold, warm, chunked, in company, after preemption, on every instruction set of the machine.
 */
import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { openModel } from "../../../src/model/model.ts";
import type { LoadedModel } from "../../../src/model/types.ts";
import { readGolden, type Golden } from "../../support/golden.ts";
import { TINY_MODELS, writeTinyHf } from "../../support/models.ts";
import { smolVariant, type SmolVariant } from "../../support/smol-variants.ts";
import { NativeDriver, type Prediction, type Scenario } from "../../support/native-driver.ts";

const gguf = process.env.LAYERSCALE_TEST_GGUF!;
const NEAR_TIE = 0.02;

interface Rule {
  limit: number;
  /** How many of the reference's alternatives are compared. */
  top: number;
}
const EXACT: Rule = { limit: 1e-3, top: 20 };
const BF16: Rule = { limit: 0.05, top: 5 };
const QUANTISED: Rule = { limit: 0.08, top: 5 };
/** A choice of the user, not the default: keys and values lose 16 of their 24 bits. */
const BF16_CACHE: Rule = { limit: 0.15, top: 5 };

const work = mkdtempSync(join(tmpdir(), "layerscale-golden-"));
afterAll(() => rmSync(work, { recursive: true, force: true }));

const smol = async (target: SmolVariant): Promise<LoadedModel> => openModel(await smolVariant(target));

/** `brief`: cold and warm only; the weights of that case run through kernels that another case takes through every scenario. */
const cases: { name: string; golden: string; rule: Rule; open: () => Promise<LoadedModel>; kvCacheDtype?: "f32" | "bf16"; brief?: boolean }[] = [
  ...TINY_MODELS.map((model) => ({
    name: `${model.name} (${model.dtype})`,
    golden: model.name,
    rule: model.dtype === "f32" ? EXACT : BF16,
    open: () => openModel(writeTinyHf(join(work, model.name), model)),
  })),
  { name: "SmolLM2 Q4_1, the published file", golden: "smollm2-q4_1", rule: QUANTISED, open: () => openModel(gguf) },
  { name: "SmolLM2 Q8_0", golden: "smollm2-q8_0", rule: QUANTISED, open: () => smol("q8_0") },
  { name: "SmolLM2 Q4_0", golden: "smollm2-q4_0", rule: QUANTISED, open: () => smol("q4_0"), brief: true },
  { name: "SmolLM2 bf16, Hugging Face directory", golden: "smollm2-bf16", rule: BF16, open: () => smol("hf-bf16") },
  { name: "SmolLM2 bf16, GGUF", golden: "smollm2-bf16", rule: BF16, open: () => smol("bf16"), brief: true },
  { name: "SmolLM2 f16, Hugging Face directory", golden: "smollm2-f16", rule: EXACT, open: () => smol("hf-f16"), brief: true },
  { name: "SmolLM2 f16, GGUF", golden: "smollm2-f16", rule: EXACT, open: () => smol("f16"), brief: true },
  { name: "SmolLM2 f32", golden: "smollm2-q4_1", rule: EXACT, open: () => smol("hf-f32"), brief: true },
  { name: "SmolLM2 Q4_1 with a bf16 cache", golden: "smollm2-q4_1", rule: BF16_CACHE, open: () => openModel(gguf), kvCacheDtype: "bf16", brief: true },
];

/** What breaks the rule, in words; empty when all holds. */
function violations(golden: Golden, predictions: Prediction[][], rule: Rule): string[] {
  const found: string[] = [];
  golden.prompts.forEach((prompt, p) => {
    prompt.greedy.forEach((expected, i) => {
      const row = predictions[p]?.[i];
      const where = `prompt of ${prompt.tokens.length}, token ${i}`;
      if (!row) return found.push(`${where}: missing`);
      const mine = new Map(row.top);
      for (const { id, logprob } of prompt.top[i]!.slice(0, rule.top)) {
        const got = mine.get(id);
        // The last of 20 may fall out of our 20 by a hair; then all of ours must be at least that likely.
        if (got === undefined ? row.top.at(-1)![1] < logprob - rule.limit : Math.abs(got - logprob) > rule.limit) found.push(`${where}: logprob of ${id} is ${got}, reference ${logprob}`);
      }
      if (row.token !== expected && prompt.gaps[i]! >= NEAR_TIE) found.push(`${where}: greedy ${row.token}, reference ${expected}, gap ${prompt.gaps[i]}`);
    });
  });
  return found;
}

const bits = (predictions: Prediction[][]) => predictions.map((rows) => rows.map(({ token, logprob, top }) => [token, logprob, top]));
const ISAS = ["avx2", "avx512", "amx"] as const;

/** Instruction sets of this machine, weakest first. */
async function machineIsas(): Promise<string[]> {
  using probe = await NativeDriver.create(await openModel(writeTinyHf(join(work, "probe"), TINY_MODELS[0]!)));
  return ISAS.filter((isa) => probe.isas.includes(isa));
}
const isas = await machineIsas();

describe.each(isas)("%s", (isa) => {
  let forced: string | undefined;
  beforeAll(() => {
    forced = process.env.LAYERSCALE_CPU_ISA;
    process.env.LAYERSCALE_CPU_ISA = isa;
  });
  afterAll(() => {
    if (forced === undefined) delete process.env.LAYERSCALE_CPU_ISA;
    else process.env.LAYERSCALE_CPU_ISA = forced;
  });

  test.each(cases)("$name", async ({ golden: name, rule, open, kvCacheDtype, brief }) => {
    const golden = readGolden(name);
    const items = golden.prompts.map((prompt) => ({ prompt: prompt.tokens, continuation: prompt.greedy }));
    using driver = await NativeDriver.create(await open(), kvCacheDtype ? { kvCacheDtype } : {});
    expect(driver.isa).toBe(isa);
    const cold = driver.run(items);
    expect(cold.known.every((tokens) => tokens === 0)).toBe(true);
    expect(violations(golden, cold.predictions, rule)).toEqual([]);

    // Everything else must give the very same bits, so the rule holds there too.
    const warm = driver.run(items);
    // Shared pages, and the head of the next one copied: only the last token is computed.
    expect(warm.known).toEqual(items.map(({ prompt }) => prompt.length - 1));
    expect(bits(warm.predictions)).toEqual(bits(cold.predictions));
    const scenarios: [string, Scenario][] = [
      ["chunks of 16", { chunk: 16 }],
      ["with 15 others", { company: 15 }],
      ["preempted", { preemptAfter: 21 }],
    ];
    for (const [what, scenario] of brief && !process.env.LAYERSCALE_PROOFS ? [] : scenarios) {
      driver.clearCache();
      expect([what, bits(driver.run(items, scenario).predictions)]).toEqual([what, bits(cold.predictions)]);
    }
    expect(driver.held).toBe(0);
  }, 600_000);
});
