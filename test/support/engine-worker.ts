/**
 * Worker entry for tests: the real engine thread. With a libraryPath of "fake", "fake?fail=7" (the device fails at step 7) or
 * "fake?ms=5" (each step takes 5 ms) it drives FakeBackend instead of a device library.
 */
import { runEngineWorker } from "../../src/engine/worker.ts";
import { FfiBackend } from "../../src/engine/native/ffi-backend.ts";
import { FakeBackend } from "./fake-backend.ts";

runEngineWorker((options, batchTokens) => {
  if (!options.libraryPath.startsWith("fake")) return new FfiBackend(options, batchTokens);
  const settings = new URLSearchParams(options.libraryPath.slice("fake?".length));
  const failAt = Number(settings.get("fail") ?? NaN);
  const stepMs = Number(settings.get("ms") ?? 0);
  return new FakeBackend({
    vocab: options.spec.vocab, maxSeqs: options.maxNumSeqs, maxBatchTokens: batchTokens, prefixCache: options.prefixCache,
    beforeStep(step) {
      if (step === failAt) throw new Error(`device failed at step ${step}`);
      if (stepMs > 0) Bun.sleepSync(stepMs);
    },
  });
});
