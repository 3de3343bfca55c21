import { afterEach, describe, expect, test } from "bun:test";
import { MessageChannel, receiveMessageOnPort, type MessagePort } from "node:worker_threads";
import { EngineLoop } from "../../../src/engine/loop.ts";
import { NativeError } from "../../../src/engine/native/backend.ts";
import { ls_status } from "../../../src/engine/native/abi.gen.ts";
import { unpackOutputs, type Command, type Report } from "../../../src/engine/protocol.ts";
import { maxBatchTokens } from "../../../src/engine/step-budget.ts";
import { StepPlan } from "../../../src/engine/step-plan.ts";
import { expectedTokens, FakeBackend } from "../../support/fake-backend.ts";
import { fakeOptions } from "../../support/fake-engine.ts";

let ports: MessagePort[] = [];
afterEach(() => {
  for (const port of ports) port.close();
  ports = [];
});

/** A loop in this thread. Commands are sent before run(); a stop among them ends it when they are done. */
function loop(options: { backend?: (backend: FakeBackend) => void; checkPages?: boolean; pages?: number; clock?: () => number; stepsSubmitted?: number } = {}) {
  const engine = fakeOptions({ contextLength: 200 });
  const { pages = 16, checkPages = false, clock = () => 0, stepsSubmitted = 1 } = options;
  const backend = new FakeBackend({ vocab: 1000, maxSeqs: 8, maxBatchTokens: maxBatchTokens(engine), prefixCache: true });
  backend.createPool(pages);
  options.backend?.(backend);
  const { port1, port2 } = new MessageChannel();
  ports.push(port1, port2);
  const data = { kind: "layerscale-engine" as const, options: engine, checkPages, stepsSubmitted, port: port2, signal: new Int32Array(new SharedArrayBuffer(4)) };
  const instance = new EngineLoop(backend, new StepPlan(8, maxBatchTokens(engine)), data, 200, clock);
  const send = (command: Command): void => {
    port1.postMessage(command);
    Atomics.add(data.signal, 0, 1);
  };
  const add = (key: number, prompt: number[], maxTokens = 4): void => send({
    kind: "add", key, prompt, sampling: { temperature: 0, topP: 1, seed: 0n, maxTokens, ignoreEos: false, logprobs: null },
    eosTokenIds: [], stopTokenIds: [], priority: 0, cacheDomain: 0n, internal: false, submittedAt: 0,
  });
  const reports = (): Report[] => {
    const all: Report[] = [];
    for (let received = receiveMessageOnPort(port1); received !== undefined; received = receiveMessageOnPort(port1)) all.push(received.message as Report);
    return all;
  };
  return { instance, backend, send, add, reports };
}

const prompt = (length: number): number[] => Array.from({ length }, (_, index) => index);

/** Ends the loop with a stop command once nothing is left to do. */
function stopWhenIdle(bench: ReturnType<typeof loop>): void {
  const schedule = bench.instance.scheduler.schedule.bind(bench.instance.scheduler);
  bench.instance.scheduler.schedule = () => {
    const rows = schedule();
    if (rows.length === 0 && !bench.instance.scheduler.hasWork) bench.send({ kind: "stop" });
    return rows;
  };
}

describe("reports", () => {
  test("one message per step with all of its outputs", () => {
    const bench = loop({ checkPages: true });
    for (const key of [1, 2, 3]) bench.add(key, prompt(10 + key), 4);
    stopWhenIdle(bench);
    bench.instance.run();
    const steps = bench.reports().filter((report) => report.kind === "step").map((report) => [...unpackOutputs(report.outputs)].map((output) => output.key));
    expect(steps).toEqual([[1, 2, 3], [1, 2, 3], [1, 2, 3], [1, 2, 3], []]);
  });

  test("stop ends what is open with error", () => {
    const bench = loop();
    bench.add(7, prompt(10));
    bench.send({ kind: "stop" });
    bench.instance.run();
    const [report] = bench.reports();
    expect(report).toMatchObject({ kind: "step", errors: [[7, "the engine is stopping", null]] });
    expect([...unpackOutputs((report as Report & { kind: "step" }).outputs)]).toMatchObject([{ key: 7, finishReason: "error", token: null }]);
  });
});

