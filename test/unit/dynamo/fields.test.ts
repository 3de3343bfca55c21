/** Every field of a request body of Dynamo 1.5.0 has a known use here; the lists come from its sources. */
import { afterEach, describe, expect, test } from "bun:test";
import golden from "../../golden/dynamo-1.5.0-request-fields.json";
import { type FieldSection, unknownFields, WIRE_FIELDS } from "../../../src/dynamo/protocol/fields.ts";
import { parseRequest } from "../../../src/dynamo/protocol/preprocessed-request.ts";
import { REFUSALS } from "../../../src/dynamo/protocol/refusals.ts";
import { setLogSink } from "../../../src/telemetry/log.ts";
import { PlaneCall, requestBody } from "./plane-client.ts";
import { start, stopAll } from "./worker-harness.ts";

afterEach(stopAll);

describe("wire fields", () => {
  for (const [section, fields] of Object.entries(golden) as [FieldSection, string[]][])
    test(`${section}: each field of 1.5.0 is classified, and nothing else is`, () => {
      expect(Object.keys(WIRE_FIELDS[section]).sort()).toEqual([...fields].sort());
    });
  test("refused fields are those of the refusal table", () => {
    const refused = Object.entries(WIRE_FIELDS).flatMap(([section, fields]) => Object.entries(fields).filter(([, use]) => use === "refused").map(([field]) => `${section}.${field}`));
    expect(refused.sort()).toEqual(REFUSALS.map(({ section, field }) => `${section}.${field}`).sort());
  });
  test("a body with every classified field but the refused ones is accepted", () => {
    const body = requestBody({
      mm_routing_info: { routing_token_ids: [], block_mm_infos: [], expanded_prompt_len: 0 }, mm_processor_kwargs: {}, media_io_kwargs: {}, router: { ttft_target: 1 }, prefill_result: null, bootstrap_info: null,
      extra_args: { nvext: { token_in: true } }, require_reasoning: true, migration_link: { trace_id: "a", span_id: "b" }, agent_context: { session_id: "s" }, request_timestamp_ms: 1.5,
      routing: { backend_instance_id: 2n ** 63n, prefill_worker_id: 1, decode_worker_id: 2, dp_rank: 0, prefill_dp_rank: 3, expected_output_tokens: 9, cache_salt: "s", priority_jump: 0.5, strict_priority: 2, priority: 1, allowed_worker_ids: [1], routing_constraints: { required_taints: [] } },
    });
    const seen: string[] = [];
    unknownFields(body, (path) => seen.push(path));
    expect(seen).toEqual([]);
    expect(parseRequest(body).priority).toBe(1);
  });
  test("a field of a later release is tolerated and named once in the log, wherever it stands", async () => {
    const lines: string[] = [];
    const worker = await start();
    setLogSink((line) => void lines.push(line));
    try {
      for (let i = 0; i < 3; i++) {
        const body = requestBody({ shiny: { a: 1 }, sampling: { mirostat: 2 }, stop: { whim: true }, output: { colour: "red" }, routing: { moon: 1 } });
        expect((await (await PlaneCall.send(worker.address, body)).done()).tokens.length).toBe(4);
      }
    } finally {
      setLogSink((line) => void process.stderr.write(line + "\n"));
    }
    const named = lines.map((line) => JSON.parse(line) as Record<string, unknown>).filter((line) => line.field !== undefined);
    expect(named.map((line) => line.field)).toEqual(["shiny", "stop_conditions.whim", "sampling_options.mirostat", "output_options.colour", "routing.moon"]);
    expect(named.every((line) => line.level === "warn")).toBe(true);
  });
});
