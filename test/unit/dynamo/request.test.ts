import { describe, expect, test } from "bun:test";
import { parseJson } from "../../../src/dynamo/protocol/bigint-json.ts";
import { ProtocolError } from "../../../src/dynamo/protocol/errors.ts";
import { MAX_STOP_CHARACTERS, MAX_TOP_LOGPROBS, parseRequest } from "../../../src/dynamo/protocol/preprocessed-request.ts";
import { findRefusal, REFUSALS } from "../../../src/dynamo/protocol/refusals.ts";
import { requestBody } from "./plane-client.ts";

const refusal = (body: unknown): ProtocolError => {
  try {
    parseRequest(body);
  } catch (error) {
    expect(error).toBeInstanceOf(ProtocolError);
    return error as ProtocolError;
  }
  throw new Error(`accepted: ${JSON.stringify(body)}`);
};

/** Per option: values that ask for nothing, values that ask for something. */
const CASES: Record<string, [neutral: unknown[], effective: unknown[]]> = {
  "sampling_options.n": [[1], [2, 128]],
  "sampling_options.best_of": [[1], [2]],
  "sampling_options.use_beam_search": [[false], [true]],
  "sampling_options.length_penalty": [[0, 1], [2]],
  "sampling_options.top_k": [[-1, 0], [1, 5]],
  "sampling_options.min_p": [[0], [0.1]],
  "sampling_options.frequency_penalty": [[0, -0], [0.5, -0.5]],
  "sampling_options.presence_penalty": [[0], [0.5]],
  "sampling_options.repetition_penalty": [[1], [1.100000023841858, 0]],
  "sampling_options.guided_decoding": [[{}, { json: null, regex: null }], [{ json: { type: "object" } }, { regex: "a" }, { choice: ["a"] }, { grammar: "root" }]],
  "stop_conditions.min_tokens": [[0], [1]],
  "stop_conditions.max_thinking_tokens": [[], [0, 10]],
  "output_options.prompt_logprobs": [[], [0, 1]],
  "routing.lora_name": [[""], ["adapter"]],
  "routing.dp_rank": [[0, 0xffffffff], [1, 7]],
  "request.multi_modal_data": [[{}, { image_url: [] }], [{ image_url: [{ Url: "data:" }] }]],
  "request.multi_modal_uuids": [[{}], [{ image_url: ["u"] }]],
  "request.encoder_result": [[{}], [{ x: 1 }]],
  "request.prompt_embeds": [[""], ["AAAA"]],
};
const withOption = (section: string, field: string, value: unknown) => {
  const body = requestBody();
  if (section === "request") body[field] = value;
  else body[section] = { ...(body[section] as object), [field]: value };
  return body;
};

describe("refused options", () => {
  test("each one of the table has its cases", () => {
    expect(REFUSALS.map((item) => `${item.section}.${item.field}`).sort()).toEqual(Object.keys(CASES).sort());
  });
  for (const { section, field } of REFUSALS) {
    const [neutral, effective] = CASES[`${section}.${field}`]!;
    test(`${field}: null and neutral values are accepted`, () => {
      for (const value of [null, undefined, ...neutral]) expect(findRefusal(withOption(section, field, value))).toBeNull();
      parseRequest(withOption(section, field, null));
    });
    test(`${field}: effective values are refused by name, as InvalidArgument`, () => {
      for (const value of effective) {
        const error = refusal(withOption(section, field, value));
        expect(error.type).toEqual({ Backend: "InvalidArgument" });
        expect(error.message).toContain(field);
      }
    });
  }
});

