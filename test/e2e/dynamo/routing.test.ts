/** KV-aware routing: requests go where their prompt is, nobody acts on what a dead worker held, and the events tell the whole tree. */
import { afterEach, expect, test } from "bun:test";
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { escapeFileName } from "../../../src/dynamo/discovery/escape.ts";
import { parseJson, stringifyJson } from "../../../src/dynamo/protocol/bigint-json.ts";
import { eventually, required } from "../../support/launch.ts";
import { PlaneCall } from "../../unit/dynamo/plane-client.ts";
import { type Answer, Deployment, LIMIT_MS, type Worker } from "./support.ts";

const TEST_MS = 5 * LIMIT_MS;
const PAGE = 16;

let d: Deployment;
afterEach(() => d?.[Symbol.asyncDispose](), TEST_MS);

const words = (seed: number, count: number) => Array.from({ length: count }, (_, i) => 1000 + ((seed * 7919 + i * 131) % 20_000));
/** `groups` prefixes of 3 pages, each continued by `each` endings of 2. */
const prompts = (groups: number, each: number, seed: number): number[][] =>
  Array.from({ length: groups * each }, (_, i) => [...words(seed + Math.floor(i / each), 3 * PAGE), ...words(seed + 1000 + i, 2 * PAGE)]);

interface Routed extends Answer {
  /** Of the worker; rounded to a double, as JSON.parse does. */
  worker: number;
  /** Share of the prompt that the router thinks the worker holds. */
  expected: number;
  cached: number;
}
async function ask(prompt: number[]): Promise<Routed> {
  const answer = await d.ask("completions", prompt, { max_tokens: 2, ignore_eos: true, nvext: { extra_fields: ["worker_id", "timing"] } });
  if (answer.status !== 200) throw new Error(`status ${answer.status}: ${String(answer.error)}`);
  return { ...answer, worker: answer.nvext.worker_id.decode_worker_id, expected: answer.nvext.timing?.kv_hit_rate ?? 0, cached: answer.usage!.prompt_tokens_details.cached_tokens };
}
const rounded = (worker: Worker) => Number(BigInt(`0x${worker.instance}`));

test("30 prompts with shared prefixes: repeats land on the worker that holds them; after a restart nobody acts on old knowledge", async () => {
  d = await Deployment.start("kv", ["--migration-limit", "1"]);
  const workers = [await d.worker(), await d.worker()];
  const all = prompts(6, 5, 1);
  const home: number[] = [];
  // Four at a time, so that the router has a reason to use both.
  for (let at = 0; at < all.length; at += 4) for (const { worker } of await Promise.all(all.slice(at, at + 4).map(ask))) home.push(worker);
  expect(new Set(home)).toEqual(new Set(workers.map(rounded)));
  // What finished last has reached the router.
  await eventually(async () => (await ask(all.at(-1)!)).expected > 0.7, "the router knows the last prompt", LIMIT_MS);

  let repeats = 0;
  let right = 0;
  let cachedRight = 0;
  for (let round = 0; round < 2; round++)
    for (const [i, prompt] of all.entries()) {
      const answer = await ask(prompt);
      repeats++;
      if (answer.worker !== home[i]) continue;
      right++;
      // All but the last prompt token's page; cached_tokens says so.
      if (answer.cached === 4 * PAGE || answer.cached === 5 * PAGE - 1) cachedRight++;
    }
  expect([right / repeats >= 0.95, cachedRight]).toEqual([true, right]);

  const [gone, stays] = workers as [Worker, Worker];
  await gone.kill();
  await eventually(() => !d.records("v1/instances").some((key) => key.includes(gone.instance)), "the dead worker's record expires", LIMIT_MS);
  const fresh = await d.worker();
  const lost = all.filter((_, i) => home[i] === rounded(gone));
  for (const prompt of lost) {
    const answer = await ask(prompt);
    expect([rounded(stays), rounded(fresh)]).toContain(answer.worker);
    // The router's expectation is no more than the worker really had (it cannot know of the last page, which is always computed).
    expect(Math.floor(answer.expected * 5) * PAGE).toBeLessThanOrEqual(answer.cached + PAGE);
  }
  // The very first of them cannot be anywhere but where a shared prefix was used before.
  expect(lost.length).toBeGreaterThan(0);
}, TEST_MS);

/** A record's value. */
function record(bucket: string, part: string): any {
  const key = d.records(bucket).find((candidate) => candidate.includes(part));
  if (key === undefined) throw new Error(`no record with ${part} in ${bucket}`);
  return parseJson(readFileSync(join(d.kv, bucket, escapeFileName(key)), "utf8"));
}

test("the event log, replayed into Dynamo's own tree, is what the router believes, what the worker dumps and what it holds", async () => {
  d = await Deployment.start("kv");
  // 40 pages: prompts are evicted again and again.
  const worker = await d.worker(["--max-total-tokens", String(40 * PAGE)]);
  const source = record("v1/event_sources", "kv-events");
  const channel = record("v1/event_channels", "kv-events");
  const child = Bun.spawn([required("LAYERSCALE_TEST_PYTHON"), join(import.meta.dir, "event_tree.py"), channel.transport.config.endpoint], { stdin: "pipe", stdout: "pipe", stderr: "inherit" });
  try {
    const lines = child.stdout.pipeThrough(new TextDecoderStream()).getReader();
    let read = "";
    const line = async (): Promise<Record<string, any>> => {
      for (;;) {
        const end = read.indexOf("\n");
        if (end >= 0) {
          const found = read.slice(0, end);
          read = read.slice(end + 1);
          return parseJson(found) as Record<string, any>;
        }
        const { done, value } = await lines.read();
        if (done) throw new Error("event_tree.py ended");
        read += value;
      }
    };
    const replay = async (question: unknown) => {
      child.stdin.write(`${stringifyJson(question)}\n`);
      await child.stdin.flush();
      return line();
    };
    const dump = async () => {
      const query = { worker_id: source.metadata.worker.worker_id, dp_rank: 0, start_event_id: null, end_event_id: null, supports_tree_dump_failed: true, kind: "recovery" };
      const call = await (await PlaneCall.send(source.metadata.recovery_target.transport.tcp, query)).done();
      return (call.items[0] as any).TreeDump as { events: unknown[]; last_event_id: number };
    };
    expect(await line()).toEqual({ connected: true });

    const all = prompts(4, 4, 50);
    let checked = 0;
    for (let n = 0; n < 40; n++) {
      const prompt = all[(n * 7) % all.length]!;
      await worker.idle();
      const { events, last_event_id: last } = await dump();
      const [live, copy] = [await replay({ after: last, prompts: all }), await replay({ dump: events, prompts: all })];
      expect(live).toEqual({ last, blocks: copy.blocks, tree: copy.tree });
      // Only a router that has seen the same events can expect the same; its subscription runs beside ours.
      const believed = live.blocks[all.indexOf(prompt)] as number;
      const answer = await ask(prompt);
      expect(answer.cached).toBeGreaterThanOrEqual(Math.min(believed, 4) * PAGE);
      expect(answer.cached).toBeLessThan((believed + 1) * PAGE);
      if (Math.round(answer.expected * 5) === believed) checked++;
    }
    expect(await worker.metric("layerscale_evictions_total")).toBeGreaterThan(20);
    // Of 40, a few may have been asked before the router had the last events.
    expect(checked).toBeGreaterThanOrEqual(38);
  } finally {
    child.kill();
    await child.exited;
  }
}, TEST_MS);
