import type { DynamoConfig } from "../../config/engine-config.ts";
import type { TransferOptions, TransferReport } from "../../engine/types.ts";
import { logger } from "../../telemetry/log.ts";
import type { WorkerEngine } from "../worker-engine.ts";
import { reachableAddress } from "../request-plane/local-address.ts";
import { defaultRouteAddress } from "./address.ts";

const log = logger("layerscale::dynamo::transfer");

/** How a worker of this role exchanges KV; null = not at all. Only a prefill worker listens, on the address that it gives decode workers. */
export function transferOptions({ worker, environment }: DynamoConfig): TransferOptions | null {
  if (worker.disaggregationMode === "agg") return null;
  const host = worker.disaggregationMode === "prefill" ? (environment.podIp === null ? defaultRouteAddress() : reachableAddress(environment.podIp, defaultRouteAddress)) : null;
  return { host, holdMs: Math.round(environment.kvHoldSeconds * 1000), key: environment.kvKey === null ? null : new TextEncoder().encode(environment.kvKey) };
}

/** One line per transfer. */
export function logTransfer({ role, requestId, transferId, outcome, bytes, seconds, detail, fallback }: TransferReport): void {
  const fields = { requestId, ...(transferId !== null && { transfer: transferId }), outcome, bytes, seconds, ...(detail !== "" && { detail }) };
  if (role === "send") log[outcome === "done" || outcome === "dropped" ? "info" : "warn"]("staged KV left", fields);
  else if (outcome === "done") log.info("KV pulled", fields);
  else log.warn(fallback ? "KV not pulled, the prompt is computed here" : "KV not pulled, the request is refused", fields);
}

/** Resolves when no copy waits any more, when the time is over, or at once when `hurry` is raised. */
export function copiesGone(engine: Pick<WorkerEngine, "stats" | "onStep">, ms: number, hurry: AbortSignal): Promise<boolean> {
  const gone = () => (engine.stats().transfer?.staged ?? 0) === 0;
  if (gone()) return Promise.resolve(true);
  if (hurry.aborted || ms <= 0) return Promise.resolve(false);
  return new Promise((resolve) => {
    const end = () => {
      clearTimeout(timer);
      off();
      hurry.removeEventListener("abort", end);
      resolve(gone());
    };
    const timer = setTimeout(end, ms);
    const off = engine.onStep(() => {
      if (gone()) end();
    });
    hurry.addEventListener("abort", end, { once: true });
  });
}
