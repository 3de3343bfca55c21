import { mkdtempSync, readdirSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { eventually, launch, Launched, required } from "../../support/launch.ts";
import { freePort } from "../../support/free-port.ts";

export const NAME = "smol";
/** Every step of a deployment has this long: the machine may be busy with other tests. */
export const LIMIT_MS = 120_000;

export interface Answer {
  status: number;
  text: string;
  finish: string | null;
  usage: Record<string, any> | null;
  /** One per SSE event that carried text. */
  pieces: string[];
  logprobs: Record<string, any>[];
  /** Events that carried logprobs. */
  logprobEvents: number;
  error: unknown;
  done: boolean;
  nvext: Record<string, any>;
}

/** One discovery directory, the real frontend, and workers. Everything stays on loopback. */
export class Deployment implements AsyncDisposable {
  readonly workers: Worker[] = [];
  frontend!: Launched;
  url = "";

  private constructor(
    /** Made for this deployment, and removed with it. */
    readonly home: string,
    /** The discovery directory. */
    readonly kv: string,
    /** Variables of frontend and workers beside the usual ones, for instance another discovery backend. */
    readonly extra: Readonly<Record<string, string>> = {},
  ) {}

  /** The frontend is up; workers are started separately. With `kv` it joins another deployment's workers. */
  static async start(routerMode: "round-robin" | "kv", args: readonly string[] = [], kv?: string, extra: { all?: Record<string, string>; frontend?: Record<string, string>; /** Of another environment with Dynamo. */ python?: string } = {}): Promise<Deployment> {
    const made = mkdtempSync(join(tmpdir(), "layerscale-dynamo-"));
    const self = new Deployment(made, kv ?? join(made, "kv"), extra.all);
    const port = await freePort();
    self.url = `http://127.0.0.1:${port}`;
    self.frontend = Launched.command(
      [extra.python ?? required("LAYERSCALE_TEST_PYTHON"), "-m", "dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", String(port), "--router-mode", routerMode, ...args],
      { env: { ...self.environment(), DYN_TCP_RESPONSE_STREAM_HOST: "lo", HOME: self.home, HF_HUB_OFFLINE: "1", PYTHONUNBUFFERED: "1", DYN_SDK_DISABLE_ANSI_LOGGING: "1", ...extra.frontend } },
    );
    await eventually(() => {
      if (!self.frontend.running) throw new Error(`the frontend ended: ${self.frontend.stderr.slice(-2000)}`);
      return fetch(`${self.url}/v1/models`).then((response) => response.ok, () => false);
    }, "the frontend answers", LIMIT_MS);
    return self;
  }

  environment(): Record<string, string> {
    return { DYN_DISCOVERY_BACKEND: "file", DYN_FILE_KV: this.kv, DYN_TCP_RPC_HOST: "127.0.0.1", DYN_REQUEST_PLANE: "tcp", DYN_EVENT_PLANE: "zmq", ...this.extra };
  }

  /** A worker that is ready and, by default, served by the frontend. */
  async worker(args: readonly string[] = [], options: { served?: boolean; env?: Record<string, string>; model?: string } = {}): Promise<Worker> {
    const process = launch(["dynamo", "--model", options.model ?? required("LAYERSCALE_TEST_GGUF"), "--served-model-name", NAME, "--max-total-tokens", "16384", ...args], {
      env: { ...this.environment(), DYN_SYSTEM_PORT: "0", DYN_SYSTEM_HOST: "127.0.0.1", ...options.env },
    });
    const { port } = await process.log("system server listens", LIMIT_MS);
    const { instance } = await process.log("worker starts", LIMIT_MS);
    const worker = new Worker(process, `http://127.0.0.1:${port}`, instance as string);
    this.workers.push(worker);
    await process.log("worker ready", LIMIT_MS);
    if (options.served !== false) await this.served();
    return worker;
  }

  /** A listed model may still be in preparation: one tiny request must pass. */
  async served(): Promise<void> {
    await eventually(async () => (await this.ask("completions", "a", { max_tokens: 1 })).status === 200, "the frontend serves the model", LIMIT_MS);
  }

  records(bucket: string): string[] {
    try {
      return readdirSync(join(this.kv, bucket)).filter((name) => !name.startsWith(".tmp_")).map(decodeURIComponent);
    } catch {
      return [];
    }
  }

  request(route: "chat" | "completions", prompt: unknown, fields: Record<string, unknown>, signal?: AbortSignal): Promise<Response> {
    const body = { model: NAME, temperature: 0, ...(route === "chat" ? { messages: [{ role: "user", content: prompt }] } : { prompt }), ...(fields.stream ? { stream_options: { include_usage: true } } : {}), ...fields };
    return fetch(`${this.url}/v1/${route === "chat" ? "chat/completions" : "completions"}`, {
      method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body), signal: signal ?? AbortSignal.timeout(LIMIT_MS),
    });
  }

  async ask(route: "chat" | "completions", prompt: unknown, fields: Record<string, unknown> = {}): Promise<Answer> {
    const response = await this.request(route, prompt, fields);
    const answer: Answer = { status: response.status, text: "", finish: null, usage: null, pieces: [], logprobs: [], logprobEvents: 0, error: null, done: false, nvext: {} };
    const take = (event: Record<string, any>) => {
      const choice = event.choices?.[0];
      const piece = choice?.delta?.content ?? choice?.message?.content ?? choice?.text ?? "";
      if (piece) answer.pieces.push(piece);
      answer.text += piece;
      answer.finish = choice?.finish_reason ?? answer.finish;
      const entries = choice?.logprobs?.content ?? choice?.logprobs?.token_logprobs ?? [];
      if (entries.length > 0) answer.logprobEvents += 1;
      answer.logprobs.push(...entries);
      answer.usage = event.usage ?? answer.usage;
      answer.error = event.error ?? answer.error;
      Object.assign(answer.nvext, event.nvext);
    };
    const text = await response.text();
    if (response.status !== 200) return { ...answer, error: text };
    if (!fields.stream) take(JSON.parse(text));
    else
      for (const line of text.split("\n")) {
        if (line === "data: [DONE]") answer.done = true;
        else if (line.startsWith("data: ")) take(JSON.parse(line.slice(6)));
      }
    return answer;
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await Promise.all(this.workers.map((worker) => worker.kill()));
    await this.frontend[Symbol.asyncDispose]();
    rmSync(this.home, { recursive: true, force: true });
  }
}

