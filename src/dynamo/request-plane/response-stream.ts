import type { Socket } from "node:net";
import type { ResponseTarget } from "./control-header.ts";
import { type DialTls, dial } from "./tls.ts";
import { encodeTwoPart, TwoPartDecoder } from "./two-part.ts";

export const CONNECT_TIMEOUT_MS = 5_000;
/** A frontend that takes no byte for this long is treated as gone. */
export const STALL_TIMEOUT_MS = 120_000;
/** How long the last bytes may take after the end of a stream. */
const CLOSE_TIMEOUT_MS = 5_000;
/** The frontend sends only the words "kill" and "stop". */
const MAX_CONTROL_BYTES = 64 * 1024;

const PROLOGUE = encodeTwoPart(Buffer.from('{"error":null}'), null);
const SENTINEL = encodeTwoPart(Buffer.from('"sentinel"'), null);

export type CancelReason = "kill" | "stop" | "disconnected" | "stalled" | "protocol";

/**
 * One answer: a connection of its own that the worker dials to the frontend. Handshake and prologue leave at once, since
 * the frontend hears no cancellation of its client before the prologue.
 */
export class ResponseStream {
  readonly #socket: Socket;
  readonly #abort = new AbortController();
  #reason: CancelReason | null = null;
  #finished = false;
  #wake: (() => void) | null = null;

  private constructor(socket: Socket) {
    this.#socket = socket;
    const decoder = new TwoPartDecoder(MAX_CONTROL_BYTES);
    socket.on("data", (chunk: Buffer) => {
      try {
        for (const { header } of decoder.push(chunk)) this.#control(header.toString("latin1"));
      } catch {
        this.#cancel("protocol");
      }
    });
    socket.on("end", () => this.#cancel("disconnected"));
    socket.on("error", () => this.#cancel("disconnected"));
    socket.on("close", () => this.#cancel("disconnected"));
    socket.on("drain", () => this.#resume());
    socket.on("timeout", () => {
      if (socket.writableLength > 0) this.#cancel("stalled");
    });
    socket.setTimeout(STALL_TIMEOUT_MS);
  }

  /** Connects within the time limit and sends handshake and prologue. @throws Error when the frontend cannot be reached */
  static async open(target: ResponseTarget, tls: DialTls | null = null, timeoutMs = CONNECT_TIMEOUT_MS): Promise<ResponseStream> {
    const socket = await dial(target, tls, timeoutMs + (tls?.handshakeMs ?? 0));
    const stream = new ResponseStream(socket);
    const handshake = Buffer.from(JSON.stringify({ subject: target.subject, stream_type: "response" }));
    socket.write(Buffer.concat([encodeTwoPart(handshake, null), PROLOGUE]));
    return stream;
  }

  /** Aborted as soon as the frontend cancels or is gone. */
  get signal(): AbortSignal {
    return this.#abort.signal;
  }
  /** Why the stream was cancelled; null while it is not. The end of a finished stream is no cancellation. */
  get cancelled(): CancelReason | null {
    return this.#reason;
  }

  /**
   * Sends one item (already encoded) and waits until the socket has room for the next one.
   * @returns false when the stream is cancelled
   */
  async send(item: Uint8Array): Promise<boolean> {
    if (this.#reason !== null) return false;
    if (!this.#socket.write(encodeTwoPart(null, item))) await new Promise<void>((resolve) => (this.#wake = resolve));
    return this.#reason === null;
  }

  /**
   * Sends the final marker and the sentinel, closes, and waits (bounded) until the bytes are out. The connection itself may linger: a peer
   * that is slow to close holds no request, and its late word must not meet a closed socket, which would take back what it has not read.
   */
  async finish(finalItem: Uint8Array): Promise<void> {
    if (this.#reason !== null) return this.destroy();
    this.#finished = true;
    const socket = this.#socket;
    const timer = setTimeout(() => socket.destroy(), CLOSE_TIMEOUT_MS);
    const out = new Promise<void>((resolve) => {
      socket.once("finish", resolve);
      socket.once("close", () => {
        clearTimeout(timer);
        resolve();
      });
    });
    socket.end(Buffer.concat([encodeTwoPart(null, finalItem), SENTINEL]));
    await out;
  }

  /** Ends the connection at once, unless it is finished and closes by itself. */
  destroy(): void {
    if (!this.#finished) this.#socket.destroy();
  }

  #control(word: string): void {
    if (word === '"kill"') this.#cancel("kill");
    else if (word === '"stop"') this.#cancel("stop");
    else if (word !== "" && word !== '"sentinel"') this.#cancel("protocol");
  }
  #cancel(reason: CancelReason): void {
    this.#resume();
    if (this.#reason !== null || this.#finished) return;
    this.#reason = reason;
    this.#abort.abort();
    this.#socket.destroy();
  }
  #resume(): void {
    const wake = this.#wake;
    this.#wake = null;
    wake?.();
  }
}
