import type { EtcdOptions } from "./options.ts";

/** One endpoint has this long for an answer before the next is asked. */
const TRY_MS = 2_000;
/** Between rounds over all endpoints. */
const ROUND_MS = 250;

/** gRPC status codes that etcd uses. */
const INVALID_ARGUMENT = 3;
const DEADLINE_EXCEEDED = 4;
export const NOT_FOUND = 5;
export const PERMISSION_DENIED = 7;
const FAILED_PRECONDITION = 9;
const INTERNAL = 13;
const UNAVAILABLE = 14;
const UNAUTHENTICATED = 16;
/** Another member may do better. */
const TRANSIENT: ReadonlySet<number> = new Set([DEADLINE_EXCEEDED, INTERNAL, UNAVAILABLE]);

/** What no waiting cures: the two sides do not trust each other. */
const TLS_REFUSALS = /^(UNABLE_TO_|SELF_SIGNED|DEPTH_ZERO|CERT_|ERR_TLS_CERT|EPROTO)/;

/** etcd answered, and refused. */
export class EtcdError extends Error {
  override name = "EtcdError";
  constructor(
    message: string,
    /** gRPC status; null when the answer was none of etcd's. */
    readonly code: number | null,
  ) {
    super(message);
  }
}

/** No endpoint gave an answer. */
export class EtcdUnreachable extends Error {
  override name = "EtcdUnreachable";
  constructor(
    message: string,
    /** Waiting will not help. */
    readonly hopeless: boolean,
  ) {
    super(message);
  }
}

export type Answer = Record<string, unknown>;

const sleep = (ms: number, signal: AbortSignal) =>
  new Promise<void>((resolve) => {
    const timer = setTimeout(resolve, ms);
    signal.addEventListener("abort", () => (clearTimeout(timer), resolve()), { once: true });
  });

/**
 * etcd's API as JSON over HTTP, which every server since 3.4 offers on its client port. gRPC libraries were weighed and left out: they lean on
 * an HTTP/2 client that has been the source of hanging streams in this runtime, they need generated code, and nothing here streams.
 * 64-bit numbers stand in this JSON as strings, so no id is rounded.
 */
export class EtcdGateway {
  #at = 0;
  #token: string | null = null;
  readonly #closed = new AbortController();

  constructor(readonly options: EtcdOptions) {}

