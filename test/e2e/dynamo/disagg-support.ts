import { connect, createServer, type Server, type Socket } from "node:net";
import { eventually } from "../../support/launch.ts";
import { PlaneCall, requestBody, until } from "../../unit/dynamo/plane-client.ts";
import { Deployment, LIMIT_MS, type Worker } from "./support.ts";

/** Every request of these tests runs to its end of tokens, so that texts can be compared. */
export const exact = { ignore_eos: true };
/** A prompt of any length that shares no page with another number's. Ids of the default model's vocabulary. */
export const prompt = (length: number, n = 0): number[] => Array.from({ length }, (_, i) => 1000 + ((i * 37 + n * 911 + length * 13) % 20_000));

export interface Pair {
  d: Deployment;
  prefill: Worker;
  decode: Worker;
}
interface PairOptions {
  prefill?: { args?: string[]; env?: Record<string, string> };
  decode?: { args?: string[]; env?: Record<string, string> };
  frontend?: readonly string[];
  served?: boolean;
  /** Of both workers; default: the default model. */
  model?: string;
  extra?: Parameters<typeof Deployment.start>[3];
}

/** A frontend, a prefill worker and a decode worker that is served. */
export async function pair({ prefill = {}, decode = {}, frontend = [], served = true, model, extra }: PairOptions = {}): Promise<Pair & AsyncDisposable> {
  const d = await Deployment.start("kv", frontend, undefined, extra);
  try {
    const start = (mode: string, { args = [], env = {} }: { args?: string[]; env?: Record<string, string> }) =>
      d.worker(["--disaggregation-mode", mode, ...args], { served: false, ...(model !== undefined && { model }), env: { POD_IP: "127.0.0.1", ...env } });
    const workers = { prefill: await start("prefill", prefill), decode: await start("decode", decode) };
    if (served) await d.served();
    return { d, ...workers, [Symbol.asyncDispose]: () => d[Symbol.asyncDispose]() };
  } catch (error) {
    await d[Symbol.asyncDispose]();
    throw error;
  }
}

/** "ip:port/path" of a worker's request plane. */
export const address = (worker: Worker): string => (worker.process.logs.find((line) => line.message === "worker ready")!.transport as { tcp: string }).tcp;

/** A sample of a labelled family; 0 when there is none. */
export async function sample(worker: Worker, series: string): Promise<number> {
  const text = await (await fetch(`${worker.system}/metrics`)).text();
  const line = text.split("\n").find((candidate) => candidate.startsWith(`${series} `));
  return line === undefined ? 0 : Number(line.slice(line.lastIndexOf(" ") + 1));
}
export const fallbacks = (worker: Worker, reason: string) => sample(worker, `layerscale_kv_transfer_fallbacks_total{reason="${reason}"}`);
export const computed = async (worker: Worker) => (await worker.metric("layerscale_prompt_tokens_computed_total"))!;
export const staged = async (worker: Worker) => (await worker.metric("layerscale_kv_transfers_staged"))!;
export const nothingStaged = (worker: Worker) => eventually(async () => (await staged(worker)) === 0, "no copy is staged", LIMIT_MS);

export type Params = Record<string, unknown> & { host: string; port: number; transfer_id: string; layout: string };

/** The prefill leg, as the frontend sends it. */
export async function prefillCall(worker: Worker, tokens: number[], more: Record<string, unknown> = {}): Promise<PlaneCall> {
  const call = await PlaneCall.send(address(worker), requestBody({ token_ids: tokens, stop: { max_tokens: 1, ignore_eos: true }, ...more }));
  await until("the prefill leg ends", () => call.ended || call.ack !== "", LIMIT_MS);
  call.close();
  return call;
}
export async function prefillLeg(worker: Worker, tokens: number[]): Promise<Params> {
  const call = await prefillCall(worker, tokens);
  const data = call.items[0]?.data as Record<string, unknown> | undefined;
  if (data?.disaggregated_params === undefined) throw new Error(`no hand-off: ${JSON.stringify([call.ack, call.items])}`);
  return data.disaggregated_params as Params;
}

/** The decode leg under way. */
export const decodeCall = (worker: Worker, tokens: number[], params: unknown, count = 8): Promise<PlaneCall> =>
  PlaneCall.send(address(worker), requestBody({ token_ids: tokens, stop: { max_tokens: count, ignore_eos: true }, prefill_result: { disaggregated_params: params, prompt_tokens_details: null } }));
export async function decodeLeg(worker: Worker, tokens: number[], params: unknown, count = 8): Promise<PlaneCall> {
  const call = await decodeCall(worker, tokens, params, count);
  await until("the decode leg ends", () => call.ended, LIMIT_MS);
  call.close();
  return call;
}
export const cachedOf = (call: PlaneCall): number => (call.items.at(-1)!.data!.completion_usage as any).prompt_tokens_details.cached_tokens;

/** A TCP proxy before a transfer port. It counts what the prefill worker sends and may change, hold or swallow it. */
export class Proxy implements AsyncDisposable {
  /** From the prefill worker. */
  received = 0;
  port = 0;
  readonly #server: Server;
  readonly #sockets = new Set<Socket>();

  private constructor(target: number, onBytes: (chunk: Buffer, before: number, proxy: Proxy) => Buffer | null) {
    this.#server = createServer((client) => {
      const upstream = connect(target, "127.0.0.1");
      for (const [a, b] of [[client, upstream], [upstream, client]] as const) {
        this.#sockets.add(a);
        a.on("error", () => b.destroy());
        a.on("close", () => b.destroy());
      }
      client.on("data", (chunk) => upstream.write(chunk));
      upstream.on("data", (chunk: Buffer) => {
        const before = this.received;
        this.received += chunk.length;
        const passed = onBytes(chunk, before, this);
        if (passed !== null) client.write(passed);
      });
    });
  }

  static async start(target: number, onBytes: (chunk: Buffer, before: number, proxy: Proxy) => Buffer | null = (chunk) => chunk): Promise<Proxy> {
    const proxy = new Proxy(target, onBytes);
    await new Promise<void>((resolve) => proxy.#server.listen(0, "127.0.0.1", resolve));
    proxy.port = (proxy.#server.address() as { port: number }).port;
    return proxy;
  }

  async [Symbol.asyncDispose](): Promise<void> {
    for (const socket of this.#sockets) socket.destroy();
    await new Promise<void>((resolve) => this.#server.close(() => resolve()));
  }
}
