/** One streamed completion and the measures made of it. */
import type { RunningServer } from "./server.ts";

export interface StreamTimes {
  /** Milliseconds from sending to the first token. */
  firstMs: number;
  /** Milliseconds from sending to the last token. */
  lastMs: number;
  tokens: number;
  cachedTokens: number | null;
  /** Milliseconds between successive chunks. */
  gaps: number[];
}

const REQUEST_LIMIT_MS = 300_000;

/** Distinct prompts of exactly n tokens: ids of ordinary words (never control tokens), by a seeded generator. */
export function tokenPrompt(n: number, seed: number): number[] {
  let state = (seed * 2654435761 + 12345) >>> 0;
  return Array.from({ length: n }, () => {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
    return 1000 + (state >>> 8) % 40_000;
  });
}

/** For servers that take text only: about n tokens of words no other prompt starts with. */
function textPrompt(n: number, seed: number): string {
  return tokenPrompt(n, seed).map((id) => ` w${id}`).slice(0, Math.max(1, Math.floor(n / 4))).join("");
}

export async function complete(server: RunningServer, promptTokens: number[], maxTokens: number): Promise<StreamTimes> {
  const prompt = server.tokenPrompts ? promptTokens : textPrompt(promptTokens.length, promptTokens[0] ?? 0);
  const sent = performance.now();
  const response = await fetch(`${server.base}/v1/completions`, {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify({ model: server.model, prompt, max_tokens: maxTokens, temperature: 0, stream: true, stream_options: { include_usage: true }, ...server.forceLength }),
    signal: AbortSignal.timeout(REQUEST_LIMIT_MS),
  });
  if (!response.ok || !response.body) throw new Error(`${server.name}: HTTP ${response.status} ${(await response.text()).slice(0, 200)}`);
  const times: StreamTimes = { firstMs: NaN, lastMs: NaN, tokens: 0, cachedTokens: null, gaps: [] };
  const decoder = new TextDecoder();
  let pending = "";
  for await (const bytes of response.body) {
    const now = performance.now() - sent;
    pending += decoder.decode(bytes, { stream: true });
    const lines = pending.split("\n");
    pending = lines.pop() ?? "";
    for (const line of lines) {
      if (!line.startsWith("data: ") || line === "data: [DONE]") continue;
      const event = JSON.parse(line.slice(6)) as { choices?: { text?: string }[]; usage?: { completion_tokens: number; prompt_tokens_details?: { cached_tokens?: number } | null } };
      if (event.choices?.length) {
        if (Number.isNaN(times.firstMs)) times.firstMs = now;
        else times.gaps.push(now - times.lastMs);
        times.lastMs = now;
      }
      if (event.usage) {
        times.tokens = event.usage.completion_tokens;
        times.cachedTokens = event.usage.prompt_tokens_details?.cached_tokens ?? null;
      }
    }
  }
  if (times.tokens < maxTokens) throw new Error(`${server.name}: ${times.tokens} of ${maxTokens} tokens; its figures would not be comparable`);
  return times;
}

export interface Measure {
  name: string;
  unit: string;
  /** Larger or smaller is better. */
  better: "more" | "less";
  /** One sample; seed is the same for every server of a round. */
  sample(server: RunningServer, seed: number): Promise<number>;
}

export const decodeRate = (tokens: number): Measure => ({
  name: "decode, 1 stream",
  unit: "tok/s",
  better: "more",
  sample: async (server, seed) => {
    const t = await complete(server, tokenPrompt(32, seed), tokens);
    return (t.tokens - 1) / ((t.lastMs - t.firstMs) / 1000);
  },
});

export const prefillRate = (n: number): Measure => ({
  name: `prefill ${n}`,
  unit: "tok/s",
  better: "more",
  sample: async (server, seed) => n / ((await complete(server, tokenPrompt(n, seed), 1)).firstMs / 1000),
});

/** The same prefix twice with different endings; the second's time to first token. */
export const cachedFirstToken = (n: number): Measure => ({
  name: `first token, ${n}-token prefix cached`,
  unit: "ms",
  better: "less",
  sample: async (server, seed) => {
    const prefix = tokenPrompt(n, seed);
    await complete(server, [...prefix, 1001, 1002, 1003], 1);
    return (await complete(server, [...prefix, 2001, 2002, 2003], 1)).firstMs;
  },
});

export const concurrent = (streams: number, requests: number, promptTokens: number, tokens: number): Measure => ({
  name: `${streams} streams`,
  unit: "tok/s",
  better: "more",
  sample: async (server, seed) => {
    const begun = performance.now();
    let next = 0;
    let made = 0;
    const worker = async () => {
      while (next < requests) {
        const { tokens: count } = await complete(server, tokenPrompt(promptTokens, seed * 1000 + next++), tokens);
        made += count;
      }
    };
    await Promise.all(Array.from({ length: streams }, worker));
    return made / ((performance.now() - begun) / 1000);
  },
});

/** Decode rate beside programs that keep cores busy, as a share of the quiet rate. */
export const besideBusyCores = (cores: number, tokens: number): Measure => ({
  name: `decode beside ${cores} busy core${cores > 1 ? "s" : ""}`,
  unit: "of quiet",
  better: "more",
  sample: async (server, seed) => {
    const quiet = await decodeRate(tokens).sample(server, seed);
    // Bounded even if this process dies: each hog ends by itself.
    const hogs = Array.from({ length: cores }, () => Bun.spawn([process.execPath, "-e", "const end = Date.now() + 60000; while (Date.now() < end);"], { env: { ...process.env, BUN_BE_BUN: "1" } }));
    try {
      return (await decodeRate(tokens).sample(server, seed + 1)) / quiet;
    } finally {
      for (const hog of hogs) hog.kill("SIGKILL");
      await Promise.all(hogs.map((hog) => hog.exited));
    }
  },
});
