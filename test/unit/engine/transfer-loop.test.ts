/** The engine thread with transfers: it wakes for their ends, is never taken for stalled by them, and refuses prompts at the cap. */
import { afterEach, expect, test } from "bun:test";
import { MessageChannel, receiveMessageOnPort, type MessagePort } from "node:worker_threads";
import { EngineLoop } from "../../../src/engine/loop.ts";
import { type Command, type StepMessage, unpackOutputs } from "../../../src/engine/protocol.ts";
import { maxBatchTokens } from "../../../src/engine/step-budget.ts";
import { StepPlan } from "../../../src/engine/step-plan.ts";
import type { KvSource } from "../../../src/engine/types.ts";
import { expectedTokens, FakeBackend } from "../../support/fake-backend.ts";
import { fakeOptions } from "../../support/fake-engine.ts";
import type { FakeTransfer } from "../../support/fake-transfer.ts";

let ports: MessagePort[] = [];
afterEach(() => {
  for (const port of ports) port.close();
  ports = [];
});
const VOCAB = 1000;
const prompt = (length: number, salt = 0): number[] => Array.from({ length }, (_, index) => (index * 3 + salt * 17) % VOCAB);

/** A loop in this thread that runs until `until`, which is asked each time it looks for the ends of transfers or for work. */
function loop(host: string | null, capBytes: number, clock: () => number = () => 0) {
  const engine = fakeOptions({ contextLength: 200 });
  const backend = new FakeBackend({ vocab: VOCAB, maxSeqs: 8, maxBatchTokens: maxBatchTokens(engine), prefixCache: true });
  backend.createPool(64);
  const native = backend.startTransfer({ host, holdMs: 1, key: null }, new Uint8Array(32));
  const { port1, port2 } = new MessageChannel();
  ports.push(port1, port2);
  const data = { kind: "layerscale-engine" as const, options: engine, checkPages: true, stepsSubmitted: null, port: port2, signal: new Int32Array(new SharedArrayBuffer(4)) };
  const instance = new EngineLoop(backend, new StepPlan(8, maxBatchTokens(engine)), data, 200, clock, { native, capBytes });
  const send = (command: Command): void => {
    port1.postMessage(command);
    Atomics.add(data.signal, 0, 1);
  };
  let turns = 0;
  const run = (until: (turn: number) => boolean): void => {
    const schedule = instance.scheduler.schedule.bind(instance.scheduler);
    instance.scheduler.schedule = () => {
      if (++turns > 10_000) throw new Error("the condition never came");
      if (until(turns)) send({ kind: "stop" });
      return schedule();
    };
    instance.run();
    instance.scheduler.schedule = schedule;
  };
  const add = (key: number, tokens: number[], part: { stage?: boolean; source?: KvSource | null }): void => send({
    kind: "add", key, prompt: tokens, sampling: { temperature: 0, topP: 1, seed: 0n, maxTokens: 6, ignoreEos: false, logprobs: null },
    eosTokenIds: [], stopTokenIds: [], priority: 0, cacheDomain: 0n, internal: false, submittedAt: 0, ...part,
  });
  const steps = (): StepMessage[] => {
    const all: StepMessage[] = [];
    for (let received = receiveMessageOnPort(port1); received !== undefined; received = receiveMessageOnPort(port1)) if (received.message.kind === "step") all.push(received.message as StepMessage);
    return all;
  };
  return { instance, native, run, add, send, steps };
}

const outputs = (steps: StepMessage[]) => steps.flatMap((step) => unpackOutputs(step.outputs));
const sourceOf = (native: FakeTransfer, id: bigint): KvSource => ({ host: "127.0.0.1", port: native.port, id, layout: native.layout() });

test("a copy is told of with its request, counted, and its end is told though nothing else happens", () => {
  const p = loop("127.0.0.1", 1e9);
  p.add(5, prompt(50), { stage: true });
  let gone = 0;
  p.run((turn) => {
    if (p.native.copies.size === 1 && gone === 0) {
      gone = turn;
      p.native.end([...p.native.copies.keys()][0]!, "LS_KV_EXPIRED");
    }
    return gone > 0 && turn > gone;
  });
  const steps = p.steps();
  const staged = steps.find((step) => step.staged.length > 0)!;
  expect(staged.staged).toEqual([[5, expect.any(BigInt)]]);
  expect(staged.stats.transfer).toMatchObject({ staged: 1, stagedBytes: 49 * 8 });
  expect(steps.flatMap((step) => step.transfers)).toEqual([{ key: null, id: staged.staged[0]![1], outcome: "expired", bytes: 0, micros: 1000, detail: "LS_KV_EXPIRED", fallback: false }]);
  expect(steps.at(-1)!.stats.transfer).toMatchObject({ staged: 0, stagedBytes: 0 });
});

