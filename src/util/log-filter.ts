/** Which log lines are written: the grammar of DYN_LOG, which is that of Rust's tracing targets. */
export type LogLevel = "trace" | "debug" | "info" | "warn" | "error";

/** Least level written; "off" = none. */
export type LogThreshold = LogLevel | "off";

const LEVELS: readonly LogThreshold[] = ["off", "error", "warn", "info", "debug", "trace"];
/** Higher is more talkative. */
export const verbosity = (level: LogThreshold): number => LEVELS.indexOf(level);

export interface LogFilter {
  /** For targets that no directive names. */
  fallback: LogThreshold;
  /** A directive holds for its target and everything below it ("a::b" for "a::b::c"). */
  targets: ReadonlyMap<string, LogThreshold>;
}

export const DEFAULT_FILTER: LogFilter = { fallback: "info", targets: new Map() };

const TARGET = /^[A-Za-z0-9_:.{}-]+$/;
/** A word alone that looks like a module; any other is taken for a misspelt level, which would silence everything. */
const PATH = /[_:]|^layerscale$/;

/** "warn" and its number 2 are the same; null for anything else. */
function threshold(text: string): LogThreshold | null {
  const word = text.trim().toLowerCase();
  return (/^[0-5]$/.test(word) ? LEVELS[Number(word)] : LEVELS.find((level) => level === word)) ?? null;
}

/**
 * Reads a comma-separated list of `level`, `target=level` and `target` (all of its lines). Without a plain level, targets that are not
 * named are off, as in Dynamo. Selectors of spans and fields, `[…]`, choose among spans, of which there are none here: they are left out
 * and named in `ignored`.
 * @returns the first directive that is none of these, as text, when there is one
 */
export function parseLogFilter(text: string): { filter: LogFilter; ignored: string[] } | { bad: string } {
  const directives = text.split(",").map((item) => item.trim()).filter((item) => item !== "");
  if (directives.length === 0) return { filter: DEFAULT_FILTER, ignored: [] };
  let fallback: LogThreshold | null = null;
  const targets = new Map<string, LogThreshold>();
  const ignored: string[] = [];
  for (const directive of directives) {
    if (directive.includes("[")) {
      ignored.push(directive);
      continue;
    }
    const at = directive.lastIndexOf("=");
    const level = threshold(at < 0 ? directive : directive.slice(at + 1));
    const target = at < 0 ? directive : directive.slice(0, at).trim();
    if (at < 0 && level !== null) fallback = level;
    else if ((at >= 0 && level === null) || !TARGET.test(target) || (at < 0 && !PATH.test(target))) return { bad: directive };
    else targets.set(target, level ?? "trace");
  }
  return { filter: { fallback: fallback ?? (targets.size > 0 ? "off" : "info"), targets }, ignored };
}

/** The longest directive that covers the target decides. */
export function thresholdOf(filter: LogFilter, target: string): LogThreshold {
  for (let name = target; name !== ""; name = name.includes("::") ? name.slice(0, name.lastIndexOf("::")) : "") {
    const level = filter.targets.get(name);
    if (level !== undefined) return level;
  }
  return filter.fallback;
}
