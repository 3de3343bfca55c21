/** Running streams and long prompts of the disaggregation benchmark. */

export interface Running {
  /** performance.now() of each event with text. */
  arrivals: number[];
  /** Begun: its second event has come. */
  begun: Promise<void>;
  done: Promise<void>;
}

const LIMIT_MS = 300_000;
const BEGUN_EVENTS = 2;

/** One streamed completion; ends early, without an error, when the signal aborts. @throws Error (in `done`) for an error status or event */
export function run(base: string, model: string, prompt: number[], maxTokens: number, signal: AbortSignal): Running {
  const arrivals: number[] = [];
  const { promise: begun, resolve: begin, reject } = Promise.withResolvers<void>();
  const read = async () => {
    const response = await fetch(`${base}/v1/completions`, {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: JSON.stringify({ model, prompt, max_tokens: maxTokens, temperature: 0, stream: true, ignore_eos: true }),
      signal: AbortSignal.any([signal, AbortSignal.timeout(LIMIT_MS)]),
    });
    if (!response.ok || !response.body) throw new Error(`HTTP ${response.status}: ${(await response.text()).slice(0, 200)}`);
    const decoder = new TextDecoder();
    let pending = "";
    for await (const bytes of response.body) {
      const now = performance.now();
      const lines = (pending + decoder.decode(bytes, { stream: true })).split("\n");
      pending = lines.pop() ?? "";
      for (const line of lines) {
        if (!line.startsWith("data: {")) continue;
        const event = JSON.parse(line.slice(6)) as { choices?: { text?: string }[]; error?: unknown };
        if (event.error) throw new Error(JSON.stringify(event.error));
        if (event.choices?.[0]?.text) arrivals.push(now);
        if (arrivals.length === BEGUN_EVENTS) begin();
      }
    }
  };
  const done = read().catch((error: unknown) => {
    reject(error);
    if (!signal.aborted) throw error;
  });
  begun.catch(() => {});
  return { arrivals, begun, done };
}

/** The longest time between two events of any stream within [from, to], which may begin before it. */
export function worstGap(streams: Running[], from: number, to: number): number {
  let worst = 0;
  for (const { arrivals } of streams)
    for (let i = 1; i < arrivals.length; i++) if (arrivals[i]! >= from && arrivals[i - 1]! <= to) worst = Math.max(worst, arrivals[i]! - arrivals[i - 1]!);
  return worst;
}
