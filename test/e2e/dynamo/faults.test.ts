/** Processes that die or stall. Serving resumes without a manual step; docs/faults.md has the bounds. */
import { afterEach, describe, expect, test } from "bun:test";
import { eventually, Launched, program, required } from "../../support/launch.ts";
import { readFileSync } from "node:fs";
import { streamOn } from "./streams.ts";
import { Deployment, LIMIT_MS, NAME } from "./support.ts";

const TEST_MS = 4 * LIMIT_MS;
const exact = { ignore_eos: true };

let d: Deployment;
afterEach(() => d?.[Symbol.asyncDispose](), TEST_MS);

const answers = async (deployment: Deployment) => (await deployment.ask("completions", "1, 2, 3,", { max_tokens: 4, ...exact })).status === 200;

describe("death", () => {
  test("kill -9 of the only worker: errors that say so, then the model is gone, then a new worker serves", async () => {
    d = await Deployment.start("round-robin");
    const first = await d.worker();
    await first.kill();
    const down = await d.ask("completions", "a", { max_tokens: 1 });
    expect(down.status).toBeOneOf([404, 500, 503]);
    await eventually(() => !d.records("v1/instances").some((key) => key.includes(first.instance)), "the record expires", LIMIT_MS);
    await eventually(async () => (await d.ask("completions", "a", { max_tokens: 1 })).status === 404, "the frontend forgets the model", LIMIT_MS);
    const second = await d.worker();
    expect(second.instance).not.toBe(first.instance);
    expect(await answers(d)).toBe(true);
  }, TEST_MS);

  test("kill -9 of the frontend in the middle of streams: pages come back, and the next frontend serves", async () => {
    d = await Deployment.start("kv");
    const worker = await d.worker();
    const cancelled = (await worker.metric("dynamo_component_cancellation_total"))!;
    const streams = await Promise.all(["The sea", "A river", "The hill"].map((prompt) => d.request("completions", prompt, { max_tokens: 4000, stream: true, ...exact })));
    await eventually(async () => (await worker.metric("layerscale_requests_running")) === streams.length, "all run", LIMIT_MS);
    d.frontend.signal("SIGKILL");
    await d.frontend.exit();
    await Promise.all(streams.map((response) => response.text().catch(() => {})));
    await worker.idle();
    expect(await worker.metric("dynamo_component_cancellation_total")).toBe(cancelled + streams.length);
    await using next = await Deployment.start("kv", [], d.kv);
    await next.served();
    expect(worker.process.running).toBe(true);
    expect((await fetch(`${worker.system}/health`)).status).toBe(200);
  }, TEST_MS);
});

test("a stall longer than the lifetime of records: after SIGCONT the worker is back by itself, with the stream it had", async () => {
  d = await Deployment.start("kv");
  const worker = await d.worker();
  const whole = await d.ask("completions", "Once upon a time", { max_tokens: 200, ...exact });
  const { rest } = await streamOn(d, "Once upon a time", 200);
  worker.process.signal("SIGSTOP");
  await eventually(() => !d.records("v1/instances").some((key) => key.includes(worker.instance)), "the record of the stalled worker expires", LIMIT_MS);
  await eventually(async () => (await d.ask("completions", "a", { max_tokens: 1 })).status !== 200, "the frontend does not route to it", LIMIT_MS);
  worker.process.signal("SIGCONT");
  await d.served();
  expect(d.records("v1/instances").some((key) => key.includes(worker.instance))).toBe(true);
  expect(await rest()).toMatchObject({ error: null, finish: "length", text: whole.text, usage: { completion_tokens: 200 } });
  await worker.idle();
  expect(await answers(d)).toBe(true);
}, TEST_MS);

describe("as process 1 of a container", () => {
  const root = process.getuid?.() === 0;
  const contained = () =>
    Launched.command(["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", ...program(), "dynamo", "--model", required("LAYERSCALE_TEST_GGUF"), "--served-model-name", NAME, "--max-total-tokens", "4096"], {
      env: { ...d.environment(), LAYERSCALE_LICENSE_KEY: required("LAYERSCALE_LICENSE_KEY"), DYN_SYSTEM_PORT: "0", DYN_SYSTEM_HOST: "127.0.0.1", DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS: "600" },
    });
  /** The child of unshare: process 1 in its own namespace. */
  const inner = (process_: Launched) => eventually(() => Number(readFileSync(`/proc/${process_.pid}/task/${process_.pid}/children`, "utf8").trim().split(" ")[0]), "the child of unshare", LIMIT_MS);

  test.skipIf(!root)("SIGTERM while it loads and twice when it is ready: exit 0, nothing left in discovery", async () => {
    d = await Deployment.start("round-robin");
    for (const [message, signals] of [["worker starts", 1], ["worker ready", 2]] as const) {
      await using contained_ = contained();
      await contained_.log(message, LIMIT_MS);
      const pid = await inner(contained_);
      for (let i = 0; i < signals; i++) {
        process.kill(pid, "SIGTERM");
        // The second one ends the grace time of ten minutes.
        if (i === 0 && signals > 1) await contained_.log("worker left discovery", LIMIT_MS);
      }
      expect(await contained_.exit(LIMIT_MS)).toBe(0);
      for (const bucket of ["v1/instances", "v1/mdc"]) expect(d.records(bucket)).toEqual([]);
    }
  }, TEST_MS);
});