  /**
   * Asks one endpoint after the other, the last good one first, until one answers or the time is over; at least one round.
   * @throws EtcdError when etcd refuses, EtcdUnreachable when nobody answers or after close()
   */
  async call(path: string, body: Answer, limitMs: number): Promise<Answer> {
    const { endpoints } = this.options;
    const deadline = performance.now() + limitMs;
    const first = this.#at;
    for (;;) {
      const failures: string[] = [];
      let hopeless = true;
      for (let i = 0; i < endpoints.length; i += 1) {
        const index = (first + i) % endpoints.length;
        const endpoint = endpoints[index] as string;
        if (this.#closed.signal.aborted) throw new EtcdUnreachable("the connection to etcd is closed", true);
        try {
          const answer = await this.#authorized(endpoint, path, body);
          this.#at = index;
          return answer;
        } catch (error) {
          if (error instanceof EtcdError && !(error.code !== null && TRANSIENT.has(error.code))) throw error;
          // Without the HTTP client's hints for programmers.
          failures.push(`${endpoint}: ${(error as Error).message.replace(/[.:]? (For more information|Is the computer|Was there a typo)[^]*$/, "")}`);
          hopeless &&= TLS_REFUSALS.test(String((error as NodeJS.ErrnoException).code));
        }
      }
      if (performance.now() + ROUND_MS > deadline) throw new EtcdUnreachable(failures.join("; "), hopeless);
      await sleep(ROUND_MS, this.#closed.signal);
    }
  }

  /** Ends calls in progress, all but `last`, which is made once. */
  async close(last: { path: string; body: Answer } | null): Promise<void> {
    this.#closed.abort();
    if (last === null) return;
    const { endpoints } = this.options;
    await this.#authorized(endpoints[this.#at % endpoints.length] as string, last.path, last.body, null);
  }

  /** With a token when there is a user. A token that etcd no longer accepts (expired, or etcd restarted) is replaced once. */
  async #authorized(endpoint: string, path: string, body: Answer, signal: AbortSignal | null = this.#closed.signal): Promise<Answer> {
    if (this.options.user === null) return this.#post(endpoint, path, body, "", signal);
    const used = this.#token ?? (await this.#authenticate(endpoint, signal));
    try {
      return await this.#post(endpoint, path, body, used, signal);
    } catch (error) {
      // Some versions end the connection without an answer when a token is bad (etcd issue 20332), so silence counts as well.
      const doubtful = !(error instanceof EtcdError) || error.code === UNAUTHENTICATED || (error.code === INVALID_ARGUMENT && /user name is empty|revision/.test(error.message));
      if (!doubtful || signal?.aborted) throw error;
      if (this.#token === used) this.#token = null;
      return this.#post(endpoint, path, body, this.#token ?? (await this.#authenticate(endpoint, signal)), signal);
    }
  }

  async #authenticate(endpoint: string, signal: AbortSignal | null): Promise<string> {
    const { name, password } = this.options.user!;
    try {
      const { token } = await this.#post(endpoint, "/v3/auth/authenticate", { name, password }, "", signal);
      if (typeof token !== "string") throw new EtcdError(`${endpoint}: no token in the answer to a login`, null);
      return (this.#token = token);
    } catch (error) {
      // Authentication is not switched on: everything is allowed.
      if (error instanceof EtcdError && error.code === FAILED_PRECONDITION) return (this.#token = "");
      if (error instanceof EtcdError && error.code === INVALID_ARGUMENT) throw new EtcdError(`ETCD_AUTH_USERNAME, ETCD_AUTH_PASSWORD: user "${name}" is not accepted: ${error.message}`, error.code);
      throw error;
    }
  }

  async #post(endpoint: string, path: string, body: Answer, token: string, signal: AbortSignal | null): Promise<Answer> {
    let timer: ReturnType<typeof setTimeout> | undefined;
    const late = new AbortController();
    const expired = new Promise<never>((_, reject) => {
      timer = setTimeout(() => {
        late.abort();
        reject(new Error(`no answer within ${TRY_MS / 1000} s`));
      }, TRY_MS);
    });
    try {
      const sent = fetch(endpoint + path, {
        method: "POST",
        body: JSON.stringify(body),
        headers: { "content-type": "application/json", ...(token === "" ? {} : { authorization: token }) },
        redirect: "error",
        signal: signal === null ? late.signal : AbortSignal.any([late.signal, signal]),
        ...(this.options.tls !== null && { tls: this.options.tls }),
        ...DIRECT,
      }).then(async (response) => ({ status: response.status, text: await response.text() }));
      const { status, text } = await Promise.race([sent, expired]);
      return parse(endpoint, status, text);
    } finally {
      clearTimeout(timer);
    }
  }
}

/** etcd is never behind the proxy that HTTP_PROXY names. */
const DIRECT = { proxy: false } as unknown as { proxy?: string };

/** A stream's answer is one object per line, wrapped in "result"; the last one counts. */
function parse(endpoint: string, status: number, text: string): Answer {
  let answer: unknown = null;
  try {
    answer = JSON.parse(text.trimEnd().split("\n").at(-1) ?? "");
  } catch {
    // Reported below: an answer of something else.
  }
  if (typeof answer !== "object" || answer === null || (status !== 200 && !("code" in answer)))
    throw new EtcdError(`${endpoint} answered ${status} "${text.trim().slice(0, 80)}": expected etcd 3.4 or newer with its JSON gateway (--enable-grpc-gateway, on by default)`, null);
  const { result, error, message, code } = answer as { result?: unknown; error?: unknown; message?: unknown; code?: unknown };
  if (typeof result === "object" && result !== null) return result as Answer;
  if (status === 200 && error === undefined) return answer as Answer;
  const inner = typeof error === "object" && error !== null ? (error as { message?: unknown; grpc_code?: unknown; code?: unknown }) : null;
  const number = [inner?.grpc_code, inner?.code, code].find((value) => typeof value === "number") as number | undefined;
  throw new EtcdError(String(inner?.message ?? message ?? error), number ?? null);
}
