import { parseJson } from "../../protocol/bigint-json.ts";
import { DiscoveryError } from "../discovery.ts";
import type { ApiAccess } from "./access.ts";
import { ApiError, refusal, unreachable } from "./errors.ts";

/** One request, answer included. */
const REQUEST_MS = 10_000;
/** The server ends a watch after this long; the connection is given up some time later. */
const WATCH_SECONDS = 240;
const WATCH_LIMIT_MS = (WATCH_SECONDS + 30) * 1000;
const MAX_ANSWER = 64 << 20;
/** An object of the API is at most 1.5 MB. */
const MAX_EVENT = 8 << 20;
const PAGE = 500;

/** Parts of a Kubernetes object that are read here. */
export interface ApiObject {
  metadata?: { name?: string; uid?: string; resourceVersion?: string; ownerReferences?: { kind?: string; name?: string; uid?: string }[] };
  [field: string]: unknown;
}
interface ApiList {
  metadata?: { resourceVersion?: string; continue?: string };
  items?: ApiObject[];
}
export interface WatchEvent {
  type: string;
  object: ApiObject;
}
export interface RequestOptions {
  query?: Record<string, string>;
  body?: string;
  contentType?: string;
  signal?: AbortSignal;
  /** Limit of this request in milliseconds. */
  limitMs?: number;
}

/** The few calls that discovery makes, over HTTP: an object is small, and there is one resource to write. */
export class ApiClient {
  constructor(readonly access: ApiAccess) {}

  /** @throws ApiError; DiscoveryError when credentials cannot be read */
  async request(method: string, path: string, options: RequestOptions = {}): Promise<ApiObject> {
    const what = this.#what(method, path);
    try {
      const response = await this.#send(method, path, options, options.limitMs ?? REQUEST_MS);
      const text = await readText(response);
      if (!response.ok) throw refusal(what, response.status, text, response.headers.get("retry-after"));
      return parseJson(text) as ApiObject;
    } catch (error) {
      throw error instanceof DiscoveryError ? error : unreachable(what, error);
    }
  }

  /** All objects of a collection, page by page. */
  async list(path: string, query: Record<string, string> = {}, options: RequestOptions = {}): Promise<{ items: ApiObject[]; resourceVersion: string }> {
    const items: ApiObject[] = [];
    for (let next: string | undefined; ; ) {
      const page = (await this.request("GET", path, { ...options, query: { ...query, limit: String(PAGE), ...(next && { continue: next }) } })) as ApiList;
      items.push(...(page.items ?? []));
      next = page.metadata?.continue || undefined;
      if (next === undefined) return { items, resourceVersion: page.metadata?.resourceVersion ?? "" };
    }
  }

  /**
   * Changes of a collection after a version, until the server ends the watch.
   * @param onOpen called when the server has accepted the watch
   * @throws ApiError; status 410 when the version is too old
   */
  async *watch(path: string, query: Record<string, string>, resourceVersion: string, signal: AbortSignal, onOpen?: () => void): AsyncGenerator<WatchEvent> {
    const what = this.#what("WATCH", path);
    try {
      const parameters = { ...query, watch: "1", allowWatchBookmarks: "true", timeoutSeconds: String(WATCH_SECONDS), resourceVersion };
      const response = await this.#send("GET", path, { query: parameters, signal }, WATCH_LIMIT_MS);
      if (!response.ok) throw refusal(what, response.status, await readText(response), response.headers.get("retry-after"));
      onOpen?.();
      for await (const line of lines(response.body!)) {
        const event = parseJson(line) as WatchEvent;
        if (event.type === "ERROR") {
          const status = event.object as { code?: unknown; message?: unknown };
          throw new ApiError(`${what}: ${String(status.code)} ${String(status.message)}`, Number(status.code), true);
        }
        yield event;
      }
    } catch (error) {
      throw error instanceof DiscoveryError ? error : unreachable(what, error);
    }
  }

  #what(method: string, path: string): string {
    return `Kubernetes API server ${this.access.server} (${this.access.source}), ${method} ${path}`;
  }

  #send(method: string, path: string, { query, body, contentType, signal }: RequestOptions, limitMs: number): Promise<Response> {
    const { authorization, tls } = this.access.credentials();
    // An error of the HTTP client would quote the header.
    if (authorization !== null && !/^[\x20-\x7e]+$/.test(authorization)) throw new DiscoveryError(`${this.access.source}: the token holds characters that no header can carry`);
    const limit = AbortSignal.timeout(limitMs);
    return fetch(`${this.access.server}${path}${query ? `?${new URLSearchParams(query)}` : ""}`, {
      method,
      headers: { accept: "application/json", ...(authorization && { authorization }), ...(contentType && { "content-type": contentType }) },
      ...(body !== undefined && { body }),
      signal: signal ? AbortSignal.any([signal, limit]) : limit,
      redirect: "manual",
      tls,
      ...(this.access.proxy && { proxy: this.access.proxy }),
    });
  }
}

async function readText(response: Response): Promise<string> {
  const decoder = new TextDecoder();
  let text = "";
  for await (const chunk of response.body ?? []) {
    text += decoder.decode(chunk as Uint8Array, { stream: true });
    if (text.length > MAX_ANSWER) throw new Error(`the answer is larger than ${MAX_ANSWER} bytes`);
  }
  return text + decoder.decode();
}

async function* lines(body: ReadableStream<Uint8Array>): AsyncGenerator<string> {
  const decoder = new TextDecoder();
  let rest = "";
  for await (const chunk of body) {
    rest += decoder.decode(chunk, { stream: true });
    const whole = rest.split("\n");
    rest = whole.pop()!;
    if (rest.length > MAX_EVENT) throw new Error(`an event is larger than ${MAX_EVENT} bytes`);
    for (const line of whole) if (line) yield line;
  }
}
