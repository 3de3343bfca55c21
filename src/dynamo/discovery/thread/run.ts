import { parentPort, workerData } from "node:worker_threads";
import { setLogFilter } from "../../../telemetry/log.ts";
import { type DiscoveryThreadData, type FromThread, openStore, perform, type ToThread } from "./store.ts";

/** A main thread that has not stirred for this long hangs: its records may expire, so that frontends go elsewhere. */
const HANG_MS = 60_000;

/** Whether the other side of a counter still raises it. */
export function pulseWatch(pulse: Int32Array, clock: () => number = () => performance.now()): () => boolean {
  let last = Atomics.load(pulse, 0);
  let at = clock();
  return () => {
    const now = Atomics.load(pulse, 0);
    if (now !== last) {
      last = now;
      at = clock();
    }
    return clock() - at < HANG_MS;
  };
}

/** The discovery thread: keeps records alive while the main thread is busy, and makes all changes, so that none cross. */
export async function runDiscoveryThread(): Promise<void> {
  const port = parentPort!;
  const { spec, log, pulse } = workerData as DiscoveryThreadData;
  setLogFilter(log);
  const tell = (message: FromThread) => port.postMessage(message);
  let store;
  try {
    store = await openStore(spec, pulseWatch(pulse));
  } catch (error) {
    tell({ kind: "failed", name: (error as Error).name, message: (error as Error).message });
    port.close();
    return;
  }
  const opened = store;
  opened.onLost((cause) => tell({ kind: "lost", cause }));
  port.on("message", async (call: ToThread) => {
    try {
      const value = await perform(opened, call);
      tell({ kind: "done", id: call.id, value, instanceId: opened.instanceId });
    } catch (error) {
      tell({ kind: "refused", id: call.id, message: (error as Error).message });
    }
    if (call.op === "close") port.close();
  });
  tell({ kind: "opened", instanceId: opened.instanceId });
}
