import type { DeviceRequest, KvCacheDtype } from "../config/engine-config.ts";
import { UsageError } from "../config/flags.ts";
import type { ModelSpec } from "../config/model-spec.ts";
import { EngineError } from "../engine/errors.ts";
import type { DeviceInfo, GpuInfo } from "../engine/native/backend.ts";

/** What is there. */
export interface Probe {
  /** Description by the CUDA library; null = this program has none, or it cannot be loaded. */
  cuda: DeviceInfo | null;
  /** Why there is no CUDA library. */
  noCuda: string;
  /** The kernel shows NVIDIA GPUs to this process, whether or not anything works with them. */
  hardware: boolean;
  /** LAYERSCALE_NATIVE_LIB names a library, and it is of this device; null = not set. */
  forced: "cpu" | "cuda" | null;
}

export type DeviceChoice = { kind: "cpu" } | { kind: "cuda"; index: number; gpus: readonly GpuInfo[]; /** null = as many of `gpus` as the model can be cut for. */ ranks: number | null };

/** Tensor cores with bf16, and fp8 conversions. */
const BF16_CAPABILITY = 8;
const FP8_CAPABILITY = 8.9;
/** The kernels exchange sums in one step among at most this many. */
const MAX_RANKS = 8;

/**
 * Where the engine runs. A GPU that is visible is used or named in a refusal, never passed over.
 * @throws UsageError for flags that do not fit what is there; EngineError for a GPU that cannot be used
 */
export function chooseDevice(request: { device: DeviceRequest; tp: number | null; kvCacheDtype: "auto" | KvCacheDtype }, probe: Probe): DeviceChoice {
  const { device } = request;
  if (device.kind !== "auto" && probe.forced !== null && probe.forced !== device.kind)
    throw new UsageError(`--device: LAYERSCALE_NATIVE_LIB names a library for ${probe.forced}, expected one for ${device.kind}`);
  const wanted = device.kind === "auto" ? (probe.forced ?? (gpuVisible(probe) ? "cuda" : "cpu")) : device.kind;
  return wanted === "cpu" ? chooseCpu(request) : chooseGpus(request, probe, device.kind === "cuda" ? device.index : null, device.kind === "auto");
}

function gpuVisible({ cuda, hardware }: Probe): boolean {
  return hardware || (cuda?.devices?.length ?? 0) > 0;
}

function chooseCpu({ tp, kvCacheDtype }: { tp: number | null; kvCacheDtype: string }): DeviceChoice {
  if (tp !== null && tp !== 1) throw new UsageError(`--tp: tensor parallelism is not available on the CPU; expected 1, got "${tp}"`);
  if (kvCacheDtype.startsWith("fp8")) throw new UsageError(`--kv-cache-dtype: expected one of auto, f32, bf16 on the CPU, got "${kvCacheDtype}"`);
  return { kind: "cpu" };
}

function chooseGpus({ tp, kvCacheDtype }: { tp: number | null; kvCacheDtype: string }, probe: Probe, named: number | null, found: boolean): DeviceChoice {
  const instead = found ? "; --device cpu uses the CPU" : "";
  const fail = (text: string): EngineError => new EngineError("engine", `--device ${named === null ? "cuda" : `cuda:${named}`}${found ? " (a GPU is visible)" : ""}: ${text}${instead}`);
  const { cuda } = probe;
  if (cuda === null) throw fail(probe.noCuda);
  if (cuda.error !== undefined) throw fail(cuda.error);
  const visible = cuda.devices ?? [];
  if (visible.length === 0) throw fail("the CUDA driver shows no GPU to this process (CUDA_VISIBLE_DEVICES, or a container without GPUs)");
  const index = named ?? 0;
  if (index >= visible.length) throw new UsageError(`--device: GPU ${index} is asked for, ${plural(visible.length)} (expected cuda:0 to cuda:${visible.length - 1})`);
  const behind = visible.length - index;
  if (tp !== null && tp > behind) throw new UsageError(`--tp: expected at most ${behind}, got "${tp}"; ${plural(visible.length)}${index > 0 ? `, the first to use is ${index}` : ""}`);
  if (tp !== null && tp > MAX_RANKS) throw new UsageError(`--tp: expected at most ${MAX_RANKS}, got "${tp}"`);
  if (kvCacheDtype === "f32") throw new UsageError(`--kv-cache-dtype: expected one of auto, bf16, fp8_e4m3, fp8_e5m2 on a GPU, got "f32"`);

  const ranks = tp ?? (named === null ? null : 1);
  const gpus = visible.slice(index, index + Math.min(ranks ?? MAX_RANKS, MAX_RANKS));
  for (const gpu of gpus) {
    const name = `GPU ${gpu.index}${gpu.name === undefined ? "" : ` (${gpu.name}, compute capability ${gpu.capability})`}`;
    const capability = Number(gpu.capability ?? NaN);
    if (capability < BF16_CAPABILITY) throw fail(`${name} has no bf16 tensor cores; expected compute capability 8.0 or later`);
    if (gpu.error !== undefined) throw fail(`${name}: ${gpu.error}`);
    if (kvCacheDtype.startsWith("fp8") && capability < FP8_CAPABILITY) throw new UsageError(`--kv-cache-dtype: ${name} has no fp8, got "${kvCacheDtype}"; expected auto or bf16`);
  }
  return { kind: "cuda", index, gpus, ranks };
}

const plural = (count: number): string => (count === 1 ? "1 GPU is visible" : `${count} GPUs are visible`);

/**
 * Ranks for a model: what --tp says, else as many of the GPUs as its heads and inner width can be shared among.
 * @throws UsageError where --tp does not fit the model
 */
export function ranksFor(choice: DeviceChoice & { kind: "cuda" }, spec: ModelSpec): number {
  const fits = (ranks: number): boolean => spec.kvHeads % ranks === 0 && spec.heads % ranks === 0 && spec.intermediate % ranks === 0 && (spec.intermediate / ranks) % 8 === 0;
  if (choice.ranks === null) return choice.gpus.map((_, index) => index + 1).findLast(fits) ?? 1;
  if (!fits(choice.ranks)) throw new UsageError(`--tp: ${spec.kvHeads} kv heads, ${spec.heads} heads and an inner width of ${spec.intermediate} cannot be shared among "${choice.ranks}" ranks`);
  return choice.ranks;
}
