import type { DeviceRequest, EngineConfig } from "../config/engine-config.ts";
import { flags, UsageError, type FlagValues } from "../config/flags.ts";
import { readHubEnvironment } from "../config/hub-env.ts";
import type { License } from "../license/license.ts";

const KV_DTYPES = ["auto", "f32", "bf16", "fp8_e4m3", "fp8_e5m2"] as const;

/** Options of the engine, the same under both subcommands. */
export const engineFlags = flags({
  model: { kind: "string", metavar: "MODEL", default: null, help: "Model directory (Hugging Face layout), .gguf file, or a repo of the Hugging Face hub: ORG/NAME[@REVISION][:FILE.gguf]; required" },
  licenseKey: { kind: "string", metavar: "KEY", default: null, env: "LAYERSCALE_LICENSE_KEY", help: "Licence key LSK-…; required" },
  servedModelName: { kind: "string", metavar: "NAME", default: null, help: "Model name clients ask for; without it the model's own name" },
  ctx: { kind: "int", default: null, min: 16, max: 16_777_216, help: "Context length in tokens, at most the model's own" },
  maxNumSeqs: { kind: "int", default: 256, min: 1, max: 4096, help: "Sequences that run at once" },
  gpuMemoryUtilization: { kind: "float", default: null, max: 1, help: "Fraction of the GPUs' memory (default 0.9; on the CPU: of available memory, default 0.5) that weights and KV pool may take" },
  maxTotalTokens: { kind: "int", default: null, min: 16, max: 1_073_741_824, help: "Size of the KV pool in tokens; without it, what memory allows" },
  chunkedPrefillSize: { kind: "int", default: null, min: 16, max: 65_536, help: "Tokens computed in one step; longer prompts are split. Without it 8192 or 2048 on a GPU by its memory, 512 with AMX, 256 with AVX-512, 128 with AVX2" },
  kvCacheDtype: { kind: "string", metavar: "NAME", default: "auto", help: "Precision of the KV cache: auto (bf16 on a GPU, f32 on the CPU) | f32 (CPU) | bf16 (half the memory, a little less exact) | fp8_e4m3, fp8_e5m2 (GPU)" },
  device: { kind: "string", metavar: "NAME", default: "auto", help: "Where to run: auto (cuda where a GPU is visible, else cpu) | cuda | cuda:N (from GPU N on) | cpu" },
  tp: { kind: "int", default: null, min: 1, max: 64, help: "Tensor-parallel ranks, a GPU each; without it all visible GPUs that the model can be cut for, or the one that --device names. Only 1 on the CPU" },
  noPrefixCache: { kind: "switch", help: "Keep no prefix cache" },
  speculativeAlgorithm: { kind: "string", metavar: "NAME", default: null, help: "Speculative decoding; none is built yet, so any name is refused" },
});

/** @throws UsageError for what the table alone cannot judge */
export function engineConfig(values: FlagValues<typeof engineFlags>, env: Record<string, string | undefined>, license: License, licenseKey: string): EngineConfig {
  if (values.model === null) throw new UsageError("--model: expected a model directory, a .gguf file or a repo id; the option is required");
  const device = deviceRequest(values.device);
  if (values.speculativeAlgorithm !== null)
    throw new UsageError(`--speculative-algorithm: "${values.speculativeAlgorithm}" is not available; no speculative algorithm is built yet, leave the option out`);
  const kvCacheDtype = KV_DTYPES.find((name) => name === values.kvCacheDtype.toLowerCase());
  if (!kvCacheDtype) throw new UsageError(`--kv-cache-dtype: expected one of ${KV_DTYPES.join(", ")}, got "${values.kvCacheDtype}"`);
  return Object.freeze<EngineConfig>({
    model: values.model,
    hub: readHubEnvironment(env),
    ctx: values.ctx,
    maxNumSeqs: values.maxNumSeqs,
    gpuMemoryUtilization: values.gpuMemoryUtilization,
    maxTotalTokens: values.maxTotalTokens,
    chunkedPrefillSize: values.chunkedPrefillSize,
    kvCacheDtype,
    device,
    tp: values.tp,
    prefixCache: !values.noPrefixCache,
    servedModelName: values.servedModelName,
    licenseKey,
    licenseMaxCtx: license.maxCtx,
  });
}

function deviceRequest(text: string): DeviceRequest {
  const name = text.toLowerCase();
  if (name === "auto" || name === "cpu") return { kind: name };
  const match = /^cuda(?::(\d{1,3}))?$/.exec(name);
  if (match === null) throw new UsageError(`--device: expected auto, cpu, cuda or cuda:N, got "${text}"`);
  return { kind: "cuda", index: match[1] === undefined ? null : Number(match[1]) };
}
