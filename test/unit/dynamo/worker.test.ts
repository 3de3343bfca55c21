import { afterEach, describe, expect, test } from "bun:test";
import { mkdtempSync, rmSync } from "node:fs";
import { connect, createServer } from "node:net";
import { tmpdir } from "node:os";
import { join } from "node:path";
import type { DynamoConfig } from "../../../src/config/engine-config.ts";
import { UsageError } from "../../../src/config/flags.ts";
import { encodeFrame } from "../../../src/dynamo/request-plane/frame-codec.ts";
import { refuseUnbuilt } from "../../../src/dynamo/unbuilt.ts";
import { runWorker } from "../../../src/dynamo/worker.ts";
import { tinyTokenizerJson } from "../../support/tiny-tokenizer.ts";
import { PlaneCall, requestBody, until } from "./plane-client.ts";
import { config, family, record, records, type Running, start, Stop, stopAll, tokenizer } from "./worker-harness.ts";

afterEach(stopAll);

describe("an answer", () => {
  for (const codec of ["json", "msgpack"] as const)
    test(`handshake, prologue, one item per step, final marker, sentinel (${codec})`, async () => {
      const worker = await start();
      const call = await (await PlaneCall.send(worker.address, requestBody({ token_ids: [1, 2, 3], stop: { max_tokens: 4 } }), { codec })).done();
      expect(call.ack).toBe("");
      expect(call.handshake).toEqual({ subject: "s-1", stream_type: "response" });
      expect(call.prologue).toEqual({ error: null });
      expect(call.items.map((item) => item.data!.token_ids.length)).toEqual([1, 1, 1, 1]);
      expect(call.items.slice(0, 3).every((item) => item.data!.finish_reason === undefined)).toBe(true);
      expect(call.items[3]!.data).toMatchObject({ finish_reason: "length", completion_usage: { prompt_tokens: 3, completion_tokens: 4, total_tokens: 7, prompt_tokens_details: { cached_tokens: 0 } } });
      expect([call.final, call.sentinel]).toEqual([true, true]);
    });
  test("an end token gives eos, a stop token stop", async () => {
    const worker = await start({ next: (_request, context) => context.length + 10 });
    const ask = async (patch: Parameters<typeof requestBody>[0]) => (await (await PlaneCall.send(worker.address, requestBody({ token_ids: [1, 2, 3], ...patch }))).done()).items.at(-1)!.data!;
    expect(await ask({ eos_token_ids: [15], stop: { max_tokens: 50 } })).toMatchObject({ token_ids: [15], finish_reason: "eos", completion_usage: { completion_tokens: 3 } });
    expect(await ask({ stop: { max_tokens: 50, stop_token_ids: [14] } })).toMatchObject({ token_ids: [14], finish_reason: "stop" });
    expect(await ask({ eos_token_ids: [], stop: { max_tokens: 3, ignore_eos: true } })).toMatchObject({ finish_reason: "length" });
  });
  test("absent temperature and top_p are the model's, 64-bit seeds and salts reach the engine exactly", async () => {
    const worker = await start();
    const body = requestBody({ sampling: { temperature: null, seed: -(2n ** 63n) }, routing: { cache_salt: "tenant-a", priority: 3 }, _HEALTH_CHECK: true, stop: { max_tokens: 1 } });
    await (await PlaneCall.send(worker.address, body)).done();
    expect(worker.engine.requests[0]).toMatchObject({ id: "id-1", sampling: { temperature: 0.5, topP: 0.25, seed: -(2n ** 63n), maxTokens: 1 }, priority: 2 ** 31, internal: true, cacheDomain: 1948188790972764086n - 1337n });
  });
  test("health checks count neither as requests nor as tokens", async () => {
    const worker = await start();
    await (await PlaneCall.send(worker.address, requestBody({ _HEALTH_CHECK: true }))).done();
    expect(await family(worker, 'layerscale_requests_total{outcome="ok",route="dynamo"}')).toBe(0);
    expect(await family(worker, "layerscale_generated_tokens_total")).toBe(0);
    await (await PlaneCall.send(worker.address, requestBody())).done();
    expect(await family(worker, "layerscale_generated_tokens_total")).toBe(4);
  });
});

