import type { WeightPlan } from "../config/model-spec.ts";
import { int32Words } from "../util/words.ts";
import { availableMemory, planDeviceMemory, planMemory, totalWeightBytes, type MemoryPlan } from "./memory-plan.ts";
import { LS_PAGE_TOKENS } from "./native/abi.gen.ts";
import { modelDigest } from "./model-digest.ts";
import { type NativeBackend, NativeError } from "./native/backend.ts";
import type { NativeTransfer } from "./native/transfer.ts";
import { EngineError } from "./errors.ts";
import { maxBatchTokens } from "./step-budget.ts";
import { Sequence } from "./sequence.ts";
import { StepPlan, type Row } from "./step-plan.ts";
import type { EngineInfo, EngineOptions, LoadProgress } from "./types.ts";

type ReportProgress = (progress: LoadProgress) => void;

/** Pool size for these options, from memory as it is before the weights are loaded; null = a GPU's memory, which is known later. */
export function planPool(options: EngineOptions): MemoryPlan | null {
  return options.gpu === null ? planMemory(options, maxBatchTokens(options), availableMemory) : null;
}

/** Weights, pool and a warm-up, on an engine just created. Blocks; reports progress throughout. */
export function loadEngine(backend: NativeBackend, options: EngineOptions, planned: MemoryPlan | null, plans: StepPlan, report: ReportProgress): Omit<EngineInfo, "transfer"> {
  const started = performance.now();
  const totalBytes = totalWeightBytes(options.weights);
  const progress = (phase: LoadProgress["phase"], percent: number, bytes = totalBytes): void => report({ phase, percent, bytes, totalBytes });

  placeWeights(backend, options.weights, (bytes) => progress("weights", totalBytes === 0 ? 100 : (100 * bytes) / totalBytes, bytes));
  progress("repack", 0);
  backend.finishWeights();
  progress("repack", 100);
  const plan = planned ?? planDevicePool(backend, options);
  backend.createPool(plan.pages);
  progress("pool", 100);
  progress("warm-up", 0);
  warmUp(backend, options, plan.pages, plans);
  progress("warm-up", 100);
  return {
    device: backend.device.device,
    isa: backend.device.isa,
    threads: options.threads > 0 ? options.threads : backend.device.threads,
    pageTokens: LS_PAGE_TOKENS,
    pages: plan.pages,
    contextLength: Math.min(options.contextLength, plan.pages * LS_PAGE_TOKENS),
    maxNumSeqs: options.maxNumSeqs,
    maxBatchTokens: maxBatchTokens(options),
    kvCacheDtype: options.kvCacheDtype,
    prefixCache: options.prefixCache,
    weightBytes: totalBytes,
    pageBytes: plan.pageBytes,
    memoryRule: plan.memoryRule,
    loadSeconds: (performance.now() - started) / 1000,
  };
}

function planDevicePool(backend: NativeBackend, options: EngineOptions): MemoryPlan {
  const memory = backend.memory();
  if (memory === null) throw new EngineError("engine", `the library of ${backend.device.device} has no device memory`);
  return planDeviceMemory(options, memory);
}

/**
 * Starts the transfer of KV, where it is asked for. Copies for other engines may take as much memory as the pool, and no more than half of
 * what the host has free once weights and pool have their place.
 * @throws EngineError naming the address that cannot be listened on
 */
export function openTransfer(backend: NativeBackend, options: EngineOptions, info: Pick<EngineInfo, "pages" | "pageBytes" | "device">): { native: NativeTransfer; capBytes: number } | null {
  const { transfer } = options;
  if (transfer === null) return null;
  const poolBytes = info.pages * info.pageBytes;
  // The pool of a CPU is host memory that is promised, and not yet used.
  const free = availableMemory() - (info.device === "cpu" ? poolBytes : 0);
  try {
    return { native: backend.startTransfer(transfer, modelDigest(options.spec, options.weights)), capBytes: Math.floor(Math.min(poolBytes, Math.max(0, free) / 2)) };
  } catch (error) {
    if (!(error instanceof NativeError)) throw error;
    throw new EngineError("engine", transfer.host === null ? `KV transfer: ${error.text}` : `cannot serve KV on ${transfer.host} (POD_IP, else the address of the default route): ${error.text}`);
  }
}

/** Maps the files and places each tensor; calls back when another percent of the bytes is placed. */
function placeWeights(backend: NativeBackend, weights: WeightPlan, placed: (bytes: number) => void): void {
  const total = totalWeightBytes(weights);
  const files = weights.files.map((file) => backend.mapWeights(file.path, file.bytes));
  let bytes = 0;
  let reported = 0;
  for (const tensor of weights.tensors) {
    const file = files[tensor.file];
    if (file === undefined) throw new RangeError(`tensor ${tensor.name}: file ${tensor.file} of ${files.length}`);
    backend.setTensor(tensor, file);
    bytes += tensor.bytes;
    if (bytes === total || bytes - reported >= total / 100) placed((reported = bytes));
  }
}

/**
 * A prefill chunk and a decode through the real step path, so that the first request finds threads, code and pages warm. Nothing of
 * it stays: its pages are not committed, the cache is cleared and the events are dropped.
 */
function warmUp(backend: NativeBackend, options: EngineOptions, pages: number, plan: StepPlan): void {
  const length = Math.min(2 * LS_PAGE_TOKENS, options.chunkedPrefillSize, Math.min(options.contextLength, pages * LS_PAGE_TOKENS) - 1);
  const sequence = new Sequence({
    key: 0, prompt: Array.from({ length }, (_, index) => index % options.spec.vocab),
    sampling: { temperature: 0, topP: 1, seed: 0n, maxTokens: null, ignoreEos: true, logprobs: null },
    eosTokenIds: [], stopTokenIds: [], priority: 0, cacheDomain: 0n, internal: true, submittedAt: 0,
  });
  sequence.slot = backend.openSequence(sequence.tokens, length, 0n).slot;
  for (const step of [0, 1]) {
    const row: Row = { sequence, start: sequence.numComputed, length: sequence.pending, sample: true };
    backend.submit(plan.pack([row], step).words, plan.length);
    const token = plan.unpack(backend.wait(plan.result)).rows[0]?.token ?? 0;
    sequence.numComputed = sequence.numTokens;
    sequence.append(token);
  }
  backend.closeSequence(sequence.slot, 0);
  backend.clearCache();
  const events = int32Words(4096);
  while (backend.drainEvents(events) > 0);
}
