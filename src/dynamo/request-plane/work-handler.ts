import { logger } from "../../telemetry/log.ts";
import { descriptorLimit } from "../../util/descriptors.ts";
import { within } from "../../util/within.ts";
import { requestFields } from "../../telemetry/trace.ts";
import { TokenItem } from "../protocol/engine-output.ts";
import { errorItem, internal, invalid, ProtocolError, shutdown } from "../protocol/errors.ts";
import type { IncomingRequest } from "./request-plane.ts";
import type { ResponseStream } from "./response-stream.ts";

export type WorkErrorType = "deserialization" | "response_stream" | "generate" | "serialization" | "publish_response" | "publish_final";

/** What the handler reports; one set per endpoint. */
export interface WorkMetrics {
  received(bytes: number, transitSeconds: number | null): void;
  /** The prologue left. */
  answered(seconds: number): void;
  sent(bytes: number): void;
  cancelled(): void;
  failed(type: WorkErrorType): void;
  done(seconds: number): void;
}

export interface WorkContext {
  id: string;
  headers: Record<string, string>;
  metadata: Record<string, unknown>;
  /** Aborted when the frontend cancels and when the worker stops. */
  signal: AbortSignal;
}

/**
 * Produces the items of one answer. A ProtocolError ends the stream with its error item; so must an abort that comes
 * before the answer is complete.
 */
export type Work = (body: unknown, context: WorkContext) => AsyncGenerator<unknown, void, undefined>;

/**
 * Requests that may be in work at once; far above what an engine runs, so that its queue decides. Each holds a connection, and one
 * that was accepted and cannot be answered would leave its client waiting: so no more than a quarter of the descriptors.
 */
export const MAX_IN_FLIGHT = Math.min(10_000, descriptorLimit() >> 2);

const EMPTY = Buffer.alloc(0);
const log = logger("layerscale::dynamo::work_handler");

/** Ids that every log line of a request carries. */
const fieldsOf = ({ control, headers }: IncomingRequest) => requestFields(control.id, headers.traceparent);

/** Nanoseconds since the epoch, as the frontend stamped them; null when absent or nonsense. */
function transitSeconds(headers: Record<string, string>): number | null {
  const stamp = headers["x-frontend-send-ts-ns"];
  if (stamp === undefined || !/^\d{1,19}$/.test(stamp)) return null;
  return Math.max(0, (Date.now() * 1e6 - Number(stamp)) / 1e9);
}

/** Runs the requests of one endpoint, from acknowledgement to the end of their answers. */
export class WorkHandler {
  readonly #running = new Map<Promise<void>, { id: string; stop: AbortController }>();
  #refusal: string | null = null;

  constructor(
    readonly work: Work,
    readonly metrics: WorkMetrics,
    /** Called for each request that is turned away, for want of room or because the worker stops. */
    readonly onReject: (why: "capacity" | "closed") => void = () => {},
    readonly limit = MAX_IN_FLIGHT,
    /** Called with the body of each request that was addressed to this worker and whose work never began; null = of no interest. */
    readonly onAbandoned: ((body: unknown) => void) | null = null,
  ) {}

  get inFlight(): number {
    return this.#running.size;
  }

