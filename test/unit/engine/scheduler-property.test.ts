import { expect, test } from "bun:test";
import type { Sequence } from "../../../src/engine/sequence.ts";
import { expectedTokens } from "../../support/fake-backend.ts";
import { advance, generated, random, scheduler, sequence, VOCAB } from "./factories.ts";

interface Tracked {
  sequence: Sequence;
  prompt: number[];
  ends: number;
  aborted: boolean;
  stepsAlive: number;
}

const seen = { preemptions: 0, evictions: 0, hits: 0, aborts: 0, ahead: 0, dead: 0 };

/**
 * Random requests, cancels and cache clears against the model backend. After every action: free + cached + held = total and every
 * reference is accounted for (step() checks the pool; page counts are compared with the scheduler's arithmetic). Each request ends
 * exactly once, with the tokens that it would have alone. With two steps submitted, all of this happens while results are outstanding.
 */
test.each(Array.from({ length: 120 }, (_, index) => [index % 60, 1 + Math.floor(index / 60)] as const))("random trace %d, %d steps submitted", (seed, depth) => {
  const { below, chance } = random(seed * 7919 + 1);
  const pages = 6 + below(40);
  const chunkedPrefillSize = [1, 7, 16, 33, 64, 256][below(6)]!;
  const maxNumSeqs = 1 + below(10);
  const contextLength = Math.min(pages * 16, 20 + below(500));
  const prefixCache = !chance(0.2);
  const bench = scheduler({ pages, chunkedPrefillSize, maxNumSeqs, contextLength, prefixCache });
  const tracked: Tracked[] = [];
  const prefixes = Array.from({ length: 3 }, (_, which) => Array.from({ length: contextLength }, (_, index) => (index * (which + 2)) % VOCAB));
  const alive = (): Tracked[] => tracked.filter(({ sequence: s }) => s.status !== "finished");

  const add = (): void => {
    const length = 1 + below(Math.min(contextLength - 1, chance(0.2) ? 1000 : 60));
    const cut = below(length + 1);
    const prompt = [...prefixes[below(3)]!.slice(0, cut), ...Array.from({ length: length - cut }, () => below(VOCAB))];
    const s = sequence({
      prompt, maxTokens: chance(0.1) ? null : 1 + below(60), eos: chance(0.3) ? [below(VOCAB), below(VOCAB), below(VOCAB)] : [],
      priority: chance(0.2) ? below(3) : 0, domain: BigInt(below(2)), seed: BigInt(seed), internal: chance(0.05),
    });
    tracked.push({ sequence: s, prompt, ends: 0, aborted: false, stepsAlive: 0 });
    bench.scheduler.add(s);
  };

  let work = 150;
  let steps = 0;
  while (work > 0 || bench.scheduler.hasWork || bench.submitted.length > 0) {
    if (work > 0 && chance(0.4)) {
      add();
      work--;
    }
    if (chance(0.04)) {
      const victim = alive()[below(Math.max(1, alive().length))];
      if (victim !== undefined && bench.scheduler.abort(victim.sequence, "cancelled") !== null) {
        victim.ends++;
        victim.aborted = true;
      }
      bench.backend.checkPool();
    }
    if (chance(0.01)) {
      bench.backend.clearCache();
      bench.scheduler.kv.sync();
      bench.backend.checkPool();
    }
    const hadWork = bench.scheduler.hasWork;
    const before = bench.submitted.length;
    const { rows, outputs } = advance(bench, depth);
    // A step that cannot be planned yet waits for a result, never for nothing.
    if (hadWork) expect(rows.length + before).toBeGreaterThan(0);
    if (rows.length > 0 && before > 0) seen.ahead++;
    expect(rows.length).toBeLessThanOrEqual(maxNumSeqs);
    for (const { sequence: s, finishReason } of outputs) if (finishReason !== null) tracked.find((entry) => entry.sequence === s)!.ends++;
    if (++steps > 200_000) throw new Error("no end in sight");
  }

  for (const { sequence: s, prompt, ends, aborted } of tracked) {
    expect(ends).toBe(1);
    const tokens = generated(s);
    expect(tokens).toEqual(expectedTokens(prompt, BigInt(seed), tokens.length, VOCAB));
    if (!aborted) {
      const { maxTokens } = s.sampling;
      const full = tokens.length === maxTokens || s.numTokens === contextLength;
      expect(s.finishReason === "stop" ? s.endsWith(tokens.at(-1)!) : full).toBe(true);
      expect(tokens.slice(0, -1).some((token) => s.endsWith(token))).toBe(false);
    }
  }
  seen.dead += bench.dead;
  expect(bench.backend.poolStats()).toMatchObject({ held: 0, openSeqs: 0, total: pages });
  seen.preemptions += bench.scheduler.preemptions;
  seen.evictions += bench.backend.poolStats().evictions;
  seen.hits += tracked.filter((entry) => entry.sequence.numCached > 0).length;
  seen.aborts += tracked.filter((entry) => entry.aborted).length;
});

test("the traces above preempted, evicted, hit the cache, cancelled, planned ahead, and computed rows for nobody", () => {
  for (const [what, count] of Object.entries(seen)) expect([what, count > 50]).toEqual([what, true]);
});
