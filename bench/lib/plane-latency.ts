/** Added latency: from the device's sample to the client's event, with a device that takes a fixed time for each step. */
import { dlopen } from "bun:ffi";
import { mkdtempSync, readFileSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { load, firstToken, promptOf, stream, type StreamResult } from "./plane-client.ts";
import { direct } from "./plane-direct.ts";
import { deploy, nullWorker } from "./plane-deploy.ts";

export interface LatencyRow {
  streams: number;
  /** Where a token's way ends: at the client, or at the socket where the frontend would take it. */
  to: "client" | "frontend";
  stepMs: number;
  tokens: number;
  /** Arrival − token sampled, ms: how long a token is under way. */
  delay: Percentiles;
  /** Time since the token before at the arrival − the same at the device, ms, without sign: what the plane adds to the time per token. */
  between: Percentiles;
}
export interface Percentiles {
  p50: number;
  p90: number;
  p99: number;
}
/** One request's tokens in order: when the device sampled each, and when each arrived; ms of the same clock. */
interface Way {
  sampled: number[];
  arrived: number[];
}

const STEP_MS = 10;
const PROMPT_TOKENS = 32;
const TOKENS = 256;
const WARM_STREAMS = 64;
const RECORD_BYTES = 16;
const CLOCK_MONOTONIC = 1;

export async function addedLatency(options: { program: string; library: string; model: string; python: string; logs: string; streamCounts: number[] }): Promise<LatencyRow[]> {
  const home = mkdtempSync(join(tmpdir(), "layerscale-trace-"));
  const trace = join(home, "trace");
  const d = await deploy(nullWorker(options.program, options.library, options.model, { LAYERSCALE_NULL_STEP_US: String(STEP_MS * 1000), LAYERSCALE_NULL_TRACE: trace }), options.python, options.logs);
  try {
    const origin = monotonicOrigin();
    const rows: LatencyRow[] = [];
    let first = 1;
    // Code is compiled on both sides before anything counts.
    for (let round = 0; round < 2; round++) {
      const warm = (first += WARM_STREAMS) - WARM_STREAMS;
      await load(WARM_STREAMS, WARM_STREAMS, (i) => stream(d.port, d.model, promptOf(warm + i, PROMPT_TOKENS), TOKENS, true));
      await direct(d.kv, Array.from({ length: WARM_STREAMS }, (_, i) => promptOf(warm + i, PROMPT_TOKENS)), TOKENS);
    }
    for (const streams of options.streamCounts) {
      const add = (to: LatencyRow["to"], ways: Way[]) => {
        const delays = ways.flatMap(({ sampled, arrived }) => arrived.map((at, n) => at - sampled[n]!));
        const between = ways.flatMap(({ sampled, arrived }) => arrived.slice(1).map((at, n) => Math.abs(at - arrived[n]! - (sampled[n + 1]! - sampled[n]!))));
        rows.push({ streams, to, stepMs: STEP_MS, tokens: delays.length, delay: percentiles(delays), between: percentiles(between) });
      };
      const base = (first += streams) - streams;
      const { results } = await load(streams, streams, async (i) => ({ ...(await stream(d.port, d.model, promptOf(base + i, PROMPT_TOKENS), TOKENS, true)), request: base + i }));
      add("client", match(results as (StreamResult & { request: number })[], readTrace(trace), origin));
      const alone = (first += streams) - streams;
      const prompts = Array.from({ length: streams }, (_, i) => promptOf(alone + i, PROMPT_TOKENS));
      const arrived = await direct(d.kv, prompts, TOKENS);
      const samples = readTrace(trace);
      add("frontend", arrived.map(({ arrivals }, i) => ({ sampled: samples.get(firstToken(alone + i))!, arrived: arrivals.map((at) => at + origin) })));
    }
    return rows;
  } finally {
    await d.stop();
    rmSync(home, { recursive: true, force: true });
  }
}

function percentiles(values: number[]): Percentiles {
  const sorted = values.toSorted((a, b) => a - b);
  const at = (share: number) => sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length))]!;
  return { p50: at(0.5), p90: at(0.9), p99: at(0.99) };
}

/** What to add to performance.now() for the machine's monotonic clock, which the trace uses, in ms. */
function monotonicOrigin(): number {
  const libc = dlopen("libc.so.6", { clock_gettime: { args: ["i32", "ptr"], returns: "i32" } });
  const time = new BigInt64Array(new ArrayBuffer(16));
  const before = performance.now();
  if (libc.symbols.clock_gettime(CLOCK_MONOTONIC, time) !== 0) throw new Error("clock_gettime failed");
  const between = (before + performance.now()) / 2;
  return Number(time[0]) * 1000 + Number(time[1]) / 1e6 - between;
}

/** When each token of each request was sampled, ms of the monotonic clock: by first prompt token, in order. */
function readTrace(path: string): Map<number, number[]> {
  const bytes = readFileSync(path);
  const samples = new Map<number, number[]>();
  for (let at = 0; at + RECORD_BYTES <= bytes.length; at += RECORD_BYTES) {
    const tag = bytes.readInt32LE(at);
    const list = samples.get(tag) ?? [];
    list.push(Number(bytes.readBigInt64LE(at + 8)) / 1e6);
    samples.set(tag, list);
  }
  return samples;
}

/** An event may hold the tokens of several steps: its length tells how many, since all tokens are one word. */
function match(results: (StreamResult & { request: number })[], samples: Map<number, number[]>, origin: number): Way[] {
  const word = Math.min(...results.flatMap(({ textLengths }) => textLengths.filter((length) => length > 0)));
  return results.map(({ request, eventsAt, textLengths, tokens }) => {
    const sampled = samples.get(firstToken(request)) ?? [];
    const arrivals = textLengths.flatMap((length, i) => Array<number>(length / word).fill(eventsAt[i]!));
    if (arrivals.length !== tokens || sampled.length !== tokens) throw new Error(`request ${request}: ${tokens} tokens, text of ${arrivals.length}, ${sampled.length} samples`);
    return { sampled, arrived: arrivals.map((at) => at + origin) };
  });
}
