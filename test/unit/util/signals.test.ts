import { describe, expect, test } from "bun:test";
import { join } from "node:path";
import { Launched } from "../../support/launch.ts";

const signals = JSON.stringify(join(import.meta.dir, "../../../src/util/signals.ts"));

/** A program of its own, since signals are the process's. `after` does something once these signals have come; the program says when it is ready for them. */
const run = (body: string) =>
  Launched.command([
    process.execPath, "-e",
    `import { keepStopSignals, onStopSignal, releaseStopSignals } from ${signals};
    const after = (names, then) => { let left = names.length; for (const name of names) process.once(name, () => --left === 0 && setImmediate(then)); };
    setInterval(() => {}, 1000);
    ${body}
    console.error('{"message":"ready"}');`,
  ]);

describe("stop signals", () => {
  test("one that comes before anybody waits is kept, and ends the wait at once", async () => {
    await using early = run(`keepStopSignals(); after(["SIGTERM"], async () => { const stop = onStopSignal(); console.log(stop.received, await stop.requested, stop.hurry.aborted); process.exit(7); });`);
    await early.log("ready");
    early.signal("SIGTERM");
    expect(await early.exit()).toBe(7);
    expect(early.stdout).toBe("true SIGTERM false\n");
  });
  test("two of them hurry", async () => {
    await using early = run(`keepStopSignals(); after(["SIGTERM", "SIGINT"], () => { const stop = onStopSignal(); console.log(stop.received, stop.hurry.aborted); process.exit(0); });`);
    await early.log("ready");
    early.signal("SIGTERM");
    early.signal("SIGINT");
    expect(await early.exit()).toBe(0);
    expect(early.stdout).toBe("true true\n");
  });
  test("a command that waits for none has the default action again, for what came before too", async () => {
    await using early = run(`keepStopSignals(); after(["SIGTERM"], releaseStopSignals);`);
    await early.log("ready");
    early.signal("SIGTERM");
    expect(await early.exit()).toBe(143);
    await using later = run(`keepStopSignals(); releaseStopSignals();`);
    await later.log("ready");
    later.signal("SIGINT");
    expect(await later.exit()).toBe(130);
  });
});
