/** Prefill and decode roles between the request plane and the engine: what goes over the wire, and who lets a copy go. */
import { afterEach, describe, expect, test } from "bun:test";
import { readDynamoEnvironment } from "../../../src/config/env.ts";
import { defaultRouteAddress } from "../../../src/dynamo/disaggregation/address.ts";
import { handoff, readHandoff } from "../../../src/dynamo/disaggregation/handoff.ts";
import { copiesGone, transferOptions } from "../../../src/dynamo/disaggregation/transfer.ts";
import type { GenerateRequest, StepOutput, TransferCounts, TransferInfo } from "../../../src/engine/types.ts";
import { FakeEngine } from "./fake-engine.ts";
import { PlaneCall, requestBody, until } from "./plane-client.ts";
import { config, family, startWith, stopAll } from "./worker-harness.ts";

afterEach(stopAll);
const info: TransferInfo = { port: 40123, layout: new Uint8Array(128).fill(7), capBytes: 1000 };
const params = handoff(2n ** 64n - 1n, "127.0.0.1", info, 12);

/** An engine whose prompts end as they are told to. */
class StagingEngine extends FakeEngine {
  readonly refusal: StepOutput["refusal"];
  /** Computes until this is over. */
  computing: (signal?: AbortSignal) => Promise<unknown> = () => new Promise((resolve) => setTimeout(resolve, 20));
  constructor(refusal: StepOutput["refusal"] = null) {
    super({ vocab: 384 });
    this.refusal = refusal;
    this.info.transfer = info;
  }
  override async *generate(request: GenerateRequest, signal?: AbortSignal): AsyncGenerator<StepOutput> {
    if (!request.stage && this.refusal === null) return yield* super.generate(request, signal);
    this.requests.push(request);
    await this.computing(signal);
    const usage = { promptTokens: request.promptTokenIds.length, completionTokens: 1, cachedTokens: 2 };
    const end = { logprobs: null, stopTokenId: null, usage };
    if (this.refusal) yield { ...end, tokenIds: [], finishReason: "error", error: "model digest differs", refusal: this.refusal };
    else yield { ...end, tokenIds: [9], finishReason: "length", error: null, staged: 2n ** 64n - 5n };
  }
}
const worker = (disaggregationMode: "agg" | "prefill" | "decode", engine = new StagingEngine()) => startWith(engine, { environment: { POD_IP: "127.0.0.1" }, worker: { disaggregationMode } });
const decodeBody = (disaggregated_params: unknown, more = {}) => requestBody({ prefill_result: { disaggregated_params, prompt_tokens_details: null }, ...more });
const source = { host: "127.0.0.1", port: 40123, id: 2n ** 64n - 1n, layout: info.layout };

describe("the hand-off", () => {
  test("is read as it was written, with all 64 bits of the id, in JSON too", () => {
    expect(readHandoff({ prefill_result: { disaggregated_params: JSON.parse(JSON.stringify(params)) } })).toEqual(source);
    expect(JSON.stringify(params)).toContain('"transfer_id":"18446744073709551615"');
    expect(readHandoff({})).toBeNull();
    expect(readHandoff({ prefill_result: null })).toBeNull();
  });
  test.each([
    ["version", 2], ["version", null], ["version", [2n ** 70n]], ["version", { a: 2n ** 64n }], ["host", "example.org"], ["host", 7], ["host", "1".repeat(1000)], ["port", 0], ["port", 65536], ["port", 1.5], ["port", "80"],
    ["transfer_id", 5], ["transfer_id", "18446744073709551616"], ["transfer_id", "-1"], ["transfer_id", "1e3"], ["layout", ""], ["layout", "#"], ["layout", "A".repeat(5000)], ["layout", [1]],
  ] as const)("%s = %p is not taken", (field, value) => {
    expect(readHandoff({ prefill_result: { disaggregated_params: { ...params, [field]: value } } })).toBeTypeOf("string");
  });
  test("neither is anything else in its place", () => {
    for (const prefill_result of [7, "x", [], {}, { disaggregated_params: [1] }, { disaggregated_params: null }, { disaggregated_params: 1n }]) expect(readHandoff({ prefill_result })).toBeTypeOf("string");
  });
});

