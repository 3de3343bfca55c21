/** Entry of a discovery thread that dies at the first record it is to add, as a bug in it would. */
import { parentPort, workerData } from "node:worker_threads";
import type { DiscoveryThreadData, ToThread } from "../../src/dynamo/discovery/thread/store.ts";

const { spec } = workerData as DiscoveryThreadData;
const port = parentPort!;
port.on("message", (call: ToThread) => {
  if (call.op === "add") throw new Error("a bug");
  port.postMessage({ kind: "done", id: call.id, value: undefined, instanceId: 1n });
  if (call.op === "close") port.close();
});
port.postMessage({ kind: "opened", instanceId: spec.kind === "file" ? spec.instanceId : 0n });