describe("logprobs", () => {
  // Token ids below 256 are bytes in the tiny tokenizer's order; letters stand for themselves.
  const letters = [..."abcdefghij"].map((char) => tokenizer.encode(char, { addSpecialTokens: false })[0]!);
  const spell = { next: (_request: unknown, context: readonly number[]) => letters[(context.length - 1) % letters.length]! };
  test("all tokens in one final item, one entry each", async () => {
    const worker = await start(spell);
    const call = await (await PlaneCall.send(worker.address, requestBody({ token_ids: [1], stop: { max_tokens: 6 }, output: { logprobs: 2 } }))).done();
    expect(call.items.length).toBe(1);
    const data = call.items[0]!.data!;
    expect(data.token_ids).toEqual(letters.slice(0, 6));
    expect(data.log_probs).toEqual(Array(6).fill(-0.1));
    expect(data.top_logprobs![0]).toEqual([{ rank: 1, token_id: letters[0], token: null, logprob: -0.1 }, { rank: 2, token_id: 201, token: null, logprob: -4 }]);
    expect(data.finish_reason).toBe("length");
  });
  test("zero alternatives are empty lists", async () => {
    const worker = await start();
    const call = await (await PlaneCall.send(worker.address, requestBody({ output: { logprobs: 0 } }))).done();
    expect(call.items[0]!.data!.top_logprobs).toEqual([[], [], [], []]);
  });
  test("the worker itself stops at the token that completes a stop string", async () => {
    const worker = await start({ ...spell, stepMs: 1 });
    const call = await (await PlaneCall.send(worker.address, requestBody({ token_ids: [1], stop: { max_tokens: 500, stop: ["zz", "def"] }, output: { logprobs: 1 } }))).done();
    const data = call.items[0]!.data!;
    expect(data).toMatchObject({ token_ids: letters.slice(0, 6), finish_reason: "stop", completion_usage: { completion_tokens: 6 } });
    expect(data.log_probs!.length).toBe(6);
    await until("engine is idle", () => worker.engine.stats().running === 0);
  });
  test("without logprobs stop strings are the frontend's", async () => {
    const worker = await start(spell);
    const call = await (await PlaneCall.send(worker.address, requestBody({ token_ids: [1], stop: { max_tokens: 9, stop: ["def"] } }))).done();
    expect(call.tokens.length).toBe(9);
  });
});

describe("refusals", () => {
  const refused = async (worker: Running, body: unknown, raw?: Buffer) => {
    const call = await (await PlaneCall.send(worker.address, body, raw ? { rawBody: raw } : {})).done();
    expect([call.ack, call.prologue, call.final, call.tokens.length]).toEqual(["", { error: null }, true, 0]);
    expect(call.errors.length).toBe(1);
    return call.errors[0]!;
  };
  test("are InvalidArgument items after a normal prologue, and the worker serves on", async () => {
    const worker = await start();
    expect(await refused(worker, requestBody({ sampling: { top_k: 5 } }))).toMatchObject({ error_type: { Backend: "InvalidArgument" }, message: expect.stringContaining("top_k = 5") });
    expect((await refused(worker, requestBody({ token_ids: [1, 384] }))).message).toContain("384");
    expect((await refused(worker, requestBody({ token_ids: Array(3000).fill(1) }))).message).toContain("2048");
    expect((await refused(worker, null, Buffer.from("{broken"))).error_type).toEqual({ Backend: "InvalidArgument" });
    expect((await refused(worker, null, Buffer.from([0xff]))).error_type).toEqual({ Backend: "InvalidArgument" });
    expect((await (await PlaneCall.send(worker.address, requestBody())).done()).tokens.length).toBe(4);
    // What could be read as a request counts as a failed one.
    expect(await family(worker, 'layerscale_requests_total{outcome="failed",route="dynamo"}')).toBe(3);
    expect(worker.engine.stats().running).toBe(0);
  });
  test("an unknown endpoint and a malformed control header fail fast, in the acknowledgement", async () => {
    const worker = await start();
    const address = worker.address.split("/")[0]!;
    expect((await PlaneCall.send(`${address}/beef/nothing`, {})).ack).toStartWith("Server unavailable: unknown endpoint");
    expect((await PlaneCall.send(worker.address, {}, { control: { connection_info: 5 } })).ack).toStartWith("Server unavailable: malformed request");
    expect((await PlaneCall.send(worker.address, {}, { control: { request_type: "many_in" } })).ack).toContain("many_in");
  });
});

