import { afterAll, beforeAll, expect, test } from "bun:test";
import { existsSync, readdirSync, readFileSync, renameSync, statSync } from "node:fs";
import { join } from "node:path";
import { Deployment, LIMIT_MS, NAME } from "../dynamo/support.ts";
import { eventually, launch } from "../../support/launch.ts";
import { errorLines, Hub, SMOL, TINY } from "./support.ts";

let hub: Hub;
beforeAll(async () => {
  hub = await Hub.start();
});
afterAll(() => hub[Symbol.asyncDispose]());

test.each([["paths", { DYN_SELF_HOST_METADATA: "0" }], ["addresses", {}]])("the card names %s, with which the frontend serves a model of the hub without asking it", async (kind, env) => {
  await using deployment = await Deployment.start("round-robin", [], undefined, { frontend: { HF_ENDPOINT: hub.server.url, HF_HUB_OFFLINE: "0" } });
  await deployment.worker([], { model: TINY, env: { ...hub.env, ...env }, served: false });
  hub.server.asked.length = 0;
  await deployment.served();
  const answer = await fetch(`${deployment.url}/v1/completions`, {
    method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify({ model: NAME, prompt: "hello", max_tokens: 4 }),
  });
  expect([answer.status, Object.keys((await answer.json()) as object)]).toEqual([200, expect.arrayContaining(["choices"])]);
  expect(hub.server.asked).toEqual([]);
  const folder = join(deployment.kv, "v1/mdc");
  const record = JSON.parse(readFileSync(join(folder, readdirSync(folder).find((name) => !name.startsWith("."))!), "utf8")) as { card_json: Record<string, any> };
  const { source_path, tokenizer } = record.card_json;
  expect(source_path).toBe(TINY);
  const path = tokenizer.hf_tokenizer_json.path as string;
  if (kind === "paths") expect(path).toBe(join(hub.cache, "models--acme--tiny/snapshots", hub.server.repos.get(TINY)!.commit, "tokenizer.json"));
  else expect(path).toMatch(/^http:\/\/127\.0\.0\.1:\d+\/v1\/metadata\/.*\/tokenizer\.json$/);
}, LIMIT_MS);

test("a frontend that cannot reach the worker's files takes them from its own cache of the repo", async () => {
  await using workers = await Deployment.start("round-robin");
  await workers.worker([], { model: TINY, env: { ...hub.env, DYN_SELF_HOST_METADATA: "0" } });
  // The worker has what it needs in memory and in mapped files.
  renameSync(join(hub.home, "hf"), join(hub.home, "elsewhere"));
  hub.server.asked.length = 0;
  await using other = await Deployment.start("round-robin", [], workers.kv, { frontend: { HF_HOME: join(hub.home, "elsewhere"), HF_ENDPOINT: hub.server.url } });
  await other.served();
  const answer = await fetch(`${other.url}/v1/completions`, { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify({ model: NAME, prompt: "hello", max_tokens: 4 }) });
  expect(answer.status).toBe(200);
  expect(hub.server.asked).toEqual([]);
}, LIMIT_MS);

test("SIGTERM while the model is on its way: health says 503 until then, exit code 0, and nothing is registered", async () => {
  hub.server.pace = { bytes: 1 << 18, ms: 20 };
  const kv = join(hub.home, "kv");
  const { etag } = hub.server.repos.get(SMOL)!.files.get("smol.Q4_1.gguf")!;
  const partial = join(hub.cache, "models--acme--smol-gguf/blobs", `${etag}.incomplete`);
  await using worker = launch(["dynamo", "--model", SMOL], { env: { ...hub.env, DYN_DISCOVERY_BACKEND: "file", DYN_FILE_KV: kv, DYN_TCP_RPC_HOST: "127.0.0.1", DYN_SYSTEM_PORT: "0", DYN_SYSTEM_HOST: "127.0.0.1" } });
  const { port } = await worker.log("system server listens", LIMIT_MS);
  await eventually(() => existsSync(partial) && statSync(partial).size > 1 << 20, "some bytes");
  expect((await fetch(`http://127.0.0.1:${String(port)}/health`)).status).toBe(503);
  worker.signal("SIGTERM");
  expect(await worker.exit()).toBe(0);
  expect(errorLines(worker)).toEqual([]);
  expect(existsSync(partial)).toBe(true);
  expect(readdirSync(kv, { recursive: true, withFileTypes: true }).filter((entry) => entry.isFile())).toEqual([]);
}, LIMIT_MS);
