import type { MachineLimits } from "./limits.ts";

export interface Row {
  kind: string;
  measure: string;
  unit: string;
  better: "more" | "less";
  server: string;
  samples: number[];
  weightBytes: number;
}

export function median(values: number[]): number {
  const sorted = [...values].sort((a, b) => a - b);
  const middle = sorted.length >> 1;
  return sorted.length === 0 ? NaN : sorted.length % 2 ? sorted[middle]! : (sorted[middle - 1]! + sorted[middle]!) / 2;
}

const show = (value: number) => (Number.isNaN(value) ? "-" : value >= 100 ? value.toFixed(0) : value >= 10 ? value.toFixed(1) : value.toFixed(2));

/**
 * Markdown: a row per measure, a column per server (median, min-max), and LayerScale's ratio to the best peer: above 1 always means that
 * LayerScale is better. Decode rows add the share of the machine's memory bandwidth.
 */
export function table(rows: Row[], limits: MachineLimits): string {
  const servers = [...new Set(rows.map((row) => row.server))];
  const lines = [
    `Machine: ${limits.threads} threads, memory read ${limits.read_gb_s} GB/s, f32 multiply-add ${limits.fma_gflop_s} GFLOP/s`,
    "",
    `| weights | measure | ${servers.join(" | ")} | layerscale / best peer |`,
    `|${"---|".repeat(servers.length + 3)}`,
  ];
  const keys = [...new Set(rows.map((row) => `${row.kind}\0${row.measure}`))];
  for (const key of keys) {
    const group = rows.filter((row) => `${row.kind}\0${row.measure}` === key);
    const first = group[0]!;
    const cells = servers.map((name) => {
      const row = group.find((item) => item.server === name);
      if (!row || row.samples.length === 0) return "-";
      const value = median(row.samples);
      const share = row.measure.startsWith("decode, 1") ? `, ${Math.round((100 * value * row.weightBytes) / (limits.read_gb_s * 1e9))} % of bandwidth` : "";
      const spread = row.samples.length > 1 ? ` (${show(Math.min(...row.samples))}-${show(Math.max(...row.samples))})` : "";
      return `${show(value)}${spread}${share}`;
    });
    const mine = median(group.find((row) => row.server === "layerscale")?.samples ?? []);
    const peers = group.filter((row) => row.server !== "layerscale" && row.samples.length).map((row) => median(row.samples));
    const best = first.better === "more" ? Math.max(...peers) : Math.min(...peers);
    const ratio = peers.length === 0 ? NaN : first.better === "more" ? mine / best : best / mine;
    lines.push(`| ${first.kind} | ${first.measure} (${first.unit}) | ${cells.join(" | ")} | ${show(ratio)} |`);
  }
  return lines.join("\n");
}
