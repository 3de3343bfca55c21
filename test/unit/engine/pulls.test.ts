/** Prompts that one engine computes and another one goes on with: what the scheduler does at each stage, over two model backends. */
import { describe, expect, test } from "bun:test";
import type { KvSource } from "../../../src/engine/types.ts";
import { expectedTokens } from "../../support/fake-backend.ts";
import { type Bench, generated, runAll, scheduler, sequence, step, steps, VOCAB } from "./factories.ts";

const options = { host: null, holdMs: 60_000, key: null };
const prefillBench = (more: Parameters<typeof scheduler>[0] = {}): Bench => scheduler({ transfer: { ...options, host: "127.0.0.1" }, ...more });
const decodeBench = (more: Parameters<typeof scheduler>[0] = {}): Bench => scheduler({ transfer: options, ...more });
const transfer = ({ backend }: Bench) => backend.transfer!;
const ids = (length: number, salt = 0): number[] => Array.from({ length }, (_, index) => (index * 13 + salt * 101 + 7) % VOCAB);
const answer = (prompt: number[], count: number) => expectedTokens(prompt, 0n, count, VOCAB);

/** Computes and stages a prompt; where its copy waits. */
function staged(p: Bench, prompt: number[]): KvSource {
  const s = sequence({ prompt, stage: true });
  p.scheduler.add(s);
  runAll(p);
  return { host: "127.0.0.1", port: transfer(p).port, id: s.copyId!, layout: transfer(p).layout() };
}

/** Lets the network move and takes the ends of pulls in. */
function deliver(d: Bench): void {
  transfer(d).deliver();
  for (const event of transfer(d).events()) d.scheduler.pullEnded(event);
}

/** Nothing held, and every page accounted for. */
function idle({ backend }: Bench): void {
  const { held, free, cached, total, openSeqs } = backend.poolStats();
  expect({ held, openSeqs, sum: free + cached }).toEqual({ held: 0, openSeqs: 0, sum: total });
  backend.checkPool();
}

const reasons = (d: Bench) => d.scheduler.pulls.notes.map(({ outcome, fallback }) => [outcome, fallback]);

describe("staging", () => {
  test.each([1, 2, 15, 16, 17, 32, 33, 200])("a prompt of %d tokens is computed once, offered without its last token, and holds no page afterwards", (length) => {
    const p = prefillBench();
    const s = sequence({ prompt: ids(length), stage: true, maxTokens: 50, eos: [answer(ids(length), 1)[0]!] });
    p.scheduler.add(s);
    const traces = runAll(p);
    expect(traces.flatMap(({ outputs }) => outputs).map(({ finishReason }) => finishReason)).toEqual(["length"]);
    expect([...transfer(p).copies.values()]).toEqual([ids(length).slice(0, -1)]);
    expect(p.scheduler.promptTokensComputed).toBe(length);
    idle(p);
  });

  test("a preempted prompt is staged again from its beginning, and a cancelled one leaves no copy", () => {
    const p = prefillBench();
    const [a, b] = [sequence({ prompt: ids(200), stage: true }), sequence({ prompt: ids(150, 1), stage: true })];
    for (const s of [a, b]) p.scheduler.add(s);
    step(p);
    expect(transfer(p).stats().filling).toBe(2);
    p.scheduler.preemptLast();
    expect(transfer(p).stats().filling).toBe(1);
    p.scheduler.abort(a, "cancelled");
    runAll(p);
    expect([...transfer(p).copies.values()]).toEqual([ids(150, 1).slice(0, -1)]);
    expect(transfer(p).stats().filling).toBe(0);
    idle(p);
  });

  test("without host memory the prompt is refused as overloaded, and the next one goes on", () => {
    const p = prefillBench();
    const [a, b] = [sequence({ prompt: ids(40), stage: true }), sequence({ prompt: ids(20, 2), stage: false })];
    transfer(p).noMemory = true;
    for (const s of [a, b]) p.scheduler.add(s);
    runAll(p);
    expect(p.scheduler.refused.map(({ sequence: s, refusal }) => [s, refusal])).toEqual([[a, "overloaded"]]);
    expect([a.finishReason, b.finishReason]).toEqual(["error", "length"]);
    idle(p);
  });
});

