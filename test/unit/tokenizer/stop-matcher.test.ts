import { describe, expect, setDefaultTimeout, test } from "bun:test";
import { StopMatcher } from "../../../src/tokenizer/stop-matcher.ts";
import { Random } from "../../support/random.ts";

// Large vocabularies on a machine that others use too.
setDefaultTimeout(60_000);

interface Outcome {
  text: string;
  matched: string | null;
}

/** The first stop string to be complete; of several, the longest. */
function naive(stops: string[], text: string): Outcome {
  for (let end = 1; end <= text.length; end++) {
    const [longest] = stops.filter((stop) => text.slice(0, end).endsWith(stop)).sort((a, b) => b.length - a.length);
    if (longest !== undefined) return { text: text.slice(0, end - longest.length), matched: longest };
  }
  return { text, matched: null };
}

/** Characters at the end that begin some stop string. */
function heldBack(stops: string[], text: string): number {
  for (let n = Math.min(text.length, Math.max(0, ...stops.map((s) => s.length - 1))); n > 0; n--)
    if (stops.some((stop) => stop.length > n && stop.startsWith(text.slice(text.length - n)))) return n;
  return 0;
}

function run(stops: string[], pieces: string[]): Outcome {
  const matcher = new StopMatcher(stops);
  let text = "";
  for (const piece of pieces) {
    const out = matcher.push(piece);
    text += out.text;
    if (out.matched !== null) return { text, matched: out.matched };
  }
  return { text: text + matcher.flush(), matched: null };
}

describe("StopMatcher", () => {
  test("nothing of a stop string leaves before it is complete", () => {
    const matcher = new StopMatcher(["DEFGHIJ"]);
    expect(matcher.push("ABC")).toEqual({ text: "ABC", matched: null });
    expect(matcher.push("D")).toEqual({ text: "", matched: null });
    expect(matcher.push("EF")).toEqual({ text: "", matched: null });
    expect(matcher.push("GH")).toEqual({ text: "", matched: null });
    expect(matcher.push("IJK")).toEqual({ text: "", matched: "DEFGHIJ" });
    expect(matcher.push("more")).toEqual({ text: "", matched: null });
    expect(matcher.flush()).toBe("");
  });

  test("what turns out not to be a stop string leaves as soon as that is known", () => {
    const matcher = new StopMatcher(["aab"]);
    expect(matcher.push("xaa").text).toBe("x");
    expect(matcher.push("a").text).toBe("a");
    expect(matcher.push("c").text).toBe("aac");
    expect(matcher.push("aa").text).toBe("");
    expect(matcher.flush()).toBe("aa");
  });

  test("the stop string that is complete first wins; of two at once the longer", () => {
    expect(run(["abcd", "bc"], ["abcd"])).toEqual({ text: "a", matched: "bc" });
    expect(run(["bc", "abc"], ["xabc"])).toEqual({ text: "x", matched: "abc" });
    expect(run(["b", "a"], ["cab"])).toEqual({ text: "c", matched: "a" });
  });

  test("no stop strings: everything leaves at once", () => {
    const matcher = new StopMatcher([]);
    expect(matcher.push("abc")).toEqual({ text: "abc", matched: null });
    expect(matcher.flush()).toBe("");
  });

  test("an empty stop string is refused", () => {
    expect(() => new StopMatcher(["a", ""])).toThrow(RangeError);
  });

  test("characters outside the basic plane", () => {
    expect(run(["😸"], ["a😹", "b😸c"])).toEqual({ text: "a😹b", matched: "😸" });
  });

  test("like a naive search, for random texts, stop strings and pieces", () => {
    const random = new Random(42);
    let matches = 0;
    for (let round = 0; round < 20_000; round++) {
      const alphabet = random.pick(["ab", "abc", "aé😸"]);
      const letters = [...alphabet];
      const word = (length: number) => Array.from({ length }, () => random.pick(letters)).join("");
      const stops = Array.from({ length: random.below(4) }, () => word(1 + random.below(5)));
      const pieces = Array.from({ length: random.below(8) }, () => word(random.below(5)));
      const expected = naive(stops, pieces.join(""));
      expect(run(stops, pieces)).toEqual(expected);
      if (expected.matched !== null) matches++;
    }
    expect(matches).toBeGreaterThan(3000);
  });

  test("holds back exactly what may still become a stop string", () => {
    const random = new Random(43);
    for (let round = 0; round < 5000; round++) {
      const word = (length: number) => Array.from({ length }, () => random.pick(["a", "b"])).join("");
      const stops = Array.from({ length: 1 + random.below(3) }, () => word(2 + random.below(5)));
      const matcher = new StopMatcher(stops);
      let pushed = "";
      let left = "";
      for (let i = 0; i < 6; i++) {
        const piece = word(random.below(3));
        pushed += piece;
        const out = matcher.push(piece);
        left += out.text;
        if (out.matched !== null) break;
        expect(left).toBe(pushed.slice(0, pushed.length - heldBack(stops, pushed)));
      }
    }
  });

  test("many long stop strings over a long text", () => {
    const stops = Array.from({ length: 64 }, (_, i) => "a".repeat(200) + i);
    const matcher = new StopMatcher(stops);
    let text = "";
    for (let i = 0; i < 2000; i++) text += matcher.push("a".repeat(100)).text;
    expect(text.length).toBe(200_000 - 200);
    expect(matcher.push("7")).toEqual({ text: "", matched: "a".repeat(200) + "7" });
  });
});
