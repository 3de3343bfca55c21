/** Roles in the model record, and what each does with a request while KV does not travel between workers. */
import { afterEach, expect, test } from "bun:test";
import { PlaneCall, requestBody } from "./plane-client.ts";
import { record, start, stopAll } from "./worker-harness.ts";

afterEach(stopAll);
const worker = (disaggregationMode: "agg" | "prefill" | "decode") => start({}, {}, { worker: { disaggregationMode } });

test.each([
  ["agg", "aggregated", [], "Chat | Completions"],
  ["prefill", "prefill", [["decode"]], "Prefill"],
  ["decode", "decode", [["prefill"]], "Chat | Completions"],
] as const)("%s registers as %s with its needs", async (mode, worker_type, needs, model_type) => {
  expect(record((await worker(mode)).kv, "v1/mdc")!.card_json).toMatchObject({ worker_type, needs: needs as never, model_type });
});

test.each(["agg", "prefill", "decode"] as const)("%s runs health checks, and what the router marks to run whole, from start to finish", async (mode) => {
  const { address } = await worker(mode);
  for (const mark of [{ _HEALTH_CHECK: true }, { annotations: ["x-bypass-remote-prefill"] }]) {
    const call = await (await PlaneCall.send(address, requestBody(mark))).done();
    expect([call.tokens.length, call.errors]).toEqual([4, []]);
  }
});

test("a decode worker computes the prompt itself", async () => {
  const { address } = await worker("decode");
  const call = await (await PlaneCall.send(address, requestBody({ prefill_result: { disaggregated_params: { x: 1 } } }))).done();
  expect([call.tokens.length, call.items.at(-1)!.data!.completion_usage]).toMatchObject([4, { prompt_tokens_details: { cached_tokens: 0 } }]);
});

test("a prefill worker says that it cannot hand over, as unavailable", async () => {
  const { address } = await worker("prefill");
  const call = await (await PlaneCall.send(address, requestBody({ stop: { max_tokens: 1 } }))).done();
  expect(call.errors).toEqual([{ error_type: "Unavailable", message: expect.stringContaining("transfer between workers is not part of this version") }]);
});
