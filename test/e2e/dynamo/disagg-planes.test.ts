/** Disaggregation with several prefill workers, and over etcd and NATS instead of files, TCP and ZMQ. */
import { expect, test } from "bun:test";
import { EtcdServer, hasEtcd } from "../../support/etcd-server.ts";
import { hasNats, NatsServer } from "../../support/nats-server.ts";
import { eventually } from "../../support/launch.ts";
import { computed, exact, nothingStaged, pair, prompt } from "./disagg-support.ts";
import { LIMIT_MS } from "./support.ts";

const TEST_MS = 3 * LIMIT_MS;

test("a KV-routed prompt goes to the prefill worker that holds its prefix, and only the rest is computed", async () => {
  await using p = await pair();
  const second = await p.d.worker(["--disaggregation-mode", "prefill"], { env: { POD_IP: "127.0.0.1" } });
  const prefills = [p.prefill, second];
  const sum = async () => (await Promise.all(prefills.map(computed))).reduce((a, b) => a + b, 0);
  const prompts = Array.from({ length: 4 }, (_, n) => prompt(160, 200 + n));
  for (const tokens of prompts) expect((await p.d.ask("completions", tokens, { max_tokens: 2, ...exact })).status).toBe(200);
  // Until the router has heard of all pages: a repetition that was computed anew says that it has not.
  await eventually(async () => {
    const before = await sum();
    for (const tokens of prompts) await p.d.ask("completions", tokens, { max_tokens: 2, ...exact });
    return (await sum()) - before <= 4 * 16;
  }, "repetitions find their prefix", LIMIT_MS);
  for (const worker of prefills) await nothingStaged(worker);
}, TEST_MS);

test.skipIf(!hasEtcd || !hasNats)("over etcd and NATS the answers are the same, and KV is transferred", async () => {
  await using etcd = await EtcdServer.start();
  await using nats = await NatsServer.start();
  const all = { DYN_DISCOVERY_BACKEND: "etcd", ETCD_ENDPOINTS: etcd.url, DYN_REQUEST_PLANE: "nats", DYN_EVENT_PLANE: "nats", NATS_SERVER: nats.url };
  await using files = await pair();
  await using p = await pair({ extra: { all } });
  for (const length of [1, 16, 33, 200]) {
    const before = await computed(p.decode);
    const answer = await p.d.ask("completions", prompt(length, 210), { max_tokens: 8, ...exact });
    expect([length, answer.text, answer.usage!.prompt_tokens_details.cached_tokens, (await computed(p.decode)) - before]).toEqual([
      length, (await files.d.ask("completions", prompt(length, 210), { max_tokens: 8, ...exact })).text, length - 1, 1,
    ]);
  }
  await nothingStaged(p.prefill);
}, TEST_MS);
