import { connect, createServer, type Server, type Socket } from "node:net";
import { parseJson, stringifyJson } from "../../../src/dynamo/protocol/bigint-json.ts";
import { payloadCodec } from "../../../src/dynamo/protocol/codec.ts";
import { encodeFrame } from "../../../src/dynamo/request-plane/frame-codec.ts";
import { encodeTwoPart, TwoPartDecoder } from "../../../src/dynamo/request-plane/two-part.ts";

export const LIMIT_MS = 10_000;

/** Resolves with the first truthy value; fails at the deadline. */
export async function until<T>(what: string, read: () => T | Promise<T>, limitMs = LIMIT_MS): Promise<NonNullable<T>> {
  const end = performance.now() + limitMs;
  for (;;) {
    const value = await read();
    if (value) return value;
    if (performance.now() > end) throw new Error(`not within ${limitMs} ms: ${what}`);
    await new Promise((resolve) => setTimeout(resolve, 5));
  }
}

export interface Item {
  data?: { token_ids: number[]; finish_reason?: string; log_probs?: number[]; top_logprobs?: unknown[][]; completion_usage?: Record<string, unknown> };
  event?: string;
  error?: { error_type: unknown; message: string };
}

interface CallOptions {
  codec?: "json" | "msgpack";
  rawBody?: Buffer;
  control?: Record<string, unknown>;
  /** Beside those the frontend always sends. */
  headers?: Record<string, string>;
  /** The answer is not read. */
  paused?: boolean;
}

const requestHeaders = (more: Record<string, string> = {}) => ({ ...more, "request-id": "id-1", "x-frontend-send-ts-ns": String(BigInt(Date.now()) * 1_000_000n) });

/** A frontend of one request: sends it, listens for the answer. */
export class PlaneCall {
  ack: string | null = null;
  prologue: unknown = null;
  handshake: unknown = null;
  readonly items: Item[] = [];
  final = false;
  sentinel = false;
  ended = false;
  answer: Socket | null = null;
  #server: Server | null = null;
  #request: Socket | null = null;

  /** @param address "ip:port/path" */
  static async send(address: string, body: unknown, options: CallOptions = {}): Promise<PlaneCall> {
    const { call, payload } = await PlaneCall.#prepare(body, options);
    const slash = address.indexOf("/");
    const colon = address.lastIndexOf(":", slash);
    const frame = encodeFrame({ path: address.slice(slash + 1), headers: requestHeaders(options.headers), payload });
    const request = (call.#request = connect(Number(address.slice(colon + 1, slash)), address.slice(0, colon)));
    request.on("error", () => {});
    let received = Buffer.alloc(0);
    request.on("data", (chunk: Buffer) => {
      received = Buffer.concat([received, chunk]);
      if (received.length >= 4 && received.length >= 4 + received.readUInt32BE(0)) call.ack = received.toString("utf8", 4, 4 + received.readUInt32BE(0));
    });
    request.write(frame);
    await until("acknowledgement", () => call.ack !== null || request.destroyed);
    return call;
  }

  /** @param deliver sends the two-part message by other means, and resolves with the acknowledgement */
  static async sendBy(deliver: (payload: Buffer, headers: Record<string, string>) => Promise<string>, body: unknown, options: CallOptions = {}): Promise<PlaneCall> {
    const { call, payload } = await PlaneCall.#prepare(body, options);
    call.ack = await deliver(payload, requestHeaders(options.headers));
    return call;
  }

  /** Listens for the answer. */
  static async #prepare(body: unknown, options: CallOptions): Promise<{ call: PlaneCall; payload: Buffer }> {
    const call = new PlaneCall();
    const codec = payloadCodec(options.codec)!;
    const server = (call.#server = createServer((socket) => {
      call.answer = socket;
      if (options.paused) socket.pause();
      const decoder = new TwoPartDecoder(1 << 26);
      socket.on("data", (chunk: Buffer) => {
        for (const { header, data } of decoder.push(chunk)) call.#frame(header, data, (bytes) => codec.decode(bytes));
      });
      socket.on("error", () => {});
      socket.on("close", () => (call.ended = true));
    }));
    await new Promise<void>((resolve) => server.listen(0, "127.0.0.1", resolve));
    const port = (server.address() as { port: number }).port;
    const info = { address: `127.0.0.1:${port}`, subject: "s-1", context: "id-1", stream_type: "response" };
    const control = {
      id: "id-1", request_type: "single_in", response_type: "many_out", payload_codec: codec.name,
      connection_info: { transport: "tcp_server", info: JSON.stringify(info) }, ...options.control,
    };
    return { call, payload: encodeTwoPart(Buffer.from(stringifyJson(control)), options.rawBody ?? codec.encode(body)) };
  }

  #frame(header: Buffer, data: Buffer, decode: (bytes: Buffer) => unknown): void {
    if (header.length > 0) {
      const value = parseJson(header.toString());
      if (value === "sentinel") this.sentinel = true;
      else if (this.handshake === null) this.handshake = value;
      else this.prologue = value;
    }
    if (data.length === 0) return;
    const frame = decode(data) as { data?: Item; complete_final: boolean };
    if (frame.complete_final) this.final = true;
    if (frame.data !== undefined) this.items.push(frame.data);
  }

  control(word: string): void {
    this.answer!.write(encodeTwoPart(Buffer.from(JSON.stringify(word)), null));
  }
  /** Until the worker closed the answer. */
  async done(): Promise<this> {
    await until("end of the answer", () => this.ended);
    this.close();
    return this;
  }
  get tokens(): number[] {
    return this.items.flatMap((item) => item.data?.token_ids ?? []);
  }
  get errors(): NonNullable<Item["error"]>[] {
    return this.items.flatMap((item) => item.error ?? []);
  }
  close(): void {
    this.answer?.destroy();
    this.#request?.destroy();
    this.#server?.close();
  }
}

/** A body in the shape the frontend sends, absent options as null. */
export function requestBody(patch: { token_ids?: number[]; stop?: Record<string, unknown>; sampling?: Record<string, unknown>; output?: Record<string, unknown>; [key: string]: unknown } = {}): Record<string, unknown> {
  const { stop, sampling, output, ...rest } = patch;
  return {
    model: "smol", token_ids: [1, 2, 3],
    stop_conditions: { max_tokens: 4, stop: null, stop_token_ids: null, stop_token_ids_visible: null, stop_token_ids_hidden: null, min_tokens: null, ignore_eos: null, max_thinking_tokens: null, ...stop },
    sampling_options: {
      n: null, best_of: null, presence_penalty: null, frequency_penalty: null, repetition_penalty: null, temperature: 0, top_p: null, top_k: null, min_p: null,
      use_beam_search: null, length_penalty: null, seed: null, include_stop_str_in_output: null, guided_decoding: null, ...sampling,
    },
    output_options: { logprobs: null, prompt_logprobs: null, skip_special_tokens: null, formatted_prompt: null, return_tokens_as_token_ids: null, ...output },
    eos_token_ids: [], mdc_sum: "00", annotations: [], routing: {}, router_config_override: null, ...rest,
  };
}