describe("a prefill worker", () => {
  test("answers with one item: where the copy is, no token, finish_reason length", async () => {
    const { address, engine } = await worker("prefill");
    const call = await (await PlaneCall.send(address, requestBody({ token_ids: [1, 2, 3, 4], stop: { max_tokens: 1 }, output: { logprobs: 2 } }))).done();
    expect(call.items).toEqual([{
      data: {
        token_ids: [], finish_reason: "length", disaggregated_params: { version: 1, host: "127.0.0.1", port: 40123, transfer_id: "18446744073709551611", tokens: 3, layout: Buffer.from(info.layout).toString("base64") },
        completion_usage: { prompt_tokens: 4, completion_tokens: 0, total_tokens: 4, prompt_tokens_details: { cached_tokens: 2 } },
      } as never,
    }]);
    expect(engine.requests).toMatchObject([{ stage: true }]);
    expect(engine.released).toEqual([]);
  });
  test("takes the copy back when its answer cannot leave", async () => {
    const staging = new StagingEngine();
    // Ends just when nobody is there any more: an answer that had left already would be the decode worker's to fetch.
    staging.computing = (signal) => until("the client left", () => signal!.aborted);
    const { address, engine } = await worker("prefill", staging);
    const call = await PlaneCall.send(address, requestBody());
    await until("the request", () => engine.requests.length === 1);
    call.control("kill");
    call.close();
    await until("release", () => engine.released.length === 1);
    expect(engine.released).toEqual([2n ** 64n - 5n]);
  });
  test("is unavailable while copies fill its host memory", async () => {
    const running = await worker("prefill", new StagingEngine("overloaded"));
    const call = await (await PlaneCall.send(running.address, requestBody())).done();
    expect(call.errors).toEqual([{ error_type: "Unavailable", message: "prefill worker overloaded: model digest differs" }]);
    expect(await family(running, "layerscale_kv_transfer_overloads_total")).toBe(1);
  });
});

describe("a decode worker", () => {
  test("hands the source to the engine; the answer is that of a whole request", async () => {
    const { address, engine } = await worker("decode");
    const call = await (await PlaneCall.send(address, decodeBody(params))).done();
    expect([call.tokens.length, call.errors]).toEqual([4, []]);
    expect(engine.requests[0]!.pull).toEqual(source);
    expect(engine.dropped).toEqual([]);
  });
  test("runs whole what comes without a hand-off or with one that is none, and counts why", async () => {
    const running = await worker("decode");
    for (const body of [requestBody(), decodeBody("nonsense")]) expect((await (await PlaneCall.send(running.address, body)).done()).tokens.length).toBe(4);
    expect(running.engine.requests.map(({ pull }) => pull ?? null)).toEqual([null, null]);
    expect(await family(running, 'layerscale_kv_transfer_fallbacks_total{reason="handoff"}')).toBe(1);
  });
  test("lets the copy go when it runs a request whole, refuses it, or never begins it", async () => {
    const { address, engine } = await worker("decode");
    for (const more of [{ _HEALTH_CHECK: true }, { annotations: ["x-bypass-remote-prefill"] }]) await (await PlaneCall.send(address, decodeBody(params, more))).done();
    expect(engine.dropped.length).toBe(2);
    // The engine refuses: an id outside the vocabulary. The protocol refuses: top_k.
    await (await PlaneCall.send(address, decodeBody(params, { token_ids: [9999] }))).done();
    await (await PlaneCall.send(address, decodeBody(params, { sampling: { top_k: 5 } }))).done();
    expect(engine.dropped.length).toBe(4);
    // Nobody listens for the answer.
    (await PlaneCall.send(address, decodeBody(params), { control: { connection_info: { transport: "tcp_server", info: JSON.stringify({ address: "127.0.0.1:1", subject: "s", context: "c", stream_type: "response" }) } } })).close();
    await until("drop", () => engine.dropped.length === 5);
    expect(engine.dropped).toEqual(Array(5).fill(source));
  });
  test("KV that does not fit is an error that names the field", async () => {
    const { address } = await worker("decode", new StagingEngine("layout"));
    const call = await (await PlaneCall.send(address, decodeBody(params))).done();
    expect(call.errors).toEqual([{ error_type: { Backend: "Unknown" }, message: "the KV of the prefill worker does not fit this decode worker: model digest differs" }]);
  });
});

