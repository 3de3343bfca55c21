import { EngineError } from "../engine/errors.ts";
import type { GenerateRequest, StepOutput, TokenLogprob } from "../engine/types.ts";
import type { GenerationDefaults } from "../model/types.ts";
import { logger } from "../telemetry/log.ts";
import type { EngineMetrics, Outcome } from "../telemetry/metrics.ts";
import { completionUsage, type EngineOutput, logprobFields, outputItem } from "./protocol/engine-output.ts";
import { internal, invalid, ProtocolError, shutdown } from "./protocol/errors.ts";
import { parseRequest, type PreprocessedRequest, unknownFields } from "./protocol/preprocessed-request.ts";
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
  stopDetector: (stops: readonly string[], skipSpecialTokens: boolean) => StopDetector;
  metrics: Pick<EngineMetrics, "startRequest" | "countRequest">;
  /** The engine is gone: unfinished answers may continue elsewhere. */
  engineFailed: () => string | null;
}

/** Value of the route label in layerscale_requests_total. */
export const ROUTE = "dynamo";
/** Unknown wire fields are named once each, and never more than this many. */
const MAX_LOGGED_FIELDS = 100;

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
    priority: request.priority,
    cacheDomain: cacheDomain(request.cacheSalt),
    internal: request.healthCheck,
  };
}

/** The work of the generate endpoint of an aggregated worker. */
export function generateHandler(options: HandlerOptions): Work {
  const logUnknown = fieldLogger();
  return async function* (body: unknown, context: WorkContext) {
    const isProbe = typeof body === "object" && body !== null && (body as Record<string, unknown>)._HEALTH_CHECK === true;
    if (!isProbe) options.metrics.startRequest();
    let outcome: Outcome = "failed";
    try {
      logUnknown(body);
      const request = parseRequest(body);
      const answer = request.logprobs === null ? streamed : heldBack;
      yield* answer(request, context, options);
      outcome = "ok";
    } catch (error) {
      if (context.signal.aborted) outcome = "cancelled";
      throw protocolError(error);
    } finally {
      // A consumer that stops early (its socket is gone) ends the generator without an error.
      if (outcome === "failed" && context.signal.aborted) outcome = "cancelled";
      if (!isProbe) options.metrics.countRequest(ROUTE, outcome);
    }
  };
}

function protocolError(error: unknown): unknown {
  if (!(error instanceof EngineError)) return error;
  if (error.kind === "invalid") return invalid(error.param === null ? error.message : `${error.param}: ${error.message}`);
  return error.kind === "unavailable" ? shutdown(error.message) : shutdown(`engine failure: ${error.message}`);
}

/** Why a step that ends a request without an answer does so. */
function unfinished(step: StepOutput, options: HandlerOptions): ProtocolError {
  const failed = options.engineFailed();
  if (failed !== null) return shutdown(`engine failure: ${failed}`);
  return step.finishReason === "error" ? internal(step.error ?? "engine error") : shutdown("the engine ended the request");
}

const wireReason = (step: StepOutput, eos: readonly number[]): NonNullable<EngineOutput["finish_reason"]> =>
  step.finishReason === "length" ? "length" : step.stopTokenId !== null && eos.includes(step.stopTokenId) ? "eos" : "stop";

/** One item per engine step; pulled only as fast as the socket takes them. */
async function* streamed(request: PreprocessedRequest, context: WorkContext, options: HandlerOptions): AsyncGenerator<unknown, void, undefined> {
  for await (const step of options.engine.generate(engineRequest(request, context.id, options.defaults), context.signal)) {
    if (step.finishReason === "error" || step.finishReason === "cancelled") throw unfinished(step, options);
    const item: EngineOutput = { token_ids: step.tokenIds };
    if (step.finishReason !== null) {
      item.finish_reason = wireReason(step, request.eosTokenIds);
      item.completion_usage = completionUsage(step.usage);
      yield outputItem(item);
      return;
    }
    if (step.tokenIds.length > 0) yield outputItem(item);
  }
  throw shutdown("the engine ended the request");
}

/**
 * With logprobs all tokens travel in the final item. The frontend sees none before, so the worker itself stops at a stop
 * string: at the token that completes it, where the frontend then cuts.
 */
async function* heldBack(request: PreprocessedRequest, context: WorkContext, options: HandlerOptions): AsyncGenerator<unknown, void, undefined> {
  const stops = request.stop.length > 0 ? options.stopDetector(request.stop, request.skipSpecialTokens) : null;
  const ids: number[] = [];
  const logprobs: TokenLogprob[] = [];
  for await (const step of options.engine.generate(engineRequest(request, context.id, options.defaults), context.signal)) {
    if (step.finishReason === "error" || step.finishReason === "cancelled") throw unfinished(step, options);
    const stepLogprobs = step.logprobs ?? [];
    if (stepLogprobs.length !== step.tokenIds.length) throw internal(`engine gave ${stepLogprobs.length} logprobs for ${step.tokenIds.length} tokens`);
    let stopped = false;
    for (let i = 0; i < step.tokenIds.length && !stopped; i++) {
      const id = step.tokenIds[i]!;
      ids.push(id);
      logprobs.push(stepLogprobs[i]!);
      // The end token has no text that could complete a stop string.
      stopped = id !== step.stopTokenId && stops !== null && stops.push([id]);
    }
    if (!stopped && step.finishReason === null) continue;
    yield outputItem({
      token_ids: ids,
      ...logprobFields(logprobs),
      finish_reason: stopped ? "stop" : wireReason(step, request.eosTokenIds),
      completion_usage: completionUsage(step.usage, ids.length),
    });
    return;
  }
  throw shutdown("the engine ended the request");
}
