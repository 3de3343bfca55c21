/** Three prefill and two decode workers under mixed load, a third of it cancelled at a random moment: nothing stays behind. 30 s, or 10 minutes as a proof. */
import { expect, test } from "bun:test";
import { Random } from "../../support/random.ts";
import { exact, nothingStaged, prompt } from "./disagg-support.ts";
import { Deployment, LIMIT_MS } from "./support.ts";

const SECONDS = process.env.LAYERSCALE_PROOFS ? 600 : 30;
const CLIENTS = 8;

test(`${SECONDS} s: no page held, no copy staged, no server error`, async () => {
  await using d = await Deployment.start("kv");
  const role = (mode: string) => d.worker(["--disaggregation-mode", mode, "--max-total-tokens", "8192", "--max-num-seqs", "8"], { served: false, env: { POD_IP: "127.0.0.1" } });
  const prefills = await Promise.all([role("prefill"), role("prefill"), role("prefill")]);
  const decodes = await Promise.all([role("decode"), role("decode")]);
  await d.served();

  const end = performance.now() + SECONDS * 1000;
  const statuses = new Map<number | "cancelled" | "error", number>();
  const count = (status: number | "cancelled" | "error") => statuses.set(status, (statuses.get(status) ?? 0) + 1);
  const client = async (n: number) => {
    const draw = new Random(1000 + n);
    while (performance.now() < end) {
      const leave = new AbortController();
      const timer = draw.next() < 1 / 3 ? setTimeout(() => leave.abort(), draw.below(1500)) : undefined;
      const stream = draw.next() < 0.5;
      try {
        const response = await d.request("completions", prompt(1 + draw.below(400), draw.below(40)), { max_tokens: 1 + draw.below(40), stream, ...exact }, AbortSignal.any([leave.signal, AbortSignal.timeout(LIMIT_MS)]));
        const text = await response.text();
        count(stream && text.includes('"error"') ? "error" : response.status);
      } catch (error) {
        if (!leave.signal.aborted) throw error;
        count("cancelled");
      }
      clearTimeout(timer);
    }
  };
  await Promise.all(Array.from({ length: CLIENTS }, (_, n) => client(n)));

  expect([...statuses.keys()].filter((status) => status !== 200 && status !== "cancelled")).toEqual([]);
  expect(statuses.get(200)!).toBeGreaterThan(SECONDS / 3);
  expect(statuses.get("cancelled")!).toBeGreaterThan(0);
  for (const worker of [...prefills, ...decodes]) {
    await worker.idle();
    await nothingStaged(worker);
    expect([await worker.metric("layerscale_kv_transfers_pulling"), await worker.metric("layerscale_kv_transfers_filling"), await worker.metric("layerscale_stalls_total")]).toEqual([0, 0, 0]);
  }
  const moved = await Promise.all(decodes.map((worker) => worker.metric("layerscale_kv_transfer_bytes_total")));
  expect(moved.every((bytes) => bytes! > 0)).toBe(true);
  console.log(`disaggregated soak: ${JSON.stringify(Object.fromEntries(statuses))}`);
}, (SECONDS + 300) * 1000);
