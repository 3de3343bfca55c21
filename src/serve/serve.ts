import type { ServeConfig } from "../config/engine-config.ts";
import { VERSION } from "../config/version.ts";
import type { EngineError } from "../engine/errors.ts";
import type { LoadedModel } from "../model/types.ts";
import { loadEngine, openConfiguredModel, servedModelName, type LoadedEngine } from "../runtime/load-engine.ts";
import { logger } from "../telemetry/log.ts";
import { onStopSignal, type StopSignal } from "../util/signals.ts";
import { within } from "../util/within.ts";
import { App } from "./app.ts";
import { KeyCheck } from "./auth.ts";
import { createCodec } from "./codec.ts";
import { unavailable } from "./http-errors.ts";
import { GENERATION_ROUTES, listen } from "./server.ts";

const log = logger("layerscale::serve");

/** Milliseconds; together they stay under the 30 s that process managers give a stop. */
const DRAIN_MS = 20_000;
const ABORT_MS = 2_000;
const FLUSH_MS = 2_000;
const ENGINE_STOP_MS = 5_000;

type Server = ReturnType<typeof listen>;

/**
 * Serves a model over HTTP until SIGTERM or SIGINT. The server listens before the model is loaded: health says 503 until then.
 * @returns exit code: 0 after a stop that was asked for, 1 when the port is taken or the engine failed
 * @throws ModelError, EngineError when the model cannot be loaded
 */
export async function runServe(config: ServeConfig): Promise<number> {
  const stop = onStopSignal();
  const app = new App({ version: VERSION, keyCheck: config.apiKey ? new KeyCheck(config.engine.licenseKey) : null });
  for (const route of GENERATION_ROUTES) app.metrics.declareRoute(route);
  let server: Server;
  try {
    server = listen(app, config);
  } catch (error) {
    process.stderr.write(`error: ${listenProblem(error, config)}\n`);
    stop.dispose();
    return 1;
  }
  const url = server.url.origin;
  log.info("listening", { url });
  try {
    const loading = load(app, config, stop.asked);
    const loaded = await Promise.race([loading, stop.requested.then(() => null)]);
    if (loaded === null) {
      // Nothing is running yet; loading ends with the process.
      loading.catch(() => {});
      app.phase = "stopping";
      return 0;
    }
    return await serveUntilStopped(app, server, loaded, stop, url);
  } finally {
    void server.stop(true);
    stop.dispose();
  }
}

function listenProblem(error: unknown, { host, port }: ServeConfig): string {
  const { code, message } = error as { code?: string; message: string };
  if (code === "EADDRINUSE") return `--port: ${port} on ${host} is already in use; stop the program that holds it or choose another port`;
  if (code === "EACCES") return `--port: no permission to listen on ${host} port ${port}`;
  return `--host ${host}, --port ${port}: cannot listen: ${message}`;
}

/** Opens the model, names it, loads its weights. */
async function load(app: App, config: ServeConfig, stopped: AbortSignal): Promise<LoadedEngine> {
  const opened = await openConfiguredModel(config.engine, stopped);
  const { model } = opened;
  const { ctx, licenseMaxCtx } = config.engine;
  app.identify({ name: servedModelName(config.engine, model), contextLength: Math.min(model.spec.maxContext, ctx ?? Infinity, licenseMaxCtx ?? Infinity) });
  return loadEngine(config.engine, opened);
}

/** Tokens that end an answer: the model's own list, and the tokenizer's eos. */
function eosTokens(model: LoadedModel, eosTokenId: number | null): number[] {
  return [...new Set([...model.generation.eosTokenIds, ...(eosTokenId === null ? [] : [eosTokenId])])];
}

/**
 * From a loaded model to the end: admits requests until a stop signal or a failure of the engine.
 * @returns exit code: 0 after a stop, 1 after a failure
 */
export async function serveUntilStopped(app: App, server: Server, loaded: Omit<LoadedEngine, "weights" | "source">, stop: StopSignal, url: string): Promise<number> {
  const { engine, model, tokenizer, servedName } = loaded;
  const failed = Promise.withResolvers<EngineError>();
  engine.onFailure((error) => {
    app.phase = "failed";
    failed.resolve(error);
  });
  app.metrics.attach(engine);
  app.start({
    engine,
    codec: createCodec(tokenizer, model),
    name: servedName,
    contextLength: loaded.contextLength,
    vocab: model.spec.vocab,
    eosTokenIds: eosTokens(model, tokenizer.eosTokenId),
    defaults: { temperature: model.generation.temperature ?? 1, topP: model.generation.topP ?? 1 },
  });
  log.info("ready", { url, model: servedName, contextLength: loaded.contextLength });
  const failure = await Promise.race([failed.promise, stop.requested.then(() => null)]);
  if (failure) {
    log.error("engine failed", { error: failure });
    // The engine ends its sequences with an error; each answer gets the time to say so.
    await finishRequests(app, server, ABORT_MS, stop.hurry);
    return 1;
  }
  log.info("stopping", { running: app.requests.size });
  app.phase = "stopping";
  // Takes no new connections; requests on kept ones get 503.
  void server.stop(false);
  await finishRequests(app, server, DRAIN_MS, stop.hurry);
  await within(engine.stop(), ENGINE_STOP_MS);
  log.info("stopped");
  return 0;
}

/** Lets requests end by themselves for `ms`, then ends them with an error, then lets the sockets take the last bytes. */
async function finishRequests(app: App, server: Server, ms: number, hurry: AbortSignal): Promise<void> {
  if (!(await within(app.requests.idle(), ms, hurry))) {
    log.warn("requests cut off", { running: app.requests.size });
    app.requests.abortAll(unavailable("the server is stopping"));
    await within(app.requests.idle(), ABORT_MS);
  }
  const deadline = performance.now() + FLUSH_MS;
  while (server.pendingRequests > 0 && performance.now() < deadline) await Bun.sleep(5);
}
