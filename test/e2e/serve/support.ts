import { launch, Launched, required, type LaunchOptions } from "../../support/launch.ts";

export interface ServedModel extends AsyncDisposable {
  process: Launched;
  url: string;
  post(path: string, body: unknown, init?: RequestInit): Promise<Response>;
  chat(content: string, fields?: Record<string, unknown>): Promise<Record<string, any>>;
  complete(prompt: unknown, fields?: Record<string, unknown>): Promise<Record<string, any>>;
  gauge(name: string): Promise<number>;
  health(): Promise<Record<string, any>>;
}

export const model = (): string => required("LAYERSCALE_TEST_GGUF");

/** `layerscale serve` on a free port, not yet ready. */
export async function startListening(args: readonly string[] = [], options: LaunchOptions = {}): Promise<{ process: Launched; url: string }> {
  const process = launch(["serve", "--model", model(), "--port", "0", ...args], options);
  const { url } = await process.log("listening");
  return { process, url: url as string };
}

/** `layerscale serve` on a free port, ready. */
export async function serveModel(args: readonly string[] = [], options: LaunchOptions = {}): Promise<ServedModel> {
  const { process, url } = await startListening(args, options);
  await process.log("ready");
  const post = (path: string, body: unknown, init: RequestInit = {}) => fetch(url + path, { method: "POST", body: JSON.stringify(body), ...init });
  const ok = async (response: Response): Promise<Record<string, any>> => {
    const body = (await response.json()) as Record<string, any>;
    if (response.status !== 200) throw new Error(`status ${response.status}: ${JSON.stringify(body)}`);
    return body;
  };
  return {
    process, url, post,
    chat: async (content, fields = {}) => ok(await post("/v1/chat/completions", { messages: [{ role: "user", content }], temperature: 0, ...fields })),
    complete: async (prompt, fields = {}) => ok(await post("/v1/completions", { prompt, temperature: 0, ...fields })),
    gauge: async (name) => {
      const text = await (await fetch(`${url}/metrics`)).text();
      const line = text.split("\n").find((candidate) => candidate.startsWith(`${name} `));
      if (line === undefined) throw new Error(`no ${name} in /metrics`);
      return Number(line.slice(name.length + 1));
    },
    health: async () => (await fetch(`${url}/health`)).json() as Promise<Record<string, any>>,
    [Symbol.asyncDispose]: () => process[Symbol.asyncDispose](),
  };
}

export function frames(text: string): Record<string, any>[] {
  const parts = text.split("\n\n");
  if (parts.pop() !== "" || parts.pop() !== "data: [DONE]") throw new Error(`the stream does not end with [DONE]: ${JSON.stringify(text.slice(-200))}`);
  return parts.map((part) => JSON.parse(part.slice("data: ".length)) as Record<string, any>);
}

export const joined = (chunks: readonly Record<string, any>[]): string => chunks.map((chunk) => chunk.choices[0]?.delta?.content ?? chunk.choices[0]?.text ?? "").join("");