describe("the address of a prefill worker", () => {
  const ip = (family: "IPv4" | "IPv6", address: string) => ({ family, address, internal: false }) as never;
  const interfaces = { eth0: [ip("IPv4", "10.0.0.5"), ip("IPv6", "fe80::1"), ip("IPv6", "2001:db8::5")], eth1: [ip("IPv4", "10.1.0.5")] };
  const route4 = "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT\neth0\t00000000\t0100000A\t0003\t0\t0\t100\t00000000\t0\t0\t0\neth1\t00000000\t0100010A\t0003\t0\t0\t50\t00000000\t0\t0\t0\neth0\t0000000A\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0\n";
  const zero = "0".repeat(32);
  const route6 = `${zero} 00 ${zero} 00 fe800000000000000000000000000001 00000400 00000001 00000000 00000003 eth0\n${zero} 00 ${zero} 00 ${zero} ffffffff 00000001 00000000 00200200 lo\n`;
  test("is that of the default route with the lowest metric, IPv6 where there is no other", () => {
    expect(defaultRouteAddress((path) => (path === "/proc/net/route" ? route4 : route6), interfaces)).toBe("10.1.0.5");
    expect(defaultRouteAddress((path) => (path === "/proc/net/route" ? "" : route6), interfaces)).toBe("2001:db8::5");
    expect(defaultRouteAddress(() => "", interfaces)).toBe("10.0.0.5");
    expect(defaultRouteAddress(() => "", {})).toBe("127.0.0.1");
  });
  test("POD_IP comes first; only a prefill worker listens", () => {
    const options = (disaggregationMode: "agg" | "prefill" | "decode", environment: Record<string, string> = {}) => {
      const base = config("/nowhere", environment);
      return transferOptions({ ...base, worker: { ...base.worker, disaggregationMode } });
    };
    expect(options("agg")).toBeNull();
    expect(options("decode")).toEqual({ host: null, holdMs: 60_000, key: null });
    expect(options("prefill", { POD_IP: "[2001:db8::9]", LAYERSCALE_KV_HOLD_SECONDS: "1.5", LAYERSCALE_KV_KEY: "0123456789abcdef" })).toEqual({ host: "2001:db8::9", holdMs: 1500, key: new TextEncoder().encode("0123456789abcdef") });
    expect(options("prefill")!.host).toBeTypeOf("string");
    // "All addresses" says nothing to a decode worker elsewhere.
    for (const wildcard of ["0.0.0.0", "::", "[::]"]) expect(options("prefill", { POD_IP: wildcard })!.host).toBe(options("prefill")!.host);
  });
  test.each([["LAYERSCALE_KV_HOLD_SECONDS", "0"], ["LAYERSCALE_KV_HOLD_SECONDS", "soon"], ["LAYERSCALE_KV_KEY", "short"], ["LAYERSCALE_KV_KEY", "x".repeat(65)]])("%s=%s is refused by name, a key without its text", (name, value) => {
    expect(() => readDynamoEnvironment({ [name]: value })).toThrow(name);
    if (name === "LAYERSCALE_KV_KEY") expect(() => readDynamoEnvironment({ [name]: value })).not.toThrow(`"${value}"`);
  });
});

describe("waiting for copies at a stop", () => {
  const engine = (counts: Partial<TransferCounts>) => {
    const listeners = new Set<(step: never) => void>();
    return {
      counts, listeners, stats: () => ({ transfer: counts }) as never,
      onStep: (listener: (step: never) => void) => (listeners.add(listener), () => void listeners.delete(listener)),
    };
  };
  test("ends when the last one is gone, when it is told to hurry, and when the time is over", async () => {
    const none = new AbortController().signal;
    expect(await copiesGone(engine({ staged: 0 }), 60_000, none)).toBe(true);
    const last = engine({ staged: 1 });
    const gone = copiesGone(last, 60_000, none);
    last.counts.staged = 0;
    for (const listener of last.listeners) listener({} as never);
    expect([await gone, last.listeners.size]).toEqual([true, 0]);
    const hurry = new AbortController();
    const hurried = copiesGone(engine({ staged: 1 }), 60_000, hurry.signal);
    hurry.abort();
    expect(await hurried).toBe(false);
    expect(await copiesGone(engine({ staged: 1 }), 1, none)).toBe(false);
  });
});
