/**
 * Error items of the response stream. Class decides what the frontend does: InvalidArgument is a 400 without side effects,
 * EngineShutdown lets the request move to another worker and rests this one, WorkerOverloaded moves it without resting.
 */
export type ErrorType = "WorkerOverloaded" | "Unavailable" | { Backend: "InvalidArgument" | "EngineShutdown" | "Unknown" };

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

/** The Annotated layer of a failed stream. */
export function errorItem(error: ProtocolError): unknown {
  return { event: "error", error: { error_type: error.type, message: error.message } };
}

/** A value in an error message: short, and safe for any type. */
export function shown(value: unknown): string {
  if (value === undefined) return "nothing";
  if (value instanceof Uint8Array) return `${value.length} bytes`;
  const text = JSON.stringify(value, (_key, item: unknown) => (typeof item === "bigint" ? item.toString() : item)) ?? typeof value;
  return text.length > 60 ? `${text.slice(0, 57)}...` : text;
}
