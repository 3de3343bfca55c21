/**
 * Error items of the response stream. Class decides what the frontend does: InvalidArgument is a 400 without side effects,
 * EngineShutdown lets the request move to another worker and rests this one, WorkerOverloaded moves it without resting.
 */
export type ErrorType = "WorkerOverloaded" | "Unavailable" | "Cancelled" | { Backend: "InvalidArgument" | "EngineShutdown" | "Unknown" };

/** Ends a request's stream with a typed error item. */
export class ProtocolError extends Error {
  override name = "ProtocolError";
  constructor(
    readonly type: ErrorType,
    message: string,
  ) {
    super(message);
  }
}

/** The request can never be served as it is: HTTP 400. */
export const invalid = (message: string): ProtocolError => new ProtocolError({ Backend: "InvalidArgument" }, message);
/** This worker goes away; another one may continue the request. */
export const shutdown = (message: string): ProtocolError => new ProtocolError({ Backend: "EngineShutdown" }, message);
/** Anything else: HTTP 500, not retried. */
export const internal = (message: string): ProtocolError => new ProtocolError({ Backend: "Unknown" }, message);

/** The request's own fault: what it says is meant for the client. */
export const isRefusal = ({ type }: ProtocolError): boolean => typeof type === "object" && type.Backend === "InvalidArgument";

/** The Annotated layer of a failed stream. Frontends from 1.6 on show a client only what is marked as public; older ones ignore the mark. */
export function errorItem(error: ProtocolError): unknown {
  const told = { error_type: error.type, message: error.message };
  return { event: "error", error: isRefusal(error) ? { ...told, public: { type: "message", message: error.message } } : told };
}

/** A value in an error message: short, and safe for any type. Numbers that JSON cannot write are shown as they are. */
export function shown(value: unknown): string {
  if (value === undefined) return "nothing";
  if (typeof value === "number" || typeof value === "bigint") return String(value);
  if (value instanceof Uint8Array) return `${value.length} bytes`;
  const text = JSON.stringify(value, (_key, item: unknown) => (typeof item === "bigint" ? item.toString() : item)) ?? typeof value;
  return text.length > 60 ? `${text.slice(0, 57)}...` : text;
}
