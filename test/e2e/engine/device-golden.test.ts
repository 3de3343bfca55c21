/**
 * Tiny models on whichever library is found against test/golden, which transformers computed in f32. On a GPU activations are bf16 between layers:
 * |Δ logprob| ≤ 0.25 and 0.05 on average over the reference's 5 best, greedy tokens equal where the best leads by more than 0.1.
 * golden.test.ts holds the CPU library to tighter rules and to SmolLM2.
 */
import { afterAll, expect, test } from "bun:test";
import { mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { openModel } from "../../../src/model/model.ts";
import { readGolden } from "../../support/golden.ts";
import { TINY_MODELS, writeTinyHf } from "../../support/models.ts";
import { nativeDevice } from "../../support/native-device.ts";
import { NativeDriver } from "../../support/native-driver.ts";

const { options, simulated } = await nativeDevice();
const work = mkdtempSync(join(tmpdir(), "layerscale-device-golden-"));
afterAll(() => rmSync(work, { recursive: true, force: true }));
/** Prompts of up to this many tokens, and as many tokens after them. */
const [LONGEST, TOKENS] = simulated ? [17, 3] : [Infinity, Infinity];
const models = simulated ? TINY_MODELS.filter(({ name }) => ["tiny-llama-llama3", "tiny-qwen2-bf16", "tiny-qwen3"].includes(name)) : TINY_MODELS;

test.each(models)("$name", async (model) => {
  const prompts = readGolden(model.name).prompts.filter(({ tokens }) => tokens.length <= LONGEST);
  const items = prompts.map(({ tokens, greedy }) => ({ prompt: tokens, continuation: greedy.slice(0, TOKENS) }));
  using driver = await NativeDriver.create(await openModel(writeTinyHf(join(work, model.name), model)), { gpu: options.gpu, kvCacheDtype: options.kvCacheDtype });
  for (const how of ["cold", "warm"]) {
    const { predictions } = driver.run(items);
    const problems: string[] = [];
    let sum = 0;
    let count = 0;
    for (const [p, prompt] of prompts.entries())
      for (const [i, expected] of items[p]!.continuation.entries()) {
        const row = predictions[p]![i]!;
        const mine = new Map(row.top);
        for (const { id, logprob } of prompt.top[i]!.slice(0, 5)) {
          const got = mine.get(id);
          const off = got === undefined ? Infinity : Math.abs(got - logprob);
          if (!(off <= 0.25)) problems.push(`${how}, prompt of ${prompt.tokens.length}, token ${i}: logprob of ${id} is ${got}, reference ${logprob}`);
          sum += off;
          count++;
        }
        if (row.token !== expected && prompt.gaps[i]! > 0.1) problems.push(`${how}, prompt of ${prompt.tokens.length}, token ${i}: greedy ${row.token}, reference ${expected}, gap ${prompt.gaps[i]}`);
      }
    expect(problems).toEqual([]);
    expect([how, sum / count <= 0.05, sum / count]).toEqual([how, true, sum / count]);
  }
  expect(driver.held).toBe(0);
}, 120_000);
