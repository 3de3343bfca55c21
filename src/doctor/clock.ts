import { fail, type Findings, warn } from "./findings.ts";

/** What the other clock was, and when ours was read. Milliseconds since the epoch. */
export interface Reading {
  /** Whose clock it is. */
  source: string;
  theirs: number;
  ours: number;
  /** How exactly theirs is told. */
  exactMs: number;
}

/** Above these, in seconds. Records in a directory live for 10 s by the clock of whoever looks; tokens and certificates allow more. */
export interface Tolerance {
  warn: number;
  fail: number;
}
export const DIRECTORY: Tolerance = { warn: 2, fail: 5 };
export const SERVER: Tolerance = { warn: 5, fail: 60 };

export async function clockCheck(findings: Findings, reading: Reading | null, tolerance: Tolerance, why: string): Promise<void> {
  if (reading === null) return findings.skip(why, "clock");
  await findings.check("clock", () => {
    const { source, theirs, ours, exactMs } = reading;
    // The head of an answer has whole seconds.
    const off = Math.max(0, Math.abs(ours - theirs - exactMs / 2) - exactMs / 2) / 1000;
    const text = `this machine's clock is ${off.toFixed(1)} s ${ours > theirs ? "ahead of" : "behind"} that of ${source}`;
    const advice = "let both take their time from the same server (NTP)";
    if (off > tolerance.fail) throw fail(text, advice);
    if (off > tolerance.warn) throw warn(text, advice);
    return off < 1 ? `agrees with ${source} to the second` : text;
  });
}

/** The Date of an answer; null when there is none. */
export function readingOf(response: Response, source: string): Reading | null {
  const theirs = Date.parse(response.headers.get("date") ?? "");
  return Number.isNaN(theirs) ? null : { source, theirs, ours: Date.now(), exactMs: 1000 };
}
