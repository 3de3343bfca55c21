/**
 * Load over HTTP: random requests, a third of them cancelled, a tenth invalid. Nothing may be left held, and the counters must add up.
 * 1,000 requests on a tiny model; with LAYERSCALE_PROOFS=1 20,000, and 1,000 on the default model.
 */
import { afterAll, expect, test } from "bun:test";
import { mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { eventually, launch, required } from "../../support/launch.ts";
import { tinyModel, writeTinyHf } from "../../support/models.ts";
import { Random } from "../../support/random.ts";

const PROOFS = Boolean(process.env.LAYERSCALE_PROOFS);
const STREAMS = 24;
const work = mkdtempSync(join(tmpdir(), "layerscale-soak-"));
afterAll(() => rmSync(work, { recursive: true, force: true }));

interface Load {
  name: string;
  model: () => string;
  requests: number;
  /** Prompts are ids below it. */
  vocabulary: number;
  promptTokens: number;
}
const LOADS: Load[] = [
  { name: "a tiny model", model: () => writeTinyHf(join(work, "tiny-qwen3"), tinyModel("tiny-qwen3")), requests: PROOFS ? 20_000 : 1_000, vocabulary: 300, promptTokens: 200 },
  ...(PROOFS ? [{ name: "the default model", model: () => required("LAYERSCALE_TEST_GGUF"), requests: 1_000, vocabulary: 20_000, promptTokens: 60 }] : []),
];

test.each(LOADS)("random requests, a third cancelled, a tenth invalid: $name", async (load) => {
  const { requests } = load;
  const model = load.model();
  await using server = launch(["serve", "--model", model, "--port", "0", "--max-total-tokens", "2048", "--max-num-seqs", "12"]);
  const url = (await server.log("listening")).url as string;
  await server.log("ready");
  const source = new Random(7);
  const random = (below: number): number => source.below(below);
  const wrong: string[] = [];
  let next = 0;
  let refused = 0;
  let answered = 0;
  let left = 0;

  const one = async (index: number): Promise<void> => {
    const prompt = Array.from({ length: 1 + random(load.promptTokens) }, () => random(load.vocabulary));
    const stream = random(2) === 0;
    const body: Record<string, unknown> = { prompt, max_tokens: 1 + random(24), temperature: random(2), seed: index, stream, ignore_eos: true };
    const invalid = index % 10 === 0;
    if (invalid) Object.assign(body, [{ prompt: [999_999] }, { top_k: 5 }, { max_tokens: -1 }, { prompt: Array(10_000).fill(1) }][random(4)]);
    const leave = new AbortController();
    const cancelled = !invalid && index % 3 === 0;
    try {
      const response = await fetch(`${url}/v1/completions`, { method: "POST", body: JSON.stringify(body), signal: leave.signal });
      if (invalid) {
        refused++;
        if (response.status !== 400) wrong.push(`request ${index}: status ${response.status} for ${JSON.stringify(body).slice(0, 80)}`);
        await response.text();
        return;
      }
      if (cancelled && response.body) {
        await response.body.getReader().read();
        left++;
        leave.abort();
        return;
      }
      const text = await response.text();
      answered++;
      if (response.status !== 200 || (stream && !text.endsWith("data: [DONE]\n\n"))) wrong.push(`request ${index}: status ${response.status} ${text.slice(-100)}`);
    } catch (error) {
      if (!cancelled) wrong.push(`request ${index}: ${error}`);
      else left++;
    }
  };
  await Promise.all(
    Array.from({ length: STREAMS }, async () => {
      while (next < requests) await one(next++);
    }),
  );

  expect(wrong).toEqual([]);
  expect(answered + refused + left).toBe(requests);
  const metrics = async () => {
    const text = await (await fetch(`${url}/metrics`)).text();
    return (name: string) => text.split("\n").filter((line) => line.startsWith(name)).reduce((sum, line) => sum + Number(line.slice(line.lastIndexOf(" ") + 1)), 0);
  };
  const value = await eventually(async () => {
    const read = await metrics();
    return read("layerscale_kv_pages_held ") === 0 && read("layerscale_requests_running ") === 0 && read("layerscale_requests_queued ") === 0 ? read : null;
  }, "no page held, nothing running");
  expect(value("layerscale_kv_pages_free ") + value("layerscale_kv_pages_cached ")).toBe(value("layerscale_kv_pages "));
  // Refused ones count as failed, and nothing else failed.
  expect(value('layerscale_requests_total{outcome="failed"')).toBe(refused);
  expect(value("layerscale_requests_total{")).toBe(requests);
  server.signal("SIGTERM");
  expect(await server.exit()).toBe(0);
}, PROOFS ? 1_800_000 : 120_000);
