/** Engine log lines: one JSON object per line on stderr, the same under every subcommand. */
export type LogLevel = "trace" | "debug" | "info" | "warn" | "error";
const ORDER: Record<LogLevel, number> = { trace: 0, debug: 1, info: 2, warn: 3, error: 4 };

let threshold: LogLevel = "info";
let sink: (line: string) => void = (line) => void process.stderr.write(line + "\n");

export function setLogLevel(level: LogLevel): void {
  threshold = level;
}
/** Tests read lines instead of parsing stderr. */
export function setLogSink(write: (line: string) => void): void {
  sink = write;
}

export interface Logger {
  trace(message: string, fields?: Record<string, unknown>): void;
  debug(message: string, fields?: Record<string, unknown>): void;
  info(message: string, fields?: Record<string, unknown>): void;
  warn(message: string, fields?: Record<string, unknown>): void;
  error(message: string, fields?: Record<string, unknown>): void;
}

/** 64-bit ids are written as decimal strings; errors as their message. */
function plain(_key: string, value: unknown): unknown {
  if (typeof value === "bigint") return value.toString();
  if (value instanceof Error) return value.message;
  return value;
}

export function logger(target: string): Logger {
  const at = (level: LogLevel) => (message: string, fields?: Record<string, unknown>) => {
    if (ORDER[level] < ORDER[threshold]) return;
    sink(JSON.stringify({ time: new Date().toISOString(), level, target, message, ...fields }, plain));
  };
  return { trace: at("trace"), debug: at("debug"), info: at("info"), warn: at("warn"), error: at("error") };
}
