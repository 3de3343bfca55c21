import { badRequest, ClientGone, HttpError, unavailable } from "./http-errors.ts";

const MIB = 1 << 20;

export interface BodyLimits {
  /** Bytes of one body. */
  maxBytes: number;
  /** Bytes of all bodies being received or parsed at once. */
  budgetBytes: number;
  /** Milliseconds for a body to arrive whole. */
  deadlineMs: number;
}

/** How long the rest of a body that is too large is read. */
const DISCARD_MS = 2_000;

export const BODY_LIMITS: BodyLimits = { maxBytes: 64 * MIB, budgetBytes: 256 * MIB, deadlineMs: 120_000 };

/** Reads request bodies within a size limit, a deadline, and a budget over all of them. */
export class BodyReader {
  private held = 0;

  constructor(private readonly limits: BodyLimits = BODY_LIMITS) {}

  /** Bytes reserved now. */
  get heldBytes(): number {
    return this.held;
  }

  /**
   * Reads a body and gives it to `use`; its bytes count against the budget until `use` returns.
   * @throws HttpError 413 (too large, before anything is read when Content-Length says so), 408 (too slow), 503 (budget)
   */
  async with<T>(request: Request, use: (bytes: Uint8Array) => T): Promise<T> {
    const encoding = request.headers.get("content-encoding");
    if (encoding !== null && encoding.toLowerCase() !== "identity")
      throw badRequest(`content-encoding: expected none or "identity", got ${JSON.stringify(encoding.slice(0, 40))}`);
    const length = Number(request.headers.get("content-length") ?? "0");
    const declared = Number.isSafeInteger(length) && length > 0 ? length : 0;
    if (declared > this.limits.maxBytes) throw this.tooLarge(`${declared} bytes`);
    const lease = { bytes: 0 };
    try {
      this.reserve(lease, declared);
      return use(await this.read(request, lease));
    } finally {
      this.held -= lease.bytes;
    }
  }

  private reserve(lease: { bytes: number }, bytes: number): void {
    if (this.held + bytes > this.limits.budgetBytes) throw unavailable("server is holding too many request bodies");
    this.held += bytes;
    lease.bytes += bytes;
  }

  private tooLarge(size: string): HttpError {
    // The rest of the body is never read, so the connection cannot be used again.
    return new HttpError(413, "request_too_large", `the body has ${size}; the limit is ${this.limits.maxBytes}`, { headers: { connection: "close" } });
  }

  /** Closing a connection with unread bytes resets it, and the client may never see the answer; so a little more is taken and thrown away. */
  private async discard(reader: ReadableStreamDefaultReader<Uint8Array>): Promise<void> {
    const over = new Promise<{ done: true }>((resolve) => setTimeout(resolve, DISCARD_MS, { done: true }).unref());
    for (let left = this.limits.maxBytes; left > 0; ) {
      const part = await Promise.race([reader.read(), over]);
      if (part.done) return;
      left -= part.value.length;
    }
  }

  private async read(request: Request, lease: { bytes: number }): Promise<Uint8Array> {
    const reader = request.body?.getReader() as ReadableStreamDefaultReader<Uint8Array> | undefined;
    if (!reader) return new Uint8Array(0);
    const late = Promise.withResolvers<never>();
    late.promise.catch(() => {});
    const timer = setTimeout(
      () => late.reject(new HttpError(408, "timeout_error", `the body did not arrive within ${this.limits.deadlineMs / 1000} s`, { headers: { connection: "close" } })),
      this.limits.deadlineMs,
    );
    const chunks: Uint8Array[] = [];
    let size = 0;
    try {
      for (;;) {
        const { done, value } = await Promise.race([reader.read(), late.promise]);
        if (done) break;
        size += value.length;
        if (size > this.limits.maxBytes) {
          chunks.length = 0;
          await this.discard(reader);
          throw this.tooLarge(`more than ${this.limits.maxBytes} bytes`);
        }
        // A body without Content-Length is paid for as it arrives.
        if (size > lease.bytes) this.reserve(lease, size - lease.bytes);
        chunks.push(value);
      }
    } catch (error) {
      void reader.cancel().catch(() => {});
      if (error instanceof HttpError) throw error;
      throw new ClientGone("the connection closed before the body was complete");
    } finally {
      clearTimeout(timer);
    }
    if (chunks.length === 1) return chunks[0] as Uint8Array;
    const whole = new Uint8Array(size);
    let at = 0;
    for (const chunk of chunks) {
      whole.set(chunk, at);
      at += chunk.length;
    }
    return whole;
  }
}