  /** Takes a request or says why not; never waits. */
  accept = (request: IncomingRequest): { refused: string } | void => {
    if (this.#refusal !== null) {
      this.onReject("closed");
      this.#abandon(request);
      return { refused: this.#refusal };
    }
    if (this.#running.size >= this.limit) {
      this.onReject("capacity");
      this.#abandon(request);
      return { refused: `worker at capacity, ${this.limit} requests in work` };
    }
    this.metrics.received(request.bytes, transitSeconds(request.headers));
    const stop = new AbortController();
    const run = this.#run(request, stop).catch((error: unknown) => log.error("request failed", { ...fieldsOf(request), error }));
    this.#running.set(run, { id: request.control.id, stop });
    void run.then(() => {
      this.#running.delete(run);
      this.metrics.done((performance.now() - request.receivedAt) / 1000);
    });
  };

  /** New requests are refused from now on. */
  close(reason: string): void {
    this.#refusal = reason;
  }

  /** Ends what still runs with an error that another worker may continue from; resolves when all streams are closed or the time is over. */
  async stop(reason: string, timeoutMs: number): Promise<boolean> {
    this.close(reason);
    return this.abortAll(shutdown(reason), timeoutMs);
  }

  /** Ends what runs now with this error; resolves like stop(). What arrives later is served. */
  abortAll(error: ProtocolError, timeoutMs: number): Promise<boolean> {
    for (const { stop } of this.#running.values()) stop.abort(error);
    return this.idle(timeoutMs);
  }

  /** Ends one request with this error; false when there is none with this id. */
  abortRequest(id: string, error: ProtocolError): boolean {
    const found = [...this.#running.values()].filter((running) => running.id === id);
    for (const { stop } of found) stop.abort(error);
    return found.length > 0;
  }

  /** Resolves true when nothing runs. */
  idle(timeoutMs: number): Promise<boolean> {
    return within(Promise.all(this.#running.keys()), timeoutMs);
  }

  async #run(request: IncomingRequest, stop: AbortController): Promise<void> {
    const { control } = request;
    // The acknowledgement leaves before any work.
    await Promise.resolve();
    let stream: ResponseStream;
    try {
      stream = await request.answer();
    } catch (error) {
      this.metrics.failed("response_stream");
      this.#abandon(request);
      log.warn("cannot reach the frontend for an answer", { ...fieldsOf(request), host: control.target.host, port: control.target.port, error });
      return;
    }
    this.metrics.answered((performance.now() - request.receivedAt) / 1000);
    const signal = AbortSignal.any([stream.signal, stop.signal]);
    try {
      await this.#answer(request, stream, signal);
      if (stream.cancelled !== null) {
        this.metrics.cancelled();
        log.debug("request cancelled", { ...fieldsOf(request), reason: stream.cancelled });
      }
    } finally {
      stream.destroy();
    }
  }

  #abandon({ control, body }: IncomingRequest): void {
    if (this.onAbandoned === null) return;
    try {
      this.onAbandoned(control.codec.decode(body));
    } catch (error) {
      log.debug("body of an abandoned request could not be read", { requestId: control.id, error });
    }
  }

  async #answer(request: IncomingRequest, stream: ResponseStream, signal: AbortSignal): Promise<void> {
    const { control } = request;
    const send = (item: unknown) => {
      const bytes = item instanceof TokenItem ? item.encode(control.codec) : control.codec.encode({ data: item, complete_final: false });
      this.metrics.sent(bytes.length);
      return stream.send(bytes);
    };
    let failure: ProtocolError | null = null;
    // A client may have left before its answer was opened.
    if (stream.cancelled !== null) return this.#abandon(request);
    try {
      let body: unknown;
      try {
        body = control.codec.decode(request.body);
        // The bytes of a long prompt need not live as long as its answer.
        request.body = EMPTY;
      } catch (error) {
        this.metrics.failed("deserialization");
        throw invalid(`request body is not ${control.codec.name}: ${(error as Error).message}`);
      }
      for await (const item of this.work(body, { id: control.id, headers: request.headers, metadata: control.metadata, signal })) {
        if (!(await send(item))) break;
      }
    } catch (error) {
      if (error instanceof ProtocolError) failure = error;
      else {
        log.error("request failed", { ...fieldsOf(request), error, stack: (error as Error)?.stack });
        failure = internal(`worker error: ${(error as Error)?.message ?? String(error)}`);
      }
    }
    if (stream.cancelled !== null) return;
    if (failure !== null) await send(errorItem(signal.aborted && signal.reason instanceof ProtocolError ? signal.reason : failure));
    const final = control.codec.encode({ complete_final: true });
    this.metrics.sent(final.length);
    await stream.finish(final);
  }
}
