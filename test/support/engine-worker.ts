/**
 * Worker entry for tests: the real engine thread. With a libraryPath of "fake", "fake?fail=7" (the device fails at step 7),
 * "fake?ms=5" (each step takes 5 ms), "fake?weights=3" (another model) or "fake?broken=1" (cannot be loaded) it drives FakeBackend
 * instead of a device library.
 */
import { runEngineWorker } from "../../src/engine/worker.ts";
import { FfiBackend } from "../../src/engine/native/ffi-backend.ts";
import { FakeBackend, modelToken } from "./fake-backend.ts";

runEngineWorker((options, batchTokens) => {
  if (!options.libraryPath.startsWith("fake")) return new FfiBackend(options, batchTokens);
  const settings = new URLSearchParams(options.libraryPath.slice("fake?".length));
  const failAt = Number(settings.get("fail") ?? NaN);
  const stepMs = Number(settings.get("ms") ?? 0);
  const weights = BigInt(settings.get("weights") ?? 0);
  if (settings.has("broken")) throw new Error("the weights cannot be loaded");
  return new FakeBackend({
    vocab: options.spec.vocab, maxSeqs: options.maxNumSeqs, maxBatchTokens: batchTokens, prefixCache: options.prefixCache,
    next: (tokens, seed) => modelToken(tokens, seed + weights, options.spec.vocab),
    beforeStep(step) {
      if (step === failAt) throw new Error(`device failed at step ${step}`);
      if (stepMs > 0) Bun.sleepSync(stepMs);
    },
  });
});
