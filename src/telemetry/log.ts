/** Engine log lines: one JSON object per line on stderr, the same under every subcommand. */
import { DEFAULT_FILTER, type LogFilter, type LogLevel, thresholdOf, verbosity } from "../util/log-filter.ts";

export type { LogLevel } from "../util/log-filter.ts";

let filter: LogFilter = DEFAULT_FILTER;
/** Verbosity per target under the current filter. */
const limits = new Map<string, number>();
let sink: (line: string) => void = (line) => void process.stderr.write(line + "\n");

/** Holds for every logger, those made before included. */
export function setLogFilter(next: LogFilter): void {
  filter = next;
  limits.clear();
}
/** Tests read lines instead of parsing stderr. */
export function setLogSink(write: (line: string) => void): void {
  sink = write;
}

type Fields = Record<string, unknown>;

export interface Logger {
  trace(message: string, fields?: Fields): void;
  debug(message: string, fields?: Fields): void;
  info(message: string, fields?: Fields): void;
  warn(message: string, fields?: Fields): void;
  error(message: string, fields?: Fields): void;
}

/** 64-bit ids are written as decimal strings; errors as their message. */
function plain(_key: string, value: unknown): unknown {
  if (typeof value === "bigint") return value.toString();
  if (value instanceof Error) return value.message;
  return value;
}

function limit(target: string): number {
  const known = limits.get(target);
  if (known !== undefined) return known;
  const found = verbosity(thresholdOf(filter, target));
  limits.set(target, found);
  return found;
}

/**
 * `{"time","level","target","message", …fields}`; lines of a request carry requestId, and traceId and spanId when it came with a trace.
 * @param target path of the part that speaks, "layerscale::part"
 */
export function logger(target: string): Logger {
  const at = (level: LogLevel) => (message: string, fields?: Fields) => {
    if (verbosity(level) > limit(target)) return;
    sink(JSON.stringify({ time: new Date().toISOString(), level, target, message, ...fields }, plain));
  };
  return { trace: at("trace"), debug: at("debug"), info: at("info"), warn: at("warn"), error: at("error") };
}