describe("pulling", () => {
  test.each([1, 2, 15, 16, 17, 31, 32, 33, 34, 160])("a prompt of %d tokens: only its last token is computed, and the answer is that of one engine", (length) => {
    const p = prefillBench();
    const d = decodeBench();
    const prompt = ids(length);
    const s = sequence({ prompt, source: staged(p, prompt), maxTokens: 40 });
    d.scheduler.add(s);
    expect(step(d).rows.length).toBe(length === 1 ? 1 : 0);
    deliver(d);
    runAll(d);
    expect(generated(s)).toEqual(answer(prompt, 40));
    expect([d.scheduler.promptTokensComputed, s.numCached]).toEqual([1, length - 1]);
    expect(reasons(d)).toEqual([["done", false]]);
    transfer(p).deliver();
    expect([transfer(p).copies.size, d.scheduler.pulling]).toEqual([0, false]);
    idle(d);
  });

  test("while its pages come it holds them and a slot, takes no row, and others run and are admitted past it", () => {
    const p = prefillBench();
    const d = decodeBench({ maxNumSeqs: 3, chunkedPrefillSize: 16 });
    const running = sequence({ prompt: ids(10, 5), maxTokens: 100 });
    d.scheduler.add(running);
    step(d);
    const pulled = sequence({ prompt: ids(100), source: staged(p, ids(100)), maxTokens: 8 });
    d.scheduler.add(pulled);
    const late = sequence({ prompt: ids(40, 6), maxTokens: 8 });
    d.scheduler.add(late);
    const extra = sequence({ prompt: ids(4, 7), maxTokens: 1 });
    d.scheduler.add(extra);
    const traces = steps(d, 12);
    expect(traces.every(({ rows }) => rows.some((row) => row.sequence === running))).toBe(true);
    expect(traces.flatMap(({ rows }) => rows).some((row) => row.sequence === pulled)).toBe(false);
    expect([pulled.status, pulled.pulling, late.status, extra.status]).toEqual(["running", true, "finished", "finished"]);
    expect(d.backend.poolStats().held).toBeGreaterThanOrEqual(7);
    deliver(d);
    runAll(d);
    expect(generated(pulled)).toEqual(answer(ids(100), 8));
    idle(d);
  });

  test("a prefix that is here already is not pulled again, and what was pulled is in the prefix cache afterwards", () => {
    const p = prefillBench();
    const d = decodeBench();
    for (let turn = 0; turn < 2; turn++) {
      const s = sequence({ prompt: ids(100), source: staged(p, ids(100)), maxTokens: 2 });
      d.scheduler.add(s);
      step(d);
      deliver(d);
      runAll(d);
      expect([s.numCached, generated(s)]).toEqual([99, answer(ids(100), 2)]);
      if (turn === 1) continue;
      const again = sequence({ prompt: ids(100), maxTokens: 2 });
      d.scheduler.add(again);
      runAll(d);
      expect(again.numCached).toBe(96);
    }
    transfer(d).deliver();
    expect(transfer(p).copies.size).toBe(0);
    expect(d.scheduler.promptTokensComputed).toBeLessThanOrEqual(1 + 4 + 1);
    idle(d);
  });

  test.each(["LS_KV_UNKNOWN", "LS_KV_USED", "LS_KV_EXPIRED", "LS_KV_RESET", "LS_KV_TIMEOUT", "LS_KV_CORRUPT", "LS_KV_NO_ROUTE", "LS_KV_AUTH"] as const)("a pull that ends with %s becomes an ordinary prompt with the same answer", (fault) => {
    const p = prefillBench();
    const d = decodeBench();
    transfer(d).fault = fault;
    const s = sequence({ prompt: ids(70), source: staged(p, ids(70)), maxTokens: 20 });
    d.scheduler.add(s);
    step(d);
    deliver(d);
    idle(d);
    runAll(d);
    expect(generated(s)).toEqual(answer(ids(70), 20));
    expect(reasons(d)).toEqual([[fault.slice("LS_KV_".length).toLowerCase() as never, true]]);
    expect([s.numCached, d.scheduler.promptTokensComputed]).toEqual([0, 70]);
    idle(d);
  });

  test("without free pages the prompt is computed here, and the sender is told to drop its copy", () => {
    const p = prefillBench();
    const d = decodeBench({ pages: 16 });
    const big = sequence({ prompt: ids(150, 3), maxTokens: 60 });
    d.scheduler.add(big);
    steps(d, 4);
    const s = sequence({ prompt: ids(100), source: staged(p, ids(100)), maxTokens: 10 });
    d.scheduler.add(s);
    step(d);
    expect([reasons(d), s.status]).toEqual([[["no_pages", true]], "waiting"]);
    transfer(d).deliver();
    expect(transfer(p).copies.size).toBe(0);
    runAll(d);
    expect([generated(big), generated(s)]).toEqual([answer(ids(150, 3), 60), answer(ids(100), 10)]);
    idle(d);
  });

  test("KV of another layout is refused with the words of the library, before anything is opened", () => {
    const p = prefillBench({ digest: 2 });
    const d = decodeBench({ digest: 1 });
    const s = sequence({ prompt: ids(50), source: staged(p, ids(50)) });
    d.scheduler.add(s);
    expect(step(d).rows).toEqual([]);
    expect(d.scheduler.refused.map(({ refusal, message }) => [refusal, message.slice(0, 12)])).toEqual([["layout", "model digest"]]);
    expect([s.finishReason, reasons(d)]).toEqual(["error", [["refused", false]]]);
    transfer(d).deliver();
    expect(transfer(p).copies.size).toBe(0);
    idle(d);
  });

  test("preempted while its pages come it is an ordinary prompt; preempted later it is computed again", () => {
    const p = prefillBench();
    const d = decodeBench();
    const [early, late] = [ids(60), ids(60, 9)].map((prompt) => sequence({ prompt, source: staged(p, prompt), maxTokens: 30 })) as [ReturnType<typeof sequence>, ReturnType<typeof sequence>];
    d.scheduler.add(early);
    step(d);
    d.scheduler.preemptLast();
    expect([early.status, reasons(d)]).toEqual(["waiting", [["preempted", true]]]);
    d.scheduler.add(late);
    step(d);
    deliver(d);
    steps(d, 5);
    d.scheduler.preemptLast();
    runAll(d);
    expect([generated(early), generated(late)]).toEqual([answer(ids(60), 30), answer(ids(60, 9), 30)]);
    expect(late.numCached).toBe(59);
    expect(transfer(p).copies.size).toBe(0);
    idle(d);
  });
});

describe("cancelling", () => {
  test.each(["in the queue", "before the pull is done", "after it"] as const)("%s: pages come back and the sender's copy goes", (moment) => {
    const p = prefillBench();
    const d = decodeBench({ maxNumSeqs: 1 });
    const other = sequence({ prompt: ids(20, 4), maxTokens: 30 });
    if (moment === "in the queue") d.scheduler.add(other);
    const s = sequence({ prompt: ids(80), source: staged(p, ids(80)), maxTokens: 30 });
    d.scheduler.add(s);
    step(d);
    if (moment === "after it") {
      deliver(d);
      steps(d, 3);
    }
    expect(transfer(p).copies.size).toBe(moment === "after it" ? 0 : 1);
    d.scheduler.abort(s, "cancelled");
    deliver(d);
    expect([transfer(p).copies.size, s.status]).toEqual([0, "finished"]);
    runAll(d);
    expect(d.scheduler.hasWork).toBe(false);
    idle(d);
  });
});
