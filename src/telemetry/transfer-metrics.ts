import { Counter, Gauge, Histogram, type Registry } from "prom-client";
import type { TransferCounts, TransferOutcome, TransferReport } from "../engine/types.ts";

/** Seconds. A short prompt over loopback to a connection's longest life. */
const SECONDS_BUCKETS = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60];

/** Why a prompt that came with KV may be computed here. Each has a sample from the start: a rate needs the zero before the first one. */
const FALLBACK_REASONS: readonly Exclude<TransferOutcome, "done">[] = [
  "refused", "unknown", "used", "expired", "dropped", "reset", "timeout", "corrupt", "no_route", "auth", "handoff", "no_pages", "preempted",
];

/** The families of KV that travels between workers. */
export class TransferMetrics {
  readonly #copies;
  readonly #refused;
  readonly #pulls;
  readonly #fallbacks;
  readonly #bytes;
  readonly #seconds;

  /** @param read gauges of the engine; null where it transfers nothing */
  constructor(registry: Registry, read: () => TransferCounts | null) {
    const registers = [registry];
    const gauge = (name: string, help: string, pick: (counts: TransferCounts) => number) =>
      new Gauge({
        name,
        help,
        registers,
        collect() {
          const counts = read();
          this.set(counts === null ? 0 : pick(counts));
        },
      });
    gauge("layerscale_kv_transfers_staged", "Copies of prompts' KV in host memory that wait to be fetched or are being sent.", (c) => c.staged);
    gauge("layerscale_kv_transfer_staged_bytes", "Host memory of these copies.", (c) => c.stagedBytes);
    gauge("layerscale_kv_transfers_filling", "Copies of prompts that are being computed.", (c) => c.filling);
    gauge("layerscale_kv_transfers_pulling", "Prompts whose KV is on its way to this worker.", (c) => c.pulls);
    this.#copies = new Counter({
      name: "layerscale_kv_transfer_copies_total",
      help: "Staged copies that are gone, by how (done: fetched; expired: nobody came in time; dropped: not needed any more; else: the transfer failed).",
      labelNames: ["outcome"] as const,
      registers,
    });
    this.#refused = new Counter({ name: "layerscale_kv_transfer_overloads_total", help: "Prompts refused because staged copies had reached their cap.", registers });
    this.#pulls = new Counter({ name: "layerscale_kv_transfer_pulls_total", help: "Prompts that came with KV of a prefill worker, by what became of it.", labelNames: ["outcome"] as const, registers });
    this.#fallbacks = new Counter({
      name: "layerscale_kv_transfer_fallbacks_total",
      help: "Prompts that were computed here though they came with KV of a prefill worker, by reason.",
      labelNames: ["reason"] as const,
      registers,
    });
    this.#bytes = new Counter({ name: "layerscale_kv_transfer_bytes_total", help: "Bytes of KV sent and received.", labelNames: ["direction"] as const, registers });
    this.#seconds = new Histogram({ name: "layerscale_kv_transfer_seconds", help: "Of a pull that brought all pages, from its beginning.", buckets: SECONDS_BUCKETS, registers });
    for (const outcome of ["done", "expired", "dropped"]) this.#copies.inc({ outcome }, 0);
    this.#pulls.inc({ outcome: "done" }, 0);
    for (const reason of FALLBACK_REASONS) this.#fallbacks.inc({ reason }, 0);
    for (const direction of ["sent", "received"]) this.#bytes.inc({ direction }, 0);
  }

  ended({ role, outcome, bytes, seconds, fallback }: TransferReport): void {
    this.#bytes.inc({ direction: role === "send" ? "sent" : "received" }, bytes);
    if (role === "send") return this.#copies.inc({ outcome });
    this.#pulls.inc({ outcome });
    if (fallback) this.#fallbacks.inc({ reason: outcome });
    else if (outcome === "done" && bytes > 0) this.#seconds.observe(seconds);
  }

  overloaded(): void {
    this.#refused.inc();
  }
}
