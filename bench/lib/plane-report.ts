import type { LatencyRow, Percentiles } from "./plane-latency.ts";
import { median } from "./report.ts";

/** One sample of one deployment. */
export interface PlaneRow {
  worker: string;
  streams: number;
  tokens: number;
  /** Events with text at the client. */
  events: number;
  seconds: number;
  tokensPerSecond: number;
  /** Sent to first event, of each request. */
  firstMs: number[];
  /** Processor time per token. */
  frontendMicros: number;
  workerMicros: number;
  clientMicros: number;
  /** Of the worker, by thread name. */
  threads: Record<string, number>;
}

const fixed = (value: number, digits = 1) => (Number.isFinite(value) ? value.toFixed(digits) : "–");

/** Markdown: throughput per number of streams and worker (median, min–max), then added latency. */
export function planeTable(rows: PlaneRow[], latency: LatencyRow[], cpu: string, cores: number): string {
  const lines = [`Machine: ${cpu}, ${cores} cores, shared by client, frontend and worker`, "", "| streams | worker | tok/s | min–max | tokens/event | first token p50 ms | frontend µs/token | worker µs/token | client µs/token |", "|---|---|---|---|---|---|---|---|---|"];
  const workers = [...new Set(rows.map((row) => row.worker))];
  const streams = [...new Set(rows.map((row) => row.streams))];
  for (const n of streams)
    for (const worker of workers) {
      const own = rows.filter((row) => row.streams === n && row.worker === worker);
      if (own.length === 0) continue;
      const rates = own.map((row) => row.tokensPerSecond);
      const middle = (read: (row: PlaneRow) => number) => median(own.map(read));
      lines.push(`| ${n} | ${worker} | ${fixed(median(rates), 0)} | ${fixed(Math.min(...rates), 0)}–${fixed(Math.max(...rates), 0)} | ${fixed(middle((row) => row.tokens / row.events), 2)} | ${fixed(median(own.flatMap((row) => row.firstMs)))} | ${fixed(middle((row) => row.frontendMicros))} | ${fixed(middle((row) => row.workerMicros))} | ${fixed(middle((row) => row.clientMicros))} |`);
    }
  if (latency.length > 0) lines.push("", "| streams | from the sample to | step ms | tokens | under way p50 ms | p90 | p99 | added to the time per token p50 ms | p90 | p99 |", "|---|---|---|---|---|---|---|---|---|---|");
  const shares = ({ p50, p90, p99 }: Percentiles) => [p50, p90, p99].map((value) => fixed(value, 2)).join(" | ");
  for (const row of latency) lines.push(`| ${row.streams} | the ${row.to} | ${row.stepMs} | ${row.tokens} | ${shares(row.delay)} | ${shares(row.between)} |`);
  return lines.join("\n");
}