describe("PreprocessedRequest", () => {
  test("a captured request with explicit nulls", () => {
    const request = parseRequest(requestBody({ token_ids: [1, 9690, 198], stop: { max_tokens: null, stop_token_ids_hidden: [2] }, sampling: { temperature: null }, eos_token_ids: [2] }));
    expect(request).toEqual({
      model: "smol", tokenIds: Uint32Array.of(1, 9690, 198), maxTokens: null, ignoreEos: false, stop: [], stopTokenIds: [], eosTokenIds: [2], temperature: null, topP: null,
      seed: null, logprobs: null, skipSpecialTokens: true, priority: 0, cacheSalt: "", healthCheck: false, whole: false,
    });
  });
  test("sections may be missing or null", () => {
    expect(parseRequest({ token_ids: [5], stop_conditions: null }).maxTokens).toBeNull();
    expect(parseRequest({ token_ids: [5], _HEALTH_CHECK: true }).healthCheck).toBe(true);
  });
  test("64-bit seeds are exact, negative ones too", () => {
    const seed = (value: unknown) => parseRequest(requestBody({ sampling: { seed: value } })).seed;
    expect([seed(42), seed(-3), seed(2n ** 63n - 1n), seed(-(2n ** 63n))]).toEqual([42n, -3n, 2n ** 63n - 1n, -(2n ** 63n)]);
    // A number beyond 2^53 has lost bits before it came here, so it is no seed.
    for (const bad of [1.5, "7", 2n ** 64n, 2 ** 60]) expect(refusal(requestBody({ sampling: { seed: bad } })).message).toContain("sampling_options.seed");
  });
  test("routing reaches the request", () => {
    const request = parseRequest(requestBody({ routing: { backend_instance_id: 2n ** 64n - 3n, dp_rank: 0, priority: -4, cache_salt: "tenant-a" } }));
    expect([request.priority, request.cacheSalt]).toEqual([-4, "tenant-a"]);
  });
  test("a stop string alone is a list of one", () => {
    expect(parseRequest(requestBody({ stop: { stop: "\n" } })).stop).toEqual(["\n"]);
  });
  test("bad values name the field, the value and what was expected", () => {
    const bad: [unknown, RegExp][] = [
      [null, /request: expected an object, got null/], ["text", /request: expected an object/], [[], /request: expected an object, got a list/],
      [{}, /token_ids: expected a list/], [requestBody({ token_ids: [] }), /token_ids: the prompt is empty/], [requestBody({ token_ids: [1, -5] }), /token_ids\[1\].*-5/],
      [requestBody({ token_ids: [1.5] }), /token_ids\[0\].*1\.5/], [requestBody({ token_ids: [2 ** 32] }), /token_ids\[0\]/], [requestBody({ token_ids: [2n ** 60n] as never }), /token_ids\[0\]/],
      [requestBody({ token_ids: "x" as never }), /token_ids: expected a list of token ids, got "x"/], [requestBody({ stop: { max_tokens: 0 } }), /max_tokens: expected an integer from 1/],
      [requestBody({ stop: { max_tokens: 1.5 } }), /max_tokens/], [requestBody({ stop: { ignore_eos: 1 } }), /ignore_eos: expected true or false, got 1/],
      [requestBody({ stop: { stop: [1] } }), /stop\[0\]/], [requestBody({ sampling: { temperature: -1 } }), /temperature/], [requestBody({ sampling: { temperature: "hot" } }), /temperature/],
      [requestBody({ sampling: { top_p: 0 } }), /top_p: expected a number above 0/], [requestBody({ sampling: { top_p: 1.5 } }), /top_p/],
      [requestBody({ output: { logprobs: MAX_TOP_LOGPROBS + 1 } }), /logprobs: expected an integer from 0 to 20, got 21/], [requestBody({ sampling_options: 5 }), /sampling_options: expected an object, got 5/],
      [requestBody({ routing: { cache_salt: 7 } }), /cache_salt/],
    ];
    for (const [body, text] of bad) {
      const error = refusal(body);
      expect(error.message).toMatch(text);
      expect(error.type).toEqual({ Backend: "InvalidArgument" });
    }
  });
  test("numbers that JSON rounds or overflows are shown as what they are", () => {
    const text = (patch: Parameters<typeof requestBody>[0], replace: [string, string]) => refusal(parseJson(JSON.stringify(requestBody(patch)).replace(...replace))).message;
    expect(text({ sampling: { temperature: 7 } }, ['"temperature":7', '"temperature":1e400'])).toBe("sampling_options.temperature: expected a number from 0 to 3.4e38, got Infinity");
    expect(text({ sampling: { seed: 7 } }, ['"seed":7', '"seed":18446744073709551616'])).toBe("sampling_options.seed: expected an integer of 64 bits, got 18446744073709551616");
    expect(text({ stop: { max_tokens: 7 } }, ['"max_tokens":7', '"max_tokens":1e18'])).toBe("stop_conditions.max_tokens: expected an integer from 1 to 4294967295, got 1000000000000000000");
    expect(text({ stop: { max_tokens: 7 } }, ['"max_tokens":7', '"max_tokens":1000000000000000001'])).toEndWith("got 1000000000000000001");
  });
});

test("stop strings that this worker would look for are bounded together; those the frontend looks for are not", () => {
  const body = (characters: number, logprobs: number | null) => requestBody({ stop: { max_tokens: 1, stop: ["x".repeat(characters - 10), "y".repeat(10)] }, output: { logprobs } });
  expect(parseRequest(body(MAX_STOP_CHARACTERS, 0)).stop.length).toBe(2);
  expect(refusal(body(MAX_STOP_CHARACTERS + 1, 0)).message).toBe('stop_conditions.stop: expected at most 16384 characters in all where logprobs are asked for, got "16385 characters"');
  expect(parseRequest(body(10 * MAX_STOP_CHARACTERS, null)).stop.length).toBe(2);
});