test("a prompt for staging is refused while copies have reached the cap, not for prompts that are queued or computed", () => {
  const p = loop("127.0.0.1", 2 * 49 * 8);
  for (const key of [1, 2, 3]) p.add(key, prompt(50, key), { stage: true });
  p.run(() => p.native.copies.size === 3);
  expect(outputs(p.steps()).map(({ key, finishReason }) => [key, finishReason])).toEqual([[1, "length"], [2, "length"], [3, "length"]]);

  const full = loop("127.0.0.1", 2 * 49 * 8);
  for (const key of [1, 2]) full.add(key, prompt(50, key), { stage: true });
  let added = false;
  full.run(() => {
    if (full.native.copies.size < 2) return false;
    if (!added) {
      full.add(3, prompt(50, 3), { stage: true });
      full.add(4, prompt(50, 4), {});
    }
    added = true;
    return !full.instance.scheduler.hasWork && full.instance.stats().steps > 5;
  });
  const steps = full.steps();
  expect(steps.flatMap((step) => step.errors)).toEqual([[3, `2 copies of KV wait for decode workers to fetch them, ${2 * 49 * 8} bytes of at most ${2 * 49 * 8}`, "overloaded"]]);
  expect(outputs(steps).filter(({ key }) => key === 4).map(({ token }) => token)).toEqual(expectedTokens(prompt(50, 4), 0n, 6, VOCAB));
});

test("a pull that takes long is no stall; when it has come the answer is the same", () => {
  const p = loop("127.0.0.1", 1e9);
  p.add(1, prompt(70), { stage: true });
  p.run(() => p.native.copies.size === 1);
  let now = 0;
  const d = loop(null, 0, () => (now += 1000));
  d.add(9, prompt(70), { source: sourceOf(p.native, [...p.native.copies.keys()][0]!) });
  d.run((turn) => {
    if (turn === 30) d.native.deliver();
    return turn > 30 && !d.instance.scheduler.hasWork;
  });
  const steps = d.steps();
  expect(outputs(steps).map(({ token }) => token)).toEqual(expectedTokens(prompt(70), 0n, 6, VOCAB));
  expect(outputs(steps).at(-1)!.cachedTokens).toBe(69);
  // What the pull holds is told while it lasts.
  expect(steps[0]!.stats).toMatchObject({ running: 1, pagesHeld: 5, transfer: { pulls: 1 } });
  expect(steps.flatMap((step) => step.transfers)).toMatchObject([{ key: 9, outcome: "done", bytes: 69 * 8, fallback: false }]);
  expect(steps.at(-1)!.stats).toMatchObject({ promptTokensComputed: 1, stalls: 0, pagesHeld: 0 });
});

test("a cancelled pull is told as gone at once, though the network still holds it", () => {
  const p = loop("127.0.0.1", 1e9);
  p.add(1, prompt(70), { stage: true });
  p.run(() => p.native.copies.size === 1);
  const d = loop(null, 0);
  const counts = d.native.stats.bind(d.native);
  d.native.stats = () => ({ ...counts(), pulls: 1 });
  d.add(9, prompt(70), { source: sourceOf(p.native, [...p.native.copies.keys()][0]!) });
  d.run((turn) => {
    if (turn === 5) d.send({ kind: "cancel", key: 9 });
    return turn > 5 && d.instance.scheduler.running.length === 0;
  });
  const told = d.steps().map(({ stats }) => [stats.pagesHeld, stats.transfer!.pulls]);
  expect([told[0], told.at(-1)]).toEqual([[5, 1], [0, 0]]);
});

test("a prompt that can never run here lets the sender drop its copy; so does a stop", () => {
  const p = loop("127.0.0.1", 1e9);
  for (const key of [1, 2]) p.add(key, prompt(70, key), { stage: true });
  p.run(() => p.native.copies.size === 2);
  const [first, second] = [...p.native.copies.keys()] as [bigint, bigint];
  const d = loop(null, 0);
  d.add(1, prompt(250), { source: sourceOf(p.native, first) });
  d.add(2, prompt(70, 2), { source: sourceOf(p.native, second) });
  d.run((turn) => turn === 5);
  d.native.deliver();
  expect(d.native.dropped).toEqual([first, second]);
  expect(p.native.copies.size).toBe(0);
});

test("commands: a copy of this engine is released, one of another engine is dropped, unknown ones do no harm", () => {
  const p = loop("127.0.0.1", 1e9);
  p.add(1, prompt(40), { stage: true });
  p.run(() => p.native.copies.size === 1);
  const copy = [...p.native.copies.keys()][0]!;
  const again = loop(null, 0);
  again.send({ kind: "drop", source: sourceOf(p.native, copy) });
  again.send({ kind: "release", copy: 99n });
  again.run(() => true);
  again.native.deliver();
  expect([again.native.dropped, p.native.copies.size]).toEqual([[copy], 0]);
});