export class Worker {
  constructor(
    readonly process: Launched,
    /** Of the system server. */
    readonly system: string,
    /** Hex. */
    readonly instance: string,
  ) {}

  /** Sum of a family's samples; null when it has none. */
  async metric(name: string): Promise<number | null> {
    const text = await (await fetch(`${this.system}/metrics`)).text();
    const values = text.split("\n").filter((line) => line.startsWith(`${name} `) || line.startsWith(`${name}{`)).map((line) => Number(line.slice(line.lastIndexOf(" ") + 1)));
    return values.length === 0 ? null : values.reduce((a, b) => a + b, 0);
  }
  /** No request and no page in use. */
  async idle(): Promise<void> {
    await eventually(async () => (await this.metric("dynamo_component_inflight_requests")) === 0 && (await this.metric("layerscale_requests_running")) === 0 && (await this.metric("layerscale_kv_pages_held")) === 0, "the worker is idle", LIMIT_MS);
  }
  async kill(): Promise<void> {
    this.process.signal("SIGKILL");
    await this.process.exit();
  }
}

/** Reads a streamed answer until it has this many events with text, and leaves it open. */
export async function readEvents(response: Response, count: number): Promise<{ text: string; rest: () => Promise<string> }> {
  const reader = response.body!.getReader();
  const decoder = new TextDecoder();
  let text = "";
  const rest = async (until: () => boolean) => {
    while (!until()) {
      const { done, value } = await reader.read();
      if (done) break;
      text += decoder.decode(value, { stream: true });
    }
    return text;
  };
  await rest(() => text.split("\n").filter((line) => line.startsWith("data: ")).length >= count);
  return { text, rest: () => rest(() => false) };
}