describe("cancellation", () => {
  const open = async (worker: Running) => {
    const call = await PlaneCall.send(worker.address, requestBody({ stop: { max_tokens: 2000 } }));
    await until("first item", () => call.items.length > 0);
    return call;
  };
  const ends: [string, (call: PlaneCall) => void][] = [
    ["kill", (call) => call.control("kill")], ["stop", (call) => call.control("stop")], ["end of the connection", (call) => call.answer!.end()],
    ["reset", (call) => call.answer!.resetAndDestroy()], ["a word that is none", (call) => call.control("dance")],
    ["a control message that claims 4 GiB", (call) => call.answer!.write(Buffer.from("00000000ffffffff" + "0".repeat(32), "hex"))],
  ];
  test.each(ends)("%s ends the generation", async (_name, end) => {
    const worker = await start({ stepMs: 2 });
    const call = await open(worker);
    expect(worker.engine.stats().running).toBe(1);
    end(call);
    await until("engine is idle", () => worker.engine.stats().running === 0);
    await until("counted", async () => (await family(worker, "dynamo_component_cancellation_total")) === 1);
    expect(await family(worker, "dynamo_component_inflight_requests")).toBe(0);
    expect(call.final).toBe(false);
    call.close();
  });
  test("with logprobs, before anything was sent", async () => {
    const worker = await start({ stepMs: 2 });
    const call = await PlaneCall.send(worker.address, requestBody({ stop: { max_tokens: 2000 }, output: { logprobs: 1 } }));
    await until("prologue", () => call.prologue);
    call.control("kill");
    await until("engine is idle", () => worker.engine.stats().running === 0);
    call.close();
  });
  test("a frontend that no longer listens costs one request", async () => {
    const worker = await start();
    const closed = createServer();
    await new Promise<void>((resolve) => closed.listen(0, "127.0.0.1", resolve));
    const port = (closed.address() as { port: number }).port;
    closed.close();
    const call = await PlaneCall.send(worker.address, requestBody(), { control: { connection_info: { transport: "tcp_server", info: JSON.stringify({ address: `127.0.0.1:${port}`, subject: "s" }) } } });
    expect(call.ack).toBe("");
    await until("counted", async () => (await family(worker, "dynamo_component_errors_total")) === 1);
    expect(worker.engine.requests.length).toBe(0);
    expect((await (await PlaneCall.send(worker.address, requestBody())).done()).tokens.length).toBe(4);
  });
  test("a frontend that does not read holds the generation back instead of filling memory", async () => {
    let made = 0;
    const worker = await start({ contextLength: 1_000_000, next: () => (made++, 7) });
    const call = await PlaneCall.send(worker.address, requestBody({ stop: { max_tokens: 500_000 } }), { paused: true });
    await until("tokens", () => made > 0);
    let before = -1;
    await until("generation at rest", async () => {
      const still = made === before;
      before = made;
      await new Promise((resolve) => setTimeout(resolve, 100));
      return still;
    }, 60_000);
    expect(made).toBeLessThan(499_000);
    call.answer!.resume();
    await until("generation goes on", () => made > before);
    call.control("kill");
    await until("engine is idle", () => worker.engine.stats().running === 0);
    call.close();
  }, 90_000);
});

describe("hostile peers", () => {
  test("garbage closes that connection and nothing else", async () => {
    const worker = await start();
    const [host, port] = worker.address.split("/")[0]!.split(":") as [string, string];
    const claims = Buffer.concat([Buffer.from("000161" + "0000", "hex"), Buffer.from("7fffffff", "hex")]);
    const badTwoPart = encodeFrame({ path: worker.address.slice(worker.address.indexOf("/") + 1), headers: {}, payload: Buffer.alloc(10) });
    for (const junk of [Buffer.from("GET / HTTP/1.1\r\nhost: x\r\n\r\n"), Buffer.alloc(4000), claims, badTwoPart]) {
      const socket = connect(Number(port), host);
      let closed = false;
      socket.on("close", () => (closed = true)).on("error", () => {});
      socket.write(junk);
      await until(`closed after ${junk.length} bytes of junk`, () => closed);
    }
    expect((await (await PlaneCall.send(worker.address, requestBody())).done()).tokens.length).toBe(4);
  });
});

