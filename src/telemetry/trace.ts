/** Ids of a W3C trace context, for log lines. */
export interface TraceContext {
  /** 32 hex digits, the same in every service that the request passes. */
  traceId: string;
  /** 16 hex digits: the caller's span. */
  spanId: string;
}

const TRACEPARENT = /^(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}(?:-|$)/;
const ZERO = /^0+$/;

/** Reads a `traceparent` header; null when it is absent or not one, since a broken trace must never cost a request. */
export function parseTraceparent(header: string | null | undefined): TraceContext | null {
  const found = TRACEPARENT.exec(header?.trim() ?? "");
  if (!found) return null;
  const [, traceId, spanId] = found as unknown as [string, string, string];
  return ZERO.test(traceId) || ZERO.test(spanId) ? null : { traceId, spanId };
}

/** What every log line of a request carries. */
export function requestFields(requestId: string, traceparent: string | null | undefined): Record<string, unknown> {
  return { requestId, ...parseTraceparent(traceparent) };
}
