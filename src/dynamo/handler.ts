import { EngineError } from "../engine/errors.ts";
import type { GenerateRequest, StepOutput, TokenLogprob } from "../engine/types.ts";
import type { GenerationDefaults } from "../model/types.ts";
import { logger } from "../telemetry/log.ts";
import type { EngineMetrics, Outcome } from "../telemetry/metrics.ts";
import { requestFields } from "../telemetry/trace.ts";
import type { Role } from "./disaggregation/role.ts";
import { completionUsage, type EngineOutput, logprobFields, outputItem, TokenItem } from "./protocol/engine-output.ts";
import { internal, invalid, isRefusal, ProtocolError, shutdown } from "./protocol/errors.ts";
import { unknownFields } from "./protocol/fields.ts";
import { parseRequest, type PreprocessedRequest } from "./protocol/preprocessed-request.ts";
import type { Work, WorkContext } from "./request-plane/work-handler.ts";

/** The part of the engine that answering needs. */
export interface GeneratingEngine {
  generate(request: GenerateRequest, signal?: AbortSignal): AsyncGenerator<StepOutput>;
}

/** Token ids to text and stop strings, for answers whose tokens are held back until the end. */
export interface StopDetector {
  /** True once the text holds a stop string. */
  push(ids: readonly number[]): boolean;
}

export interface HandlerOptions {
  engine: GeneratingEngine;
  defaults: GenerationDefaults;
  role: Role;
  stopDetector: (stops: readonly string[], skipSpecialTokens: boolean) => StopDetector;
  metrics: Pick<EngineMetrics, "startRequest" | "countRequest" | "transfer">;
  /** The engine is gone: unfinished answers may continue elsewhere. */
  engineFailed: () => string | null;
}

/** Value of the route label in layerscale_requests_total. */
export const ROUTE = "dynamo";
/** Unknown wire fields are named once each, and never more than this many. */
const MAX_LOGGED_FIELDS = 100;
/** Above every priority that a client can ask for (int32): a health check that waits behind a full batch says nothing about health. */
const PROBE_PRIORITY = 2 ** 31;

const log = logger("layerscale::dynamo::handler");

/** 64-bit id of a salt's cache domain: XXH3 with seed 1, the term by which Dynamo's router salts its block hashes. */
export const cacheDomain = (salt: string): bigint => (salt === "" ? 0n : (Bun.hash.xxHash3(salt, 1n) as bigint));

/** Fields that Dynamo may add in a later release are tolerated, and said once. */
function fieldLogger(): (body: unknown) => void {
  const seen = new Set<string>();
  return (body) => {
    if (seen.size >= MAX_LOGGED_FIELDS || typeof body !== "object" || body === null) return;
    unknownFields(body as Record<string, unknown>, (path) => {
      if (seen.has(path) || seen.size >= MAX_LOGGED_FIELDS) return;
      seen.add(path);
      log.warn("request field is not known to this version and has no effect", { field: path.slice(0, 100) });
    });
  };
}

function engineRequest(request: PreprocessedRequest, id: string, defaults: GenerationDefaults): GenerateRequest {
  return {
    id,
    promptTokenIds: request.tokenIds,
    sampling: {
      temperature: request.temperature ?? defaults.temperature ?? 1,
      topP: request.topP ?? defaults.topP ?? 1,
      seed: request.seed,
      maxTokens: request.maxTokens,
      ignoreEos: request.ignoreEos,
      logprobs: request.logprobs,
    },
    eosTokenIds: request.eosTokenIds,
    stopTokenIds: request.stopTokenIds,
    priority: request.healthCheck ? PROBE_PRIORITY : request.priority,
    cacheDomain: cacheDomain(request.cacheSalt),
    internal: request.healthCheck,
  };
}

/** The work of the generate endpoint. A health check, and what the router wants run whole, runs in any role. */
export function generateHandler(options: HandlerOptions): Work {
  const logUnknown = fieldLogger();
  return async function* (body: unknown, context: WorkContext) {
    const isProbe = typeof body === "object" && body !== null && (body as Record<string, unknown>)._HEALTH_CHECK === true;
    if (!isProbe) options.metrics.startRequest();
    let outcome: Outcome = "failed";
    const fields = requestFields(context.id, context.headers.traceparent);
    log.debug("request received", fields);
    let admitted = false;
    /** A staged copy that the frontend has not been told of. */
    let untold: bigint | null = null;
    try {
      logUnknown(body);
      const request = parseRequest(body);
      const part = options.role.part(request, body, context.id);
      const answer = part.stage ? new HandOver(options.role) : request.logprobs === null ? new StreamedAnswer(request) : new HeldBackAnswer(request, options.stopDetector);
      // One generator, not one that delegates to another: each of them costs several turns of the microtask queue for every token.
      for await (const step of options.engine.generate({ ...engineRequest(request, context.id, options.defaults), ...part }, context.signal)) {
        admitted = true;
        if (step.finishReason === "error" || step.finishReason === "cancelled") throw unfinished(step, options);
        untold = step.staged ?? null;
        const item = answer.take(step);
        if (item !== null) yield item;
        untold = null;
        if (!answer.complete) continue;
        outcome = "ok";
        return;
      }
      throw shutdown("the engine ended the request");
    } catch (error) {
      if (!admitted) options.role.abandoned(body);
      if (clientLeft(context)) outcome = "cancelled";
      const failure = protocolError(error);
      if (outcome === "failed") log[levelOf(failure)]("request failed", { ...fields, error: failure });
      throw failure;
    } finally {
      if (untold !== null) options.role.withdraw(untold);
      // A consumer that stops early (its socket is gone) ends the generator without an error.
      if (outcome === "failed" && clientLeft(context)) outcome = "cancelled";
      if (!isProbe) options.metrics.countRequest(ROUTE, outcome);
      log.debug("request ended", { ...fields, outcome });
    }
  };
}

