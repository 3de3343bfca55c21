/** Health checks in a full engine, and an engine that stands still on request. */
import { describe, expect, test } from "bun:test";
import { expectedTokens } from "../../support/fake-backend.ts";
import { collect, fakeEngine, request } from "../../support/fake-engine.ts";
import { firstToken, generated, runAll, scheduler, sequence, step, steps, VOCAB } from "./factories.ts";

const PROBE = 2 ** 31;
const probe = () => sequence({ prompt: 1, maxTokens: 1, internal: true, priority: PROBE });

describe("a health check", () => {
  test("takes the place of the sequence of lowest rank when all slots are taken, at once, and everyone ends as if alone", () => {
    const b = scheduler({ maxNumSeqs: 2 });
    const all = [sequence({ maxTokens: 30 }), sequence({ maxTokens: 30, priority: 4 })];
    const prompts = all.map((s) => Array.from(s.tokens.subarray(0, s.promptLength)));
    all.forEach((s) => b.scheduler.add(s));
    steps(b, 5);
    const check = probe();
    b.scheduler.add(check);
    expect(firstToken([step(b)], check)).toBe(0);
    expect([all[0]!.status, all[1]!.status, b.scheduler.preemptions]).toEqual(["waiting", "running", 1]);
    runAll(b);
    all.forEach((s, i) => expect(generated(s)).toEqual(expectedTokens(prompts[i]!, 0n, 30, VOCAB)));
  });
  test("gets a page of a full pool within as many steps as sequences run", () => {
    const b = scheduler({ pages: 8, maxNumSeqs: 8, prefixCache: false });
    for (let i = 0; i < 4; i++) b.scheduler.add(sequence({ prompt: 20, maxTokens: 10 }));
    steps(b, 3);
    const check = probe();
    b.scheduler.add(check);
    const at = firstToken(steps(b, 4), check);
    expect(at).toBeGreaterThanOrEqual(0);
    runAll(b);
  });
  test("costs nobody a place while there is room, and does not displace another one", () => {
    const b = scheduler({ maxNumSeqs: 2 });
    b.scheduler.add(sequence({ maxTokens: 20 }));
    step(b);
    b.scheduler.add(probe());
    const second = probe();
    b.scheduler.add(second);
    step(b);
    expect([b.scheduler.preemptions, second.status]).toEqual([0, "waiting"]);
    runAll(b);
  });
  test("a client's request of high priority displaces nobody", () => {
    const b = scheduler({ maxNumSeqs: 1 });
    b.scheduler.add(sequence({ maxTokens: 20 }));
    step(b);
    b.scheduler.add(sequence({ priority: PROBE - 1 }));
    steps(b, 3);
    expect(b.scheduler.preemptions).toBe(0);
    runAll(b);
  });
});

describe("pause", () => {
  test("no step runs until resume; sequences and newcomers go on exactly, cancels and flushes are heard", async () => {
    await using engine = await fakeEngine({ libraryPath: "fake?ms=1" });
    const prompt = Array.from({ length: 20 }, (_, i) => i + 1);
    const running = engine.generate(request({ prompt, sampling: { maxTokens: 100 } }));
    const first = (await running.next()).value as { tokenIds: number[] };
    await engine.pause();
    await engine.pause();
    const { steps: before } = engine.stats();
    const late = collect(engine.generate(request({ prompt: [7, 8, 9] })));
    const leave = new AbortController();
    const left = collect(engine.generate(request({ prompt: [5, 6] }), leave.signal));
    leave.abort();
    expect((await left).last.finishReason).toBe("cancelled");
    await engine.clearCache();
    expect(engine.stats().steps).toBe(before);
    expect(engine.stats()).toMatchObject({ running: 1, waiting: 1 });
    await engine.resume();
    const rest = await collect(running);
    expect([...first.tokenIds, ...rest.tokens]).toEqual(expectedTokens(prompt, 1n, 100, 1000));
    expect((await late).tokens).toEqual(expectedTokens([7, 8, 9], 1n, 8, 1000));
  });
  test("is no stall, however long, and a paused engine stops", async () => {
    const engine = await fakeEngine();
    await engine.pause();
    const waiting = collect(engine.generate(request()));
    await engine.stop();
    expect((await waiting).last.finishReason).toBe("error");
    expect(engine.stats().stalls).toBe(0);
    await expect(engine.resume()).rejects.toThrow("stopping");
  });
});
