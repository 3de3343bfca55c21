/** Prefill and decode workers that die, stall, fill up or are left alone: every request ends, and nothing stays behind. */
import { describe, expect, test } from "bun:test";
import { eventually } from "../../support/launch.ts";
import { until } from "../../unit/dynamo/plane-client.ts";
import { cachedOf, computed, decodeCall, decodeLeg, exact, fallbacks, nothingStaged, pair, prefillCall, prefillLeg, prompt, Proxy, sample, staged } from "./disagg-support.ts";
import { LIMIT_MS, readEvents } from "./support.ts";

const TEST_MS = 3 * LIMIT_MS;

describe("copies that nobody fetches", () => {
  test("fill the cap: 503 for chat and completions, streamed too; they expire, and prompts are taken again", async () => {
    // A pool of 64 pages; each prompt's copy takes 13. They are held long enough for five prompts on a busy machine.
    await using p = await pair({ prefill: { args: ["--max-total-tokens", "1024"], env: { LAYERSCALE_KV_HOLD_SECONDS: "20" } } });
    let copies = 0;
    for (;;) {
      const call = await prefillCall(p.prefill, prompt(200, 30 + copies));
      if (call.errors.length > 0) {
        expect(call.errors).toEqual([{ error_type: "Unavailable", message: expect.stringMatching(/overloaded: \d copies of KV wait/) }]);
        break;
      }
      expect(++copies).toBeLessThan(10);
    }
    expect(copies).toBeGreaterThanOrEqual(4);
    for (const stream of [false, true]) {
      expect((await p.d.ask("completions", prompt(200, 50), { max_tokens: 2, stream })).status).toBe(503);
      expect((await p.d.ask("chat", "Hello", { max_tokens: 2, stream })).status).toBe(503);
    }
    expect(await p.prefill.metric("layerscale_kv_transfer_overloads_total")).toBe(5);
    await nothingStaged(p.prefill);
    expect(await sample(p.prefill, 'layerscale_kv_transfer_copies_total{outcome="expired"}')).toBe(copies);
    expect((await p.d.ask("completions", prompt(200, 51), { max_tokens: 2, ...exact })).status).toBe(200);
    await p.prefill.idle();
  }, TEST_MS);

  test("are gone after their time, and the decode leg that comes later computes the prompt", async () => {
    await using p = await pair({ prefill: { env: { LAYERSCALE_KV_HOLD_SECONDS: "1" } }, served: false });
    const params = await prefillLeg(p.prefill, prompt(100, 60));
    expect(await staged(p.prefill)).toBe(1);
    await nothingStaged(p.prefill);
    const call = await decodeLeg(p.decode, prompt(100, 60), params);
    expect([call.tokens.length, cachedOf(call), await fallbacks(p.decode, "expired"), await computed(p.decode)]).toEqual([8, 0, 1, 100]);
  }, TEST_MS);
});

test("cancelled at every stage: in the queue, before the pull, during it, in decode; pages come back and copies go", async () => {
  await using p = await pair({ decode: { args: ["--max-num-seqs", "1"] } });
  const both = async () => {
    await p.decode.idle();
    await p.prefill.idle();
    await nothingStaged(p.prefill);
  };
  // At its beginning: the frontend says so as soon as it can.
  let call = await decodeCall(p.decode, prompt(100, 70), await prefillLeg(p.prefill, prompt(100, 70)), 1000);
  await until("the prologue", () => call.prologue !== null);
  call.control("kill");
  await both();
  call.close();

  // Before its answer could be opened.
  const gone = await decodeCall(p.decode, prompt(100, 71), await prefillLeg(p.prefill, prompt(100, 71)), 1000);
  gone.close();
  await both();

  // In the queue, behind a sequence that has the only slot.
  const stop = new AbortController();
  const long = await p.d.request("completions", prompt(20, 72), { max_tokens: 2000, stream: true, ...exact }, stop.signal);
  await readEvents(long, 2);
  call = await decodeCall(p.decode, prompt(100, 73), await prefillLeg(p.prefill, prompt(100, 73)), 1000);
  await eventually(async () => (await p.decode.metric("layerscale_requests_queued")) === 1, "the request is queued", LIMIT_MS);
  expect(await staged(p.prefill)).toBe(1);
  call.control("kill");
  await nothingStaged(p.prefill);
  call.close();
  // In decode.
  stop.abort();
  await both();

  // While its pages come: the proxy keeps the rest.
  const params = await prefillLeg(p.prefill, prompt(300, 74));
  await using proxy = await Proxy.start(params.port, (chunk, before) => (before < 200_000 ? chunk : null));
  call = await decodeCall(p.decode, prompt(300, 74), { ...params, port: proxy.port }, 1000);
  await eventually(async () => (await p.decode.metric("layerscale_kv_transfers_pulling")) === 1 && proxy.received > 200_000, "the pull is under way", LIMIT_MS);
  expect((await p.decode.metric("layerscale_kv_pages_held"))!).toBeGreaterThanOrEqual(19);
  call.control("kill");
  await both();
  call.close();
  expect(await p.decode.metric("layerscale_kv_transfers_pulling")).toBe(0);

  // The client leaves while the prompt is computed: the prefill worker is not told, and the decode worker lets the copy go.
  const leave = new AbortController();
  const pending = p.d.request("completions", prompt(900, 75), { max_tokens: 50, stream: true, ...exact }, leave.signal);
  await eventually(async () => (await p.prefill.metric("layerscale_requests_running")) === 1, "the prompt is computed", LIMIT_MS);
  leave.abort();
  await pending.catch(() => {});
  await both();
  expect((await p.d.ask("completions", prompt(40, 76), { max_tokens: 2, ...exact })).status).toBe(200);
}, 2 * TEST_MS);

