import { existsSync, mkdtempSync, readdirSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import type { DynamoConfig } from "../../../src/config/engine-config.ts";
import { readDynamoEnvironment } from "../../../src/config/env.ts";
import { parseJson } from "../../../src/dynamo/protocol/bigint-json.ts";
import type { LoadedWorker } from "../../../src/dynamo/worker-engine.ts";
import { runWorker } from "../../../src/dynamo/worker.ts";
import { Tokenizer } from "../../../src/tokenizer/tokenizer.ts";
import { tinyTokenizerConfig, tinyTokenizerJson } from "../../support/tiny-tokenizer.ts";
import { FakeEngine, type FakeOptions } from "./fake-engine.ts";
import { until } from "./plane-client.ts";

export const tokenizer = Tokenizer.create(tinyTokenizerJson(), tinyTokenizerConfig());

/** A stop signal that tests raise. */
export class Stop {
  readonly #requested = Promise.withResolvers<NodeJS.Signals>();
  readonly #hurry = new AbortController();
  readonly #asked = new AbortController();
  received = false;
  readonly asked = this.#asked.signal;
  readonly requested = this.#requested.promise;
  readonly hurry = this.#hurry.signal;
  raise(): void {
    if (this.received) this.#hurry.abort();
    this.received = true;
    this.#requested.resolve("SIGTERM");
    this.#asked.abort();
  }
  dispose(): void {}
}

export interface Running<E = FakeEngine> {
  engine: E;
  stop: Stop;
  kv: string;
  exit: Promise<number>;
  address: string;
  system: string;
}
const running: Running<unknown>[] = [];

export function config(kv: string, patch: Record<string, string> = {}): DynamoConfig {
  const environment = readDynamoEnvironment({ DYN_DISCOVERY_BACKEND: "file", DYN_FILE_KV: kv, DYN_TCP_RPC_HOST: "127.0.0.1", DYN_SYSTEM_PORT: "0", DYN_SYSTEM_HOST: "127.0.0.1", DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS: "0", ...patch });
  return {
    engine: {} as DynamoConfig["engine"],
    environment,
    worker: {
      disaggregationMode: "agg", namespace: "dynamo", component: "backend", endpoint: "generate", endpointTypes: ["chat", "completions"], customJinjaTemplate: null,
      toolCallParser: null, reasoningParser: null, excludeToolsWhenToolChoiceNone: true, enableRl: false,
    },
  };
}
export const records = (kv: string, bucket: string) => (existsSync(join(kv, bucket)) ? readdirSync(join(kv, bucket)).filter((name) => !name.startsWith(".tmp_")) : []);
export const record = (kv: string, bucket: string, match = "generate") => {
  const name = records(kv, bucket).find((item) => item.includes(match));
  return name === undefined ? null : (parseJson(readFileSync(join(kv, bucket, name), "utf8")) as Record<string, any>);
};

/** Options of the worker that its command line would set. */
export interface StartOptions {
  environment?: Record<string, string>;
  worker?: Partial<DynamoConfig["worker"]>;
  weights?: LoadedWorker["weights"];
}

/** A worker on a discovery directory of its own, over any engine, when its instance record is there. */
export async function startWith<E extends LoadedWorker["engine"]>(engine: E, options: StartOptions = {}): Promise<Running<E>> {
  const kv = mkdtempSync(join(tmpdir(), "ls-worker-"));
  const files = { config: join(kv, "config.json"), tokenizer: join(kv, "tokenizer.json"), tokenizerConfig: join(kv, "tokenizer_config.json"), chatTemplate: null, generationConfig: null };
  writeFileSync(files.config, "{}");
  writeFileSync(files.tokenizer, JSON.stringify(tinyTokenizerJson()));
  writeFileSync(files.tokenizerConfig, JSON.stringify(tinyTokenizerConfig()));
  const stop = new Stop();
  const model = { name: "tiny", path: "/models/tiny", format: "hf", spec: { maxContext: 4096 }, assets: { materialize: () => files }, generation: { temperature: 0.5, topP: 0.25, eosTokenIds: [2] } };
  const base = config(kv, options.environment);
  const loaded: LoadedWorker = { engine, tokenizer, servedName: "acme/Tiny", model: model as never, ...(options.weights && { weights: options.weights }) };
  const exit = runWorker({ ...base, worker: { ...base.worker, ...options.worker } }, stop, async () => loaded);
  const instance = (await until("instance record", () => record(kv, "v1/instances", "generate"))) as Record<string, any>;
  const card = record(kv, "v1/mdc") as Record<string, any>;
  const system = new URL(card.card_json.model_info.hf_config_json.path).origin;
  const self = { engine, stop, kv, exit, address: instance.transport.tcp as string, system };
  running.push(self);
  return self;
}

export const start = (options: Partial<FakeOptions> = {}, environment: Record<string, string> = {}, more: StartOptions = {}): Promise<Running> =>
  startWith(new FakeEngine({ vocab: 384, ...options }), { environment, ...more });

/** For afterEach: ends every worker that a test left running. */
export async function stopAll(): Promise<void> {
  for (const { stop, exit, kv } of running.splice(0)) {
    stop.raise();
    stop.raise();
    await exit.catch(() => {});
    rmSync(kv, { recursive: true, force: true });
  }
}
export const family = async (worker: { system: string }, name: string) => {
  const text = await (await fetch(`${worker.system}/metrics`)).text();
  const line = text.split("\n").find((item) => item.startsWith(`${name}{`) || item.startsWith(`${name} `));
  return line === undefined ? null : Number(line.slice(line.lastIndexOf(" ") + 1));
};
