import { expect, test } from "bun:test";
import { Histogram, Registry } from "prom-client";
import { HotHistogram } from "../../../src/telemetry/hot-histogram.ts";
import { Random } from "../../support/random.ts";

test("says the same as the library's histogram, value for value, also on bounds and after a reset", async () => {
  const [ours, theirs] = [new Registry(), new Registry()];
  const options = { name: "gap_seconds", help: "Between two tokens.", buckets: [0.005, 0.01, 0.1, 1] };
  const hot = new HotHistogram({ ...options, registers: [ours] });
  const plain = new Histogram({ ...options, registers: [theirs] });
  expect(await ours.metrics()).toContain('gap_seconds_bucket{le="+Inf"} 0');
  const random = new Random(5);
  const values = [0, 0.005, 0.0051, 1, 1.5, 1e9, ...Array.from({ length: 500 }, () => random.below(2000) / 1000)];
  for (const value of values) {
    hot.observe(value);
    plain.observe(value);
  }
  expect(await ours.metrics()).toBe(await theirs.metrics());
  hot.reset();
  expect(await ours.metrics()).toContain("gap_seconds_count 0");
});
