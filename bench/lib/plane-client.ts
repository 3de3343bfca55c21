/** A cheap client of completions: raw sockets, events counted and stamped but not parsed, so that the client is not what is measured. */

export interface StreamResult {
  /** Milliseconds of performance.now(). */
  sentAt: number;
  /** When each event with text arrived; tokens of several steps may share an event. */
  eventsAt: number[];
  /** Length of each event's text; only when asked for. */
  textLengths: number[];
  /** As the usage of the answer says. */
  tokens: number;
}

const EVENT = Buffer.from('data: {"');
const TEXT = Buffer.from('"text":"');
const QUOTE = 34;
const LIMIT_MS = 120_000;

/** Distinct prompts: the first token names the request, so no prefix is shared. Ids of plain words. */
export function promptOf(request: number, tokens: number): number[] {
  return Array.from({ length: tokens }, (_, i) => (i === 0 ? firstToken(request) : 1000 + ((request * 31 + i * 17) % 20_000)));
}
/** What the null device's trace calls a request. */
export const firstToken = (request: number): number => 1000 + (request % 40_000);

/** One streamed completion over a connection of its own. @throws Error when it does not end with [DONE] and a usage */
export function stream(port: number, model: string, prompt: number[], maxTokens: number, texts = false): Promise<StreamResult> {
  const body = JSON.stringify({ model, prompt, max_tokens: maxTokens, temperature: 0, stream: true, stream_options: { include_usage: true }, ignore_eos: true });
  const eventsAt: number[] = [];
  const textLengths: number[] = [];
  const { promise, resolve, reject } = Promise.withResolvers<StreamResult>();
  const sentAt = performance.now();
  let rest: Buffer = Buffer.alloc(0);
  let tail = "";
  const timer = setTimeout(() => reject(new Error(`no end of a stream within ${LIMIT_MS} ms`)), LIMIT_MS);
  const ended = () => {
    clearTimeout(timer);
    const tokens = Number(/"completion_tokens":(\d+)/.exec(tail)?.[1] ?? NaN);
    if (!tail.includes("data: [DONE]") || Number.isNaN(tokens)) return reject(new Error(`a stream of ${eventsAt.length} events ended without [DONE] and usage: ${tail.slice(-300)}`));
    // The last one holds the usage and no text.
    eventsAt.pop();
    resolve({ sentAt, eventsAt, textLengths, tokens });
  };
  Bun.connect({
    hostname: "127.0.0.1",
    port,
    socket: {
      open(socket) {
        socket.write(`POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: ${Buffer.byteLength(body)}\r\n\r\n${body}`);
      },
      data(_socket, chunk) {
        const now = performance.now();
        const bytes = rest.length === 0 ? chunk : Buffer.concat([rest, chunk]);
        let at = 0;
        for (let found = bytes.indexOf(EVENT); found >= 0; found = bytes.indexOf(EVENT, at)) {
          if (texts) {
            // The whole event is needed; its end may come with the next read.
            const end = bytes.indexOf("\n", found);
            if (end < 0) break;
            const text = bytes.subarray(found, end).indexOf(TEXT) + TEXT.length + found;
            // The null device's token has no character that JSON escapes.
            if (text < end && text > found + TEXT.length) textLengths.push(bytes.indexOf(QUOTE, text) - text);
          }
          eventsAt.push(now);
          at = found + EVENT.length;
        }
        // An event's first bytes may be split between two reads.
        const keep = texts ? Math.max(at, bytes.lastIndexOf("\n") + 1) : Math.max(at, bytes.length - EVENT.length + 1);
        rest = Buffer.from(bytes.subarray(keep));
        tail = chunk.length >= 2048 ? chunk.toString("latin1", chunk.length - 2048) : tail.slice(-2048) + chunk.toString("latin1");
      },
      close: ended,
      error: (_socket, error) => reject(error),
    },
  }).catch(reject);
  return promise;
}

/** `streams` at once until `requests` are done. */
export async function load(streams: number, requests: number, one: (index: number) => Promise<StreamResult>): Promise<{ results: StreamResult[]; seconds: number }> {
  const results: StreamResult[] = [];
  const begun = performance.now();
  let next = 0;
  await Promise.all(
    Array.from({ length: streams }, async () => {
      while (next < requests) results.push(await one(next++));
    }),
  );
  return { results, seconds: (performance.now() - begun) / 1000 };
}