describe("life of a worker", () => {
  test("registers everything, answers health, serves the card's files and nothing else", async () => {
    const worker = await start({ prefixCache: true });
    const card = record(worker.kv, "v1/mdc")!;
    expect(card.card_json).toMatchObject({
      display_name: "acme/Tiny", slug: "acme_tiny", source_path: "/models/tiny", kv_cache_block_size: 16, model_type: "Chat | Completions", model_input: "Tokens", worker_type: "aggregated", needs: [],
      runtime_config: { context_length: 2048, total_kv_blocks: 1000, max_num_seqs: 64, max_num_batched_tokens: 512, enable_local_indexer: true, kv_event_publishing_enabled: true },
    });
    const file = card.card_json.tokenizer.hf_tokenizer_json;
    expect(file.path).toMatch(/\/v1\/metadata\/dynamo\/backend\/generate\/acme_tiny\/_base\/tokenizer\.json$/);
    const text = await (await fetch(file.path)).text();
    expect([text.length, file.size]).toEqual([JSON.stringify(tinyTokenizerJson()).length, Buffer.byteLength(text)]);
    expect(file.checksum).toMatch(/^blake3:[0-9a-f]{64}$/);
    for (const path of ["/", "/v1/metadata/dynamo/backend/generate/acme_tiny/_base/..%2f..%2fetc", "/v1/metadata/dynamo/backend/generate/acme_tiny/_base/other.json"]) expect((await fetch(`${worker.system}${path}`)).status).toBe(404);
    expect((await fetch(`${worker.system}/health`, { method: "POST" })).status).toBe(405);
    const health = await until("ready", async () => {
      const response = await fetch(`${worker.system}/health`);
      return response.status === 200 ? ((await response.json()) as Record<string, unknown>) : null;
    });
    expect(health).toMatchObject({ status: "ready", endpoints: { generate: "ready" } });
    expect([records(worker.kv, "v1/instances").length, records(worker.kv, "v1/event_channels").length, records(worker.kv, "v1/event_sources").length]).toEqual([2, 2, 1]);
  });
  test("without a prefix cache no KV events are offered", async () => {
    const worker = await start({ prefixCache: false });
    expect([records(worker.kv, "v1/instances").length, records(worker.kv, "v1/event_channels").length, records(worker.kv, "v1/event_sources").length]).toEqual([1, 1, 0]);
    expect(record(worker.kv, "v1/mdc")!.card_json.runtime_config).toMatchObject({ enable_local_indexer: false, kv_event_publishing_enabled: false });
  });
  test("the recovery endpoint tells what the prefix cache holds", async () => {
    const worker = await start({ prefixCache: true });
    worker.engine.emitKv([{ kind: "stored", page: 3, parent: null, domain: 0n, tokenIds: Array.from({ length: 16 }, (_, i) => 3 + i) }]);
    const source = record(worker.kv, "v1/event_sources")!;
    const call = await PlaneCall.send(source.metadata.recovery_target.transport.tcp, { worker_id: source.metadata.worker.worker_id, dp_rank: 0, start_event_id: null, end_event_id: null, kind: "recovery" });
    await call.done();
    expect(call.items.length).toBe(1);
    const dump = (call.items[0] as Record<string, any>).TreeDump;
    expect(dump.last_event_id).toBe(1);
    expect(dump.events[0]).toMatchObject({ worker_id: source.metadata.worker.worker_id, event: { data: { stored: { blocks: [{ tokens_hash: 0xe22977b4ebb9cc09n }] } } } });
  });
  test("a stop leaves discovery at once, serves through the grace time, then ends the rest as migratable, exit 0", async () => {
    const worker = await start({ stepMs: 5 }, { DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS: "60" });
    const long = await PlaneCall.send(worker.address, requestBody({ stop: { max_tokens: 2000 } }));
    await until("first item", () => long.items.length > 0);
    worker.stop.raise();
    await until("records gone", () => ["v1/instances", "v1/mdc", "v1/event_channels", "v1/event_sources"].every((bucket) => records(worker.kv, bucket).length === 0));
    const health = await fetch(`${worker.system}/health`);
    expect([health.status, await health.json()]).toMatchObject([503, { status: "notready", endpoints: { generate: "notready" } }]);
    const late = await (await PlaneCall.send(worker.address, requestBody())).done();
    expect(late.tokens.length).toBe(4);
    expect(long.final).toBe(false);
    worker.stop.raise(); // a second signal ends the grace time
    await long.done();
    expect(long.errors).toEqual([{ error_type: { Backend: "EngineShutdown" }, message: expect.stringContaining("shutting down") }]);
    expect([long.final, long.sentinel]).toEqual([true, true]);
    expect(await worker.exit).toBe(0);
    expect(worker.engine.stopped).toBe(true);
  });
  test("an engine failure ends streams as migratable and the worker with exit code 1", async () => {
    const worker = await start({ stepMs: 5 });
    const call = await PlaneCall.send(worker.address, requestBody({ stop: { max_tokens: 2000 } }));
    await until("first item", () => call.items.length > 0);
    worker.engine.fail("device lost");
    await call.done();
    expect(call.errors[0]).toMatchObject({ error_type: { Backend: "EngineShutdown" }, message: expect.stringContaining("device lost") });
    expect(await worker.exit).toBe(1);
    expect(records(worker.kv, "v1/instances")).toEqual([]);
  });
  test("a stop while loading ends at once and leaves nothing", async () => {
    const kv = mkdtempSync(join(tmpdir(), "ls-worker-"));
    const stop = new Stop();
    const exit = runWorker(config(kv), stop, () => new Promise(() => {}));
    stop.raise();
    expect(await exit).toBe(0);
    expect(records(kv, "v1/instances")).toEqual([]);
    rmSync(kv, { recursive: true });
  });
  test("a load that fails is the caller's error, with nothing registered", async () => {
    const kv = mkdtempSync(join(tmpdir(), "ls-worker-"));
    await expect(runWorker(config(kv), new Stop(), () => Promise.reject(new Error("no such model")))).rejects.toThrow("no such model");
    expect(records(kv, "v1/instances")).toEqual([]);
    rmSync(kv, { recursive: true });
  });
  test("a system port in use is a start error", async () => {
    const taken = createServer();
    await new Promise<void>((resolve) => taken.listen(0, "127.0.0.1", resolve));
    const kv = mkdtempSync(join(tmpdir(), "ls-worker-"));
    const code = await runWorker(config(kv, { DYN_SYSTEM_PORT: String((taken.address() as { port: number }).port) }), new Stop(), () => new Promise(() => {}));
    expect(code).toBe(1);
    taken.close();
    rmSync(kv, { recursive: true });
  });
});

