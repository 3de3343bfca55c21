import { expect, test } from "bun:test";
import { within } from "../../../src/util/within.ts";

const never = new Promise<never>(() => {});

test("done, failed, late and hurried", async () => {
  expect(await within(Promise.resolve(1), 10_000)).toBe(true);
  expect(await within(Promise.reject(new Error("no")), 10_000)).toBe(true);
  expect(await within(never, 1)).toBe(false);
  const hurry = new AbortController();
  const waiting = within(never, 100_000, hurry.signal);
  hurry.abort();
  expect(await waiting).toBe(false);
  expect(await within(Promise.resolve(1), 10_000, hurry.signal)).toBe(false);
});
