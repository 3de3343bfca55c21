/** Roles in the model record, and what every role runs whole. disaggregation.test.ts has the rest. */
import { afterEach, expect, test } from "bun:test";
import { PlaneCall, requestBody } from "./plane-client.ts";
import { record, start, stopAll } from "./worker-harness.ts";

afterEach(stopAll);
const worker = (disaggregationMode: "agg" | "prefill" | "decode") => start({ prefixCache: true }, {}, { worker: { disaggregationMode } });

test.each([
  ["agg", "aggregated", [], "Chat | Completions"],
  ["prefill", "prefill", [["decode"]], "Prefill"],
  ["decode", "decode", [["prefill"]], "Chat | Completions"],
] as const)("%s registers as %s with its needs", async (mode, worker_type, needs, model_type) => {
  const card = record((await worker(mode)).kv, "v1/mdc")!.card_json;
  expect(card).toMatchObject({ worker_type, needs: needs as never, model_type });
  expect(card.runtime_config).toMatchObject({ enable_local_indexer: mode !== "decode", kv_event_publishing_enabled: true });
  expect(card.runtime_config.disaggregated_endpoint).toBeUndefined();
});

test.each(["agg", "prefill", "decode"] as const)("%s runs health checks, and what the router marks to run whole, from start to finish", async (mode) => {
  const { address } = await worker(mode);
  for (const mark of [{ _HEALTH_CHECK: true }, { annotations: ["x-bypass-remote-prefill"] }]) {
    const call = await (await PlaneCall.send(address, requestBody(mark))).done();
    expect([call.tokens.length, call.errors]).toEqual([4, []]);
  }
});