describe("choices this build does not serve", () => {
  const cases: [string, Record<string, string>, Partial<DynamoConfig["worker"]>][] = [
    ["DYN_ROUTE_TO_ENCODER", { DYN_ROUTE_TO_ENCODER: "1" }, {}], ["DYN_LORA_ENABLED", { DYN_LORA_ENABLED: "true" }, {}],
    ["DYN_HEALTH_CHECK_PAYLOAD", { DYN_HEALTH_CHECK_PAYLOAD: '{"prompt":"test"}' }, {}], ["DYN_TCP_RPC_HOST", { DYN_TCP_RPC_HOST: "worker.local" }, {}],
    ["DYN_TCP_RPC_HOST", { DYN_TCP_RPC_HOST: "239.1.2.3" }, {}], ["POD_IP", { POD_IP: "ff02::1" }, {}],
  ];
  test.each(cases)("%s %p %p is refused by name", (name, environment, worker) => {
    const base = config("/tmp/none", environment);
    expect(() => refuseUnbuilt({ ...base, worker: { ...base.worker, ...worker } })).toThrow(UsageError);
    expect(() => refuseUnbuilt({ ...base, worker: { ...base.worker, ...worker } })).toThrow(name);
  });
  test("file discovery, TCP and ZMQ are served", () => refuseUnbuilt(config("/tmp/none")));
});