describe("failures are never silent", () => {
  test("work queued but no step possible for 5 s", () => {
    let now = 0;
    const bench = loop({
      clock: () => (now += 900),
      // A pool whose pages have leaked: none is free, and no sequence holds one.
      backend: (backend) => (backend.poolStats = () => ({ total: 16, free: 0, cached: 0, held: 16, openSeqs: 0, evictions: 0 })),
    });
    bench.add(1, prompt(10));
    expect(() => bench.instance.run()).toThrow("no step possible for 5000 ms: 1 running, 0 waiting, 0 of 16 pages free");
    expect(bench.instance.stats().stalls).toBe(1);
  });

  test("counts that differ from the arithmetic, when checked", () => {
    const bench = loop({
      checkPages: true,
      backend(backend) {
        const wait = backend.wait.bind(backend);
        backend.wait = (result) => {
          const words = wait(result);
          result[2]!--;
          return words;
        };
      },
    });
    bench.add(1, prompt(10));
    stopWhenIdle(bench);
    expect(() => bench.instance.run()).toThrow("page counts differ");
  });

  test("pages still held when idle, when checked", () => {
    const bench = loop({ checkPages: true });
    const closeSequence = bench.backend.closeSequence.bind(bench.backend);
    bench.backend.closeSequence = (slot, commit) => {
      closeSequence(slot, commit);
      bench.backend.openSequence(Int32Array.from(prompt(40)), 40, 0n);
    };
    bench.add(1, prompt(40), 1);
    stopWhenIdle(bench);
    expect(() => bench.instance.run()).toThrow("idle, but 1 sequences are open");
  });

  test.each([["at once when checked", true], ["when it never ends", false]])("plans refused for want of pages: %s", (_, checkPages) => {
    const bench = loop({ checkPages, backend: (backend) => (backend.submit = () => { throw new NativeError(ls_status.LS_NO_PAGES, "ls_step_submit", "no pages"); }) });
    for (const key of [1, 2]) bench.add(key, prompt(10));
    stopWhenIdle(bench);
    expect(() => bench.instance.run()).toThrow("LS_NO_PAGES");
  });

  test("a result of another step", () => {
    const bench = loop({
      backend(backend) {
        const wait = backend.wait.bind(backend);
        backend.wait = (result) => {
          const words = wait(result);
          result[1]! += 1;
          return words;
        };
      },
    });
    bench.add(1, prompt(10));
    stopWhenIdle(bench);
    expect(() => bench.instance.run()).toThrow("returned step 2, expected 1");
  });
});

describe("two steps submitted", () => {
  test("every token is told once and in order, and the pool is idle after the rest of the results", () => {
    const bench = loop({ checkPages: true, stepsSubmitted: 2 });
    for (const key of [1, 2, 3]) bench.add(key, prompt(10 + key), 3 + key);
    stopWhenIdle(bench);
    bench.instance.run();
    const tokens: number[][] = [[], [], []];
    for (const report of bench.reports()) if (report.kind === "step") for (const { key, token } of unpackOutputs(report.outputs)) tokens[key - 1]!.push(token!);
    expect(tokens).toEqual([1, 2, 3].map((key) => expectedTokens(prompt(10 + key), 0n, 3 + key, 1000)));
    expect(bench.backend.poolStats()).toMatchObject({ held: 0, openSeqs: 0 });
  });

  test("a pause is confirmed when nothing is left on the device", () => {
    const order: string[] = [];
    const bench = loop({
      stepsSubmitted: 2,
      backend(backend) {
        const { submit, wait } = { submit: backend.submit.bind(backend), wait: backend.wait.bind(backend) };
        backend.submit = (plan, words) => {
          submit(plan, words);
          order.push(`s${plan[2]}`);
          if (plan[2] === 3) {
            bench.send({ kind: "pause", id: 5, paused: true });
            bench.send({ kind: "stop" });
          }
        };
        backend.wait = (result) => {
          const words = wait(result);
          order.push(`w${result[1]}`);
          return words;
        };
      },
    });
    bench.add(1, prompt(10), 50);
    bench.instance.run();
    expect(order.join(" ")).toBe("s1 s2 w1 s3 w2 w3");
    const reports = bench.reports();
    const confirmed = reports.findIndex((report) => report.kind === "done" && report.id === 5);
    const told = reports.slice(0, confirmed).flatMap((report) => (report.kind === "step" ? [...unpackOutputs(report.outputs)] : []));
    expect(told.length).toBe(3);
  });
});

test("a plan refused for want of pages: native is trusted, the last sequence makes room, all finish", () => {
  let refusals = 0;
  const bench = loop({
    backend(backend) {
      const submit = backend.submit.bind(backend);
      backend.submit = (plan, words) => {
        if (plan[0]! > 1 && refusals < 3) {
          refusals++;
          throw new NativeError(ls_status.LS_NO_PAGES, "ls_step_submit", "no pages");
        }
        submit(plan, words);
      };
    },
  });
  for (const key of [1, 2]) bench.add(key, prompt(20 + key), 6);
  stopWhenIdle(bench);
  bench.instance.run();
  const tokens = new Map<number, number[]>();
  for (const report of bench.reports()) {
    if (report.kind !== "step") continue;
    for (const { key, token } of unpackOutputs(report.outputs)) if (token !== null) tokens.set(key, [...(tokens.get(key) ?? []), token]);
  }
  expect(refusals).toBeGreaterThan(0);
  expect(tokens).toEqual(new Map([[1, expectedTokens(prompt(21), 0n, 6, 1000)], [2, expectedTokens(prompt(22), 0n, 6, 1000)]]));
});
