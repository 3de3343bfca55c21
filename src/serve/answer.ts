import { EngineError } from "../engine/errors.ts";
import type { Outcome } from "../telemetry/metrics.ts";
import { logger } from "../telemetry/log.ts";
import { requestFields } from "../telemetry/trace.ts";
import type { RequestContext } from "./app.ts";
import { ClientGone, errorObject, toHttpError } from "./http-errors.ts";
import type { ActiveRequest } from "./requests.ts";
import { sseResponse } from "./sse.ts";

const log = logger("layerscale::serve");

export interface Job {
  /** Route label of the metrics. */
  route: string;
  /** The field to blame when the engine refuses the prompt. */
  promptParam: string;
  /** Exactly one of the two. Both end their sequences when the signal is aborted. */
  whole?: (signal: AbortSignal) => Promise<unknown>;
  frames?: (signal: AbortSignal) => AsyncGenerator<unknown, void>;
}

/**
 * Reads what a request asks for. A refusal is a request that ended as failed: clients' mistakes show in the same counters as under Dynamo.
 * @throws whatever `read` throws
 */
export async function readRequest<T>({ app }: RequestContext, route: string, read: () => T | Promise<T>): Promise<T> {
  try {
    return await read();
  } catch (error) {
    app.metrics.startRequest();
    app.metrics.countRequest(route, "failed");
    throw error;
  }
}

/** Runs a generation for one HTTP request: counted once, ended when the client leaves. */
export async function answer(context: RequestContext, job: Job): Promise<Response> {
  context.idleLimit(false);
  const active = context.app.requests.begin(job.route, context.request.signal);
  const fail = (error: unknown) => {
    report(error, context);
    active.end(outcomeOfError(error));
    context.idleLimit(true);
    // Sequences of the same request that have not failed are of no use any more.
    active.abort(new ClientGone("the request has ended"));
  };
  try {
    if (job.whole) {
      const body = await job.whole(active.signal);
      active.end("ok");
      context.idleLimit(true);
      return Response.json(body);
    }
    const frames = (job.frames as NonNullable<Job["frames"]>)(active.signal);
    // Nothing is sent before the first output, so that a refusal or failure until then is a plain HTTP error.
    const first = await frames.next();
    return sseResponse(counted(first, frames, active, context, fail), {
      onCancel: () => active.abort(new ClientGone("the client stopped reading")),
      onError: (error) => (error instanceof ClientGone ? null : { error: errorObject(toHttpError(error, job.promptParam)) }),
    });
  } catch (error) {
    fail(error);
    throw error instanceof ClientGone ? error : toHttpError(error, job.promptParam);
  }
}

/** Counts a stream on every way it can end: ok at its end, by the error when it fails, cancelled when it is left. */
async function* counted(first: IteratorResult<unknown, void>, rest: AsyncGenerator<unknown, void>, active: ActiveRequest, context: RequestContext, fail: (error: unknown) => void): AsyncGenerator<unknown, void> {
  try {
    if (!first.done) yield first.value;
    yield* rest;
    active.end("ok");
    context.idleLimit(true);
  } catch (error) {
    fail(error);
    throw error;
  } finally {
    active.end("cancelled");
  }
}

const outcomeOfError = (error: unknown): Outcome => (error instanceof ClientGone ? "cancelled" : "failed");

function report(error: unknown, { requestId, request }: RequestContext): void {
  const fields = requestFields(requestId, request.headers.get("traceparent"));
  if (error instanceof ClientGone) return log.debug("client left", fields);
  if (toHttpError(error, "").status !== 500) return;
  log.error("request failed", { ...fields, error, ...(!(error instanceof EngineError) && { stack: (error as Error).stack }) });
}
