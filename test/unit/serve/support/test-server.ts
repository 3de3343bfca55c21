import { App } from "../../../../src/serve/app.ts";
import { KeyCheck } from "../../../../src/serve/auth.ts";
import type { BodyLimits } from "../../../../src/serve/body.ts";
import { badRequest } from "../../../../src/serve/http-errors.ts";
import { GENERATION_ROUTES, listen } from "../../../../src/serve/server.ts";
import type { ChatParams, Codec } from "../../../../src/serve/serving.ts";
import { Detokenizer } from "../../../../src/tokenizer/detokenizer.ts";
import { StopMatcher } from "../../../../src/tokenizer/stop-matcher.ts";
import { byteTokenizer, EOS } from "./byte-tokenizer.ts";
import { FakeEngine, type Script } from "./fake-engine.ts";

const tokenizer = byteTokenizer();

/** Chats are rendered as "role: content\n" lines; the word "refuse" makes the template refuse. */
function codecFor(seen: ChatParams[]): Codec {
  return {
    encode: (text) => tokenizer.encode(text, { addSpecialTokens: true }),
    encodeChat: (params) => {
      seen.push(params);
      const text = params.messages.map((m) => `${m.role as string}: ${m.content as string}\n`).join("");
      if (text.includes("refuse")) throw badRequest("messages: the chat template refuses them: no", "messages");
      return tokenizer.encode(text, { addSpecialTokens: false });
    },
    tokenBytes: (id) => tokenizer.tokenBytes(id),
    decoder: (continuation) => new Detokenizer(tokenizer, { skipSpecialTokens: true, continuation }),
    stopMatcher: (stops) => new StopMatcher(stops),
  };
}

export const bytesOf = (text: string): number[] => [...new TextEncoder().encode(text)];

/** The model says this text and then ends. */
export const says = (text: string): Script => () => [...bytesOf(text), EOS];

export interface TestServer extends AsyncDisposable {
  url: string;
  port: number;
  app: App;
  engine: FakeEngine;
  chats: ChatParams[];
  post(path: string, body: unknown, headers?: Record<string, string>): Promise<Response>;
  chat(body: Record<string, unknown>): Promise<Response>;
}

export interface TestServerOptions {
  key?: string;
  bodyLimits?: BodyLimits;
  contextLength?: number;
  name?: string;
  idleSeconds?: number;
  /** Leave the app in "loading". */
  loading?: boolean;
  defaults?: { temperature: number; topP: number };
}

export function startServer(script: Script, options: TestServerOptions = {}): TestServer {
  const contextLength = options.contextLength ?? 512;
  const engine = new FakeEngine(script, { contextLength });
  const chats: ChatParams[] = [];
  const app = new App({ version: "0.0.0-test", keyCheck: options.key === undefined ? null : new KeyCheck(options.key), ...(options.bodyLimits && { bodyLimits: options.bodyLimits }) });
  for (const route of GENERATION_ROUTES) app.metrics.declareRoute(route);
  app.metrics.attach(engine);
  const serving = {
    engine, codec: codecFor(chats), name: options.name ?? "Org/Test-Model", contextLength, vocab: 300, eosTokenIds: [EOS],
    defaults: options.defaults ?? { temperature: 0.7, topP: 0.95 },
  };
  if (!options.loading) app.start(serving);
  const server = listen(app, { host: "127.0.0.1", port: 0, ...(options.idleSeconds !== undefined && { idleSeconds: options.idleSeconds }) });
  const url = server.url.origin;
  const post = (path: string, body: unknown, headers: Record<string, string> = {}) =>
    fetch(url + path, { method: "POST", headers: { "content-type": "application/json", ...headers }, body: typeof body === "string" ? body : JSON.stringify(body) });
  return {
    url, port: server.port as number, app, engine, chats, post,
    chat: (body) => post("/v1/chat/completions", { messages: [{ role: "user", content: "hi" }], ...body }),
    [Symbol.asyncDispose]: async () => {
      await server.stop(true);
    },
  };
}

/** Payloads of a stream in OpenAI's dialect; checks the framing and the last frame. */
export function sseFrames(text: string): Record<string, any>[] {
  const frames = text.split("\n\n");
  if (frames.pop() !== "") throw new Error(`the stream does not end with a blank line: ${JSON.stringify(text.slice(-80))}`);
  if (frames.pop() !== "data: [DONE]") throw new Error(`the stream does not end with [DONE]: ${JSON.stringify(text.slice(-80))}`);
  return frames.map((frame) => {
    if (!frame.startsWith("data: ") || frame.includes("\n")) throw new Error(`not one data line: ${JSON.stringify(frame)}`);
    return JSON.parse(frame.slice(6)) as Record<string, any>;
  });
}

/** Waits for a condition with a deadline. */
export async function until(condition: () => boolean | Promise<boolean>, what: string, ms = 10_000): Promise<void> {
  const deadline = performance.now() + ms;
  while (!(await condition())) {
    if (performance.now() > deadline) throw new Error(`timed out waiting for ${what}`);
    await Bun.sleep(2);
  }
}
