/** Streamed answers that something happens to while they run. */
import { eventually } from "../../support/launch.ts";
import { type Deployment, LIMIT_MS, readEvents, type Worker } from "./support.ts";

export interface Streamed {
  text: string;
  finish: string | null;
  usage: Record<string, any> | null;
  error: unknown;
  done: boolean;
}

/** What a client makes of the bytes of a streamed completion. */
export function parseStream(sse: string): Streamed {
  const answer: Streamed = { text: "", finish: null, usage: null, error: null, done: false };
  for (const line of sse.split("\n")) {
    if (line === "data: [DONE]") answer.done = true;
    else if (line.startsWith("data: {")) {
      const event = JSON.parse(line.slice(6)) as Record<string, any>;
      answer.text += event.choices?.[0]?.text ?? "";
      answer.finish = event.choices?.[0]?.finish_reason ?? answer.finish;
      answer.usage = event.usage ?? answer.usage;
      answer.error = event.error ?? answer.error;
    }
  }
  return answer;
}

/** A stream under way, and the worker that makes it. */
export async function streamOn(d: Deployment, prompt: string, maxTokens: number, fields: Record<string, unknown> = {}): Promise<{ worker: Worker; rest: () => Promise<Streamed> }> {
  await Promise.all(d.workers.filter((worker) => worker.process.running).map((worker) => worker.idle()));
  const response = await d.request("completions", prompt, { max_tokens: maxTokens, ignore_eos: true, stream: true, ...fields });
  if (response.status !== 200) throw new Error(`status ${response.status}: ${await response.text()}`);
  const { rest } = await readEvents(response, 4);
  const worker = await eventually(async () => {
    for (const candidate of d.workers) if (candidate.process.running && ((await candidate.metric("layerscale_requests_running")) ?? 0) > 0) return candidate;
    return null;
  }, "one worker runs the request", LIMIT_MS);
  return { worker, rest: async () => parseStream(await rest()) };
}
