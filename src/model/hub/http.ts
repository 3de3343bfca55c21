import { VERSION } from "../../config/version.ts";
import { TransientError } from "./errors.ts";

const MAX_REDIRECTS = 8;
const REDIRECTS = [301, 302, 303, 307, 308];

/** An answer, and where it came from after redirects. */
export interface Answer {
  response: Response;
  url: URL;
  /** Ends the transfer of the body. */
  abort(): void;
}

const REASONS: readonly (readonly [RegExp, string])[] = [
  [/ECONNREFUSED|ConnectionRefused/, "the connection was refused"],
  [/ECONNRESET|ConnectionReset/, "the connection was reset"],
  [/ConnectionClosed/, "the connection was closed"],
  [/ENOTFOUND|EAI_AGAIN|DNS|getaddrinfo/i, "the name is not known (DNS)"],
  [/Malformed_HTTP/, "the answer is not HTTP"],
  [/FailedToOpenSocket|EHOSTUNREACH|ENETUNREACH/, "the address cannot be reached"],
];

const CERTIFICATE = /CERT|certificate|SELF_SIGNED|UNABLE_TO_(?:VERIFY|GET_ISSUER)/;

/** What a failed connection means, in a few words. */
export function networkReason(error: unknown): string {
  const { code = "", message = String(error) } = error as { code?: string; message?: string };
  const known = REASONS.find(([pattern]) => pattern.test(code) || pattern.test(message));
  // Hints of the HTTP client for programmers.
  return known?.[1] ?? message.replace(/\.? (For more information|Is the computer)[^]*$/, "");
}

/** Waits; @throws the signal's reason when it is raised first. */
export async function pause(ms: number, signal: AbortSignal): Promise<void> {
  signal.throwIfAborted();
  const { promise, resolve } = Promise.withResolvers<void>();
  const timer = setTimeout(resolve, ms);
  signal.addEventListener("abort", () => resolve(), { once: true });
  await promise;
  clearTimeout(timer);
  signal.throwIfAborted();
}

/**
 * One request with its redirects. The token goes to the origin it is meant for and to no other, and never from https to http.
 * @param follow whether to follow a redirect to another origin; one that stays is always followed
 * @param timeoutMs until the head of each answer
 * @throws TransientError when nothing came; the signal's reason when it is raised
 */
export async function request(
  method: "GET" | "HEAD",
  address: string,
  headers: Readonly<Record<string, string>>,
  token: string | null,
  timeoutMs: number,
  signal: AbortSignal,
  follow: (response: Response) => boolean,
): Promise<Answer> {
  let url = new URL(address);
  const { origin } = url;
  for (let hops = 0; hops <= MAX_REDIRECTS; hops++) {
    const { response, abort } = await fetchHead(method, url, {
      // Compressed answers have other lengths than the files, and ranges of them are no ranges of the files.
      "accept-encoding": "identity",
      "user-agent": `layerscale/${VERSION}`,
      ...headers,
      ...(token !== null && url.origin === origin ? { authorization: `Bearer ${token}` } : {}),
    }, timeoutMs, signal);
    const location = REDIRECTS.includes(response.status) ? response.headers.get("location") : null;
    if (location === null || !URL.canParse(location, url.href)) return { response, url, abort };
    const next = new URL(location, url);
    if (next.origin !== url.origin && !follow(response)) return { response, url, abort };
    if (!/^https?:$/.test(next.protocol) || (url.protocol === "https:" && next.protocol === "http:")) {
      abort();
      throw new TransientError(`${url.host} redirects to ${next.protocol}//${next.host}, expected https`);
    }
    abort();
    url = next;
  }
  throw new TransientError(`more than ${MAX_REDIRECTS} redirects`);
}

async function fetchHead(method: string, url: URL, headers: Record<string, string>, timeoutMs: number, signal: AbortSignal): Promise<{ response: Response; abort(): void }> {
  const controller = new AbortController();
  const stop = () => controller.abort(signal.reason);
  signal.throwIfAborted();
  signal.addEventListener("abort", stop, { once: true });
  let late = false;
  const timer = setTimeout(() => {
    late = true;
    controller.abort();
  }, timeoutMs);
  const abort = () => {
    signal.removeEventListener("abort", stop);
    controller.abort();
  };
  try {
    return { response: await fetch(url.href, { method, headers, redirect: "manual", signal: controller.signal }), abort };
  } catch (error) {
    signal.removeEventListener("abort", stop);
    signal.throwIfAborted();
    if (CERTIFICATE.test(`${(error as { code?: string }).code} ${(error as Error).message}`))
      throw new TransientError(`${url.host}: its certificate is not trusted (${networkReason(error)}); NODE_EXTRA_CA_CERTS names a PEM file of further authorities`, null, true);
    throw new TransientError(late ? `${url.host} did not answer within ${timeoutMs / 1000} s` : `${url.host}: ${networkReason(error)}`);
  } finally {
    clearTimeout(timer);
  }
}

/** The pieces of a body. @throws TransientError when none comes for stallMs, or the connection ends early */
export async function* pieces({ response, url, abort }: Answer, stallMs: number, signal: AbortSignal): AsyncGenerator<Uint8Array> {
  if (response.body === null) return;
  const reader = response.body.getReader();
  try {
    for (;;) {
      const late = Promise.withResolvers<"late">();
      const timer = setTimeout(() => late.resolve("late"), stallMs);
      const next = await Promise.race([reader.read(), late.promise]).catch((error: unknown) => {
        signal.throwIfAborted();
        throw new TransientError(`${url.host}: ${networkReason(error)}`);
      }).finally(() => clearTimeout(timer));
      signal.throwIfAborted();
      if (next === "late") throw new TransientError(`${url.host} sent nothing for ${stallMs / 1000} s`);
      if (next.done) return;
      yield next.value;
    }
  } finally {
    abort();
  }
}

const MAX_RETRY_AFTER_MS = 120_000;

/** Retry-After in seconds or as a date. */
export function retryAfterMs(response: Response): number | null {
  const value = response.headers.get("retry-after");
  if (value === null) return null;
  const ms = /^\d+$/.test(value.trim()) ? Number(value) * 1000 : Date.parse(value) - Date.now();
  return Number.isFinite(ms) ? Math.min(Math.max(ms, 0), MAX_RETRY_AFTER_MS) : null;
}