test("a route that swallows everything: bounded, then the prompt is computed while others went on", async () => {
  await using p = await pair({ served: false });
  const params = await prefillLeg(p.prefill, prompt(120, 80));
  await using hole = await Proxy.start(params.port, () => null);
  const call = await decodeCall(p.decode, prompt(120, 80), { ...params, port: hole.port });
  const other = await decodeLeg(p.decode, prompt(50, 81), await prefillLeg(p.prefill, prompt(50, 81)));
  expect([other.tokens.length, call.ended]).toEqual([8, false]);
  await until("the decode leg ends", () => call.ended, 60_000);
  call.close();
  expect([call.tokens.length, await fallbacks(p.decode, "timeout")]).toEqual([8, 1]);
  await nothingStaged(p.prefill);
}, TEST_MS);

test("kill -9 of the prefill worker in the middle of the bytes, and before they are asked for: the same tokens, at once", async () => {
  for (const moment of ["in the middle", "before"] as const) {
    await using p = await pair({ served: false });
    const tokens = prompt(400, 90);
    const reference = await decodeLeg(p.decode, tokens, "none");
    const fresh = prompt(400, 91);
    const params = await prefillLeg(p.prefill, fresh);
    await using proxy = await Proxy.start(params.port, (chunk, before) => {
      if (before < 300_000) return chunk;
      p.prefill.process.signal("SIGKILL");
      return null;
    });
    if (moment === "before") await p.prefill.kill();
    const call = await decodeLeg(p.decode, fresh, moment === "before" ? params : { ...params, port: proxy.port });
    expect([moment, call.tokens.length, call.errors, cachedOf(call)]).toEqual([moment, 8, [], 0]);
    expect(await fallbacks(p.decode, moment === "before" ? "no_route" : "reset")).toBe(1);
    expect(reference.tokens.length).toBe(8);
    await p.decode.idle();
  }
}, 2 * TEST_MS);

test("kill -9 of the decode worker in the middle of a pull: the copy goes, and another decode worker serves", async () => {
  await using p = await pair();
  const params = await prefillLeg(p.prefill, prompt(300, 95));
  await using proxy = await Proxy.start(params.port, (chunk, before) => (before < 200_000 ? chunk : null));
  const call = await decodeCall(p.decode, prompt(300, 95), { ...params, port: proxy.port });
  await eventually(() => proxy.received > 200_000, "the pull is under way", LIMIT_MS);
  await p.decode.kill();
  await nothingStaged(p.prefill);
  call.close();
  await p.d.worker(["--disaggregation-mode", "decode"], { env: { POD_IP: "127.0.0.1" } });
  await p.prefill.idle();
}, TEST_MS);

test("a decode worker without free pages computes the prompt itself, and both requests get their tokens", async () => {
  await using p = await pair({ decode: { args: ["--max-total-tokens", "512"] } });
  const long = await p.d.request("completions", prompt(300, 100), { max_tokens: 150, stream: true, ...exact });
  const { rest } = await readEvents(long, 2);
  const call = await decodeLeg(p.decode, prompt(250, 101), await prefillLeg(p.prefill, prompt(250, 101)));
  expect([call.tokens.length, await fallbacks(p.decode, "no_pages")]).toEqual([8, 1]);
  expect((await rest()).includes("[DONE]")).toBe(true);
  await nothingStaged(p.prefill);
  await p.decode.idle();
}, TEST_MS);

describe("SIGTERM of a prefill worker", () => {
  test("it leaves discovery, serves the fetch of its copies, and exits 0 as soon as they are gone", async () => {
    await using p = await pair({ prefill: { env: { DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS: "0" } } });
    const params = await prefillLeg(p.prefill, prompt(100, 110));
    p.prefill.process.signal("SIGTERM");
    await eventually(() => !p.d.records("v1/instances").some((key) => key.includes(p.prefill.instance)), "the record is gone", LIMIT_MS);
    await p.prefill.process.log("worker left discovery");
    expect(p.prefill.process.running).toBe(true);
    const call = await decodeLeg(p.decode, prompt(100, 110), params);
    expect([call.tokens.length, cachedOf(call)]).toEqual([8, 99]);
    expect(await p.prefill.process.exit()).toBe(0);
  }, TEST_MS);

  test("copies that nobody fetches hold it for 28 s at most", async () => {
    await using p = await pair({ served: false });
    await prefillLeg(p.prefill, prompt(100, 111));
    const from = performance.now();
    p.prefill.process.signal("SIGTERM");
    expect(await p.prefill.process.exit(60_000)).toBe(0);
    // What the page promises: a stop timeout of 30 s is enough.
    expect(performance.now() - from).toBeLessThan(30_000);
    expect(p.prefill.process.logs.find((line) => line.message === "staged KV is given up")).toMatchObject({ copies: 1 });
  }, TEST_MS);
});
