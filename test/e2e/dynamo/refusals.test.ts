/** Refusals of streamed requests, and what a bad request costs its neighbours: nothing. Frontends that come and go. */
import { describe, expect, test } from "bun:test";
import { readdirSync } from "node:fs";
import { eventually } from "../../support/launch.ts";
import { Deployment, LIMIT_MS } from "./support.ts";

const TEST_MS = 3 * LIMIT_MS;

describe("a refused request that is streamed", () => {
  test.each([
    ["by default", {}, { chat: 200, completions: 200 }],
    ["with DYN_HTTP_PRE_COMMIT_ERROR_PEEK_MS on the frontend", { DYN_HTTP_PRE_COMMIT_ERROR_PEEK_MS: "500" }, { chat: 400, completions: 200 }],
  ] as const)("%s: 400 where the frontend allows it, else an error frame; the option is named; good requests beside it never fail", async (_name, frontend, statuses) => {
    await using d = await Deployment.start("round-robin", ["--migration-limit", "1"], undefined, { frontend });
    const worker = await d.worker();
    for (let round = 0; round < 3; round++)
      for (const route of ["chat", "completions"] as const) {
        const [bad, good] = await Promise.all([d.request(route, "a", { stream: true, top_k: 5, max_tokens: 2 }), d.ask(route, "a", { max_tokens: 4, ignore_eos: true })]);
        const text = await bad.text();
        expect([route, bad.status, good.status, good.usage?.completion_tokens]).toEqual([route, statuses[route], 200, 4]);
        if (bad.status === 400) expect(text).toContain("top_k = 5");
        else expect(text).toContain('"error"');
      }
    await worker.idle();
    expect(await worker.metric("layerscale_requests_total")).toBeGreaterThanOrEqual(12);
  }, TEST_MS);
});

describe("frontends that come and go", () => {
  test("each new one serves all workers' model, and the workers' open files do not grow", async () => {
    const rounds = process.env.LAYERSCALE_PROOFS ? 20 : 4;
    await using d = await Deployment.start("round-robin");
    const workers = [await d.worker(), await d.worker(), await d.worker(["--enable-rl"])];
    const open = () => workers.map((worker) => readdirSync(`/proc/${worker.process.pid}/fd`).length);
    const reached = async (on: Deployment) => {
      const before = await Promise.all(workers.map((worker) => worker.metric("dynamo_component_requests_total")));
      await eventually(async () => {
        expect((await on.ask("completions", "a", { max_tokens: 1 })).status).toBe(200);
        const now = await Promise.all(workers.map((worker) => worker.metric("dynamo_component_requests_total")));
        return now.every((count, i) => count! > before[i]!);
      }, "every worker got a request", LIMIT_MS);
    };
    let first: number[] | null = null;
    for (let round = 0; round < rounds; round++) {
      {
        await using next = await Deployment.start("round-robin", [], d.kv);
        await next.served();
        await reached(next);
      }
      first ??= open();
    }
    // A connection of the frontend that just ended may still be closing.
    await eventually(() => open().every((count, i) => count <= first![i]! + 2), "open files are as after the first round", LIMIT_MS);
    // One that leaves routing and comes back, again and again.
    const call = (route: string) => fetch(`${workers[2]!.system}/engine/${route}`, { method: "POST" }).then((response) => response.json() as Promise<{ status: string }>);
    for (let i = 0; i < (process.env.LAYERSCALE_PROOFS ? 100 : 20); i++) {
      expect((await call("pause_generation")).status).toBe("ok");
      expect((await call("resume_generation")).status).toBe("ok");
    }
    await reached(d);
    await eventually(() => open().every((count, i) => count <= first![i]! + 2), "open files have not grown", LIMIT_MS);
  }, TEST_MS);
});