/** Aborted by the frontend, not because this worker stops: only that is the client's doing. */
const clientLeft = ({ signal }: WorkContext): boolean => signal.aborted && !(signal.reason instanceof ProtocolError);

function protocolError(error: unknown): unknown {
  if (!(error instanceof EngineError)) return error;
  // The text names the field, its value and what was expected.
  if (error.kind === "invalid") return invalid(error.message);
  return error.kind === "unavailable" ? shutdown(error.message) : shutdown(`engine failure: ${error.message}`);
}

/** A request's own fault is no news for whoever runs the worker; overload is, without being a fault. */
function levelOf(error: unknown): "debug" | "warn" | "error" {
  if (!(error instanceof ProtocolError)) return "error";
  return isRefusal(error) ? "debug" : error.type === "Unavailable" ? "warn" : "error";
}

/** Why a step that ends a request without an answer does so. */
function unfinished(step: StepOutput, options: HandlerOptions): ProtocolError {
  if (step.refusal === "overloaded") {
    options.metrics.transfer.overloaded();
    // The class that the frontend answers with 503 in the prefill leg, without resting the worker.
    return new ProtocolError("Unavailable", `prefill worker overloaded: ${step.error}`);
  }
  if (step.refusal === "layout") return internal(`the KV of the prefill worker does not fit this decode worker: ${step.error}`);
  const failed = options.engineFailed();
  if (failed !== null) return shutdown(`engine failure: ${failed}`);
  return step.finishReason === "error" ? internal(step.error ?? "engine error") : shutdown("the engine ended the request");
}

const wireReason = (step: StepOutput, eos: readonly number[]): NonNullable<EngineOutput["finish_reason"]> =>
  step.finishReason === "length" ? "length" : step.stopTokenId !== null && eos.includes(step.stopTokenId) ? "eos" : "stop";

/** Turns what the engine's steps produce for one request into the items of its answer. */
interface Answer {
  /** Nothing follows the item that was taken last. */
  readonly complete: boolean;
  /** The item to send after this step; null for none. */
  take(step: StepOutput): unknown;
}

/** One item per engine step; pulled only as fast as the socket takes them. */
class StreamedAnswer implements Answer {
  complete = false;
  constructor(private readonly request: PreprocessedRequest) {}

  take(step: StepOutput): unknown {
    if (step.finishReason === null) return step.tokenIds.length > 0 ? new TokenItem(step.tokenIds) : null;
    this.complete = true;
    return outputItem({ token_ids: step.tokenIds, finish_reason: wireReason(step, this.request.eosTokenIds), completion_usage: completionUsage(step.usage) });
  }
}

/** The single item of a prompt that another worker goes on with. */
class HandOver implements Answer {
  complete = false;
  constructor(private readonly role: Role) {}

  take(step: StepOutput): unknown {
    if (step.finishReason === null) return null;
    this.complete = true;
    return this.role.answer(step);
  }
}

/**
 * With logprobs all tokens travel in the final item. The frontend sees none before, so the worker itself stops at a stop
 * string: at the token that completes it, where the frontend then cuts.
 */
class HeldBackAnswer implements Answer {
  complete = false;
  readonly #ids: number[] = [];
  readonly #logprobs: TokenLogprob[] = [];
  readonly #stops: StopDetector | null;

  constructor(
    private readonly request: PreprocessedRequest,
    stopDetector: HandlerOptions["stopDetector"],
  ) {
    this.#stops = request.stop.length > 0 ? stopDetector(request.stop, request.skipSpecialTokens) : null;
  }

  take(step: StepOutput): unknown {
    const stepLogprobs = step.logprobs ?? [];
    if (stepLogprobs.length !== step.tokenIds.length) throw internal(`engine gave ${stepLogprobs.length} logprobs for ${step.tokenIds.length} tokens`);
    let stopped = false;
    for (let i = 0; i < step.tokenIds.length && !stopped; i++) {
      const id = step.tokenIds[i]!;
      this.#ids.push(id);
      this.#logprobs.push(stepLogprobs[i]!);
      // The end token has no text that could complete a stop string.
      stopped = id !== step.stopTokenId && this.#stops !== null && this.#stops.push([id]);
    }
    if (!stopped && step.finishReason === null) return null;
    this.complete = true;
    return outputItem({
      token_ids: this.#ids,
      ...logprobFields(this.#logprobs),
      finish_reason: stopped ? "stop" : wireReason(step, this.request.eosTokenIds),
      completion_usage: completionUsage(step.usage, this.#ids.length),
    });
  }
}
