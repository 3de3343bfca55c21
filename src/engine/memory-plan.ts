import { readFileSync } from "node:fs";
import { dirname, join } from "node:path";
import type { KvCacheDtype } from "../config/engine-config.ts";
import type { ModelSpec } from "../config/model-spec.ts";
import { EngineError } from "./errors.ts";
import { pagesFor } from "./kv-manager.ts";
import { LS_PAGE_TOKENS } from "./native/abi.gen.ts";
import type { DeviceMemory } from "./native/backend.ts";
import type { EngineOptions } from "./types.ts";

export interface MemoryPlan {
  pages: number;
  /** Bytes of one page over all layers, keys and values. */
  pageBytes: number;
  /** One sentence: how the pool size came about. */
  memoryRule: string;
}

type ReadText = (path: string) => string | null;
const readText: ReadText = (path) => {
  try {
    return readFileSync(path, "utf8");
  } catch {
    return null;
  }
};

/** Bytes that this process may still take: the kernel's estimate, or less when a control group or its address space (ulimit -v) sets a limit. */
export function availableMemory(read: ReadText = readText): number {
  const meminfo = read("/proc/meminfo") ?? "";
  const kib = /^MemAvailable:\s+(\d+) kB$/m.exec(meminfo)?.[1];
  const machine = kib === undefined ? Infinity : Number(kib) * 1024;
  const available = Math.min(machine, groupHeadroom(read), addressHeadroom(read));
  if (!Number.isFinite(available)) throw new EngineError("engine", "cannot tell how much memory is available: /proc/meminfo has no MemAvailable line; give the pool size with --max-total-tokens");
  return available;
}

/** Address space still free under RLIMIT_AS; mapped weights and the pool both take it. Infinity = no limit. */
function addressHeadroom(read: ReadText): number {
  const limit = Number(/^Max address space\s+(\d+)\s/m.exec(read("/proc/self/limits") ?? "")?.[1] ?? NaN); // "unlimited" → NaN
  const used = Number(/^VmSize:\s+(\d+) kB$/m.exec(read("/proc/self/status") ?? "")?.[1] ?? 0) * 1024;
  return Number.isFinite(limit) ? Math.max(0, limit - used) : Infinity;
}

/** The tightest limit minus use over this process's control group and its parents, v2 and v1. Infinity = no limit. */
function groupHeadroom(read: ReadText): number {
  let headroom = Infinity;
  for (const line of (read("/proc/self/cgroup") ?? "").split("\n")) {
    const [, controllers, path] = /^\d+:([^:]*):(.*)$/.exec(line) ?? [];
    if (controllers === undefined || path === undefined) continue;
    const v2 = controllers === "";
    if (!v2 && !controllers.split(",").includes("memory")) continue;
    const root = v2 ? "/sys/fs/cgroup" : "/sys/fs/cgroup/memory";
    const [limitFile, usageFile, reclaimable] = v2 ? ["memory.max", "memory.current", "inactive_file"] : ["memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"];
    // In a container the path is often the host's: then only the root exists, and it is our own group.
    for (let group = join("/", path); ; group = dirname(group)) {
      const limit = Number(read(join(root, group, limitFile))?.trim() ?? NaN); // "max" → NaN
      if (Number.isFinite(limit)) {
        const usage = Number(read(join(root, group, usageFile))?.trim() ?? 0) || 0;
        const stat = new RegExp(`^${reclaimable} (\\d+)$`, "m").exec(read(join(root, group, "memory.stat")) ?? "");
        headroom = Math.min(headroom, Math.max(0, limit - Math.max(0, usage - Number(stat?.[1] ?? 0))));
      }
      if (group === "/") break;
    }
  }
  return headroom;
}

export function pageBytes(spec: ModelSpec, kvCacheDtype: KvCacheDtype): number {
  const element = kvCacheDtype === "f32" ? 4 : kvCacheDtype === "bf16" ? 2 : 1;
  return 2 * spec.layers * LS_PAGE_TOKENS * spec.kvHeads * spec.headDim * element;
}

/** Upper estimate of activation memory, in bytes: a step's f32 rows through the widest layer, and logits of every sampled row. */
export function workspaceBytes(spec: ModelSpec, batchTokens: number, maxNumSeqs: number): number {
  const width = 4 * spec.hidden + 2 * spec.heads * spec.headDim + 2 * spec.kvHeads * spec.headDim + 3 * spec.intermediate;
  return 4 * (batchTokens * width + maxNumSeqs * spec.vocab);
}

const GIB = 2 ** 30;
const gib = (bytes: number): string => `${(bytes / GIB).toFixed(2)} GiB`;

/**
 * Pages of the KV pool: what memoryUtilization of the available memory leaves beside weights and workspace, never more than all
 * sequences at full context can use, and never more than maxTotalTokens.
 */
export function planMemory(
  options: Pick<EngineOptions, "spec" | "weights" | "contextLength" | "maxNumSeqs" | "maxTotalTokens" | "memoryUtilization" | "kvCacheDtype">,
  batchTokens: number,
  available: () => number,
): MemoryPlan {
  const { spec, memoryUtilization } = options;
  const bytes = pageBytes(spec, options.kvCacheDtype);
  const weightBytes = totalWeightBytes(options.weights);
  const workspace = workspaceBytes(spec, batchTokens, options.maxNumSeqs);
  checkLimits(options);
  const free = available();
  return choosePages(options, free * memoryUtilization - weightBytes - workspace, bytes, `${memoryUtilization} of ${gib(free)} available memory, minus ${gib(weightBytes)} of weights and ${gib(workspace)} of workspace`);
}

/**
 * The same on a device with memory of its own, once weights and buffers are there: memoryUtilization of all its memory, minus what is
 * taken and what captured graphs will take.
 */
export function planDeviceMemory(options: Pick<EngineOptions, "contextLength" | "maxNumSeqs" | "maxTotalTokens" | "memoryUtilization">, memory: DeviceMemory): MemoryPlan {
  checkLimits(options);
  const { total, usedBefore, weights, workspace, graphs, free, pageBytes: bytes } = memory;
  const others = Math.max(0, total - free - usedBefore - weights - workspace);
  const arithmetic =
    `${options.memoryUtilization} of ${gib(total)} device memory, minus ${gib(usedBefore)} in use before, ${gib(weights)} of weights, ${gib(workspace)} of step buffers, ${gib(graphs)} of graphs and ${gib(others)} of the driver`;
  return choosePages(options, Math.min(options.memoryUtilization * total - (total - free), free) - graphs, bytes, arithmetic);
}

type Limits = Pick<EngineOptions, "contextLength" | "maxNumSeqs" | "maxTotalTokens">;

function checkLimits({ contextLength, maxTotalTokens }: Limits): void {
  if (contextLength < 2) throw new EngineError("engine", `context length ${contextLength}: expected at least 2 tokens, one of prompt and one generated`);
  if (maxTotalTokens !== null && maxTotalTokens < LS_PAGE_TOKENS) {
    throw new EngineError("engine", `--max-total-tokens ${maxTotalTokens}: expected at least one page of ${LS_PAGE_TOKENS} tokens`);
  }
}

function choosePages({ contextLength, maxNumSeqs, maxTotalTokens }: Limits, room: number, bytes: number, arithmetic: string): MemoryPlan {
  const fromMemory = Math.floor(room / bytes);
  const useful = maxNumSeqs * pagesFor(contextLength);
  const asked = maxTotalTokens === null ? Infinity : Math.floor(maxTotalTokens / LS_PAGE_TOKENS);
  const needed = Math.min(pagesFor(contextLength), asked);
  if (fromMemory < needed) {
    throw new EngineError(
      "engine",
      `too little memory for one sequence of ${Math.min(contextLength, needed * LS_PAGE_TOKENS)} tokens: ${arithmetic}, leaves ${gib(Math.max(0, fromMemory) * bytes)} ` +
        `(${Math.max(0, fromMemory)} pages of ${bytes} bytes), ${needed} pages are needed; lower --ctx, raise --gpu-memory-utilization, or free memory`,
    );
  }
  const pages = Math.min(fromMemory, useful, asked);
  const size = `KV pool of ${pages} pages (${pages * LS_PAGE_TOKENS} tokens, ${gib(pages * bytes)})`;
  const why =
    pages === fromMemory ? arithmetic
    : pages === asked ? `--max-total-tokens ${maxTotalTokens}`
    : `${maxNumSeqs} sequences of ${contextLength} tokens can use no more`;
  return { pages, pageBytes: bytes, memoryRule: `${size}: ${why}` };
}

export function totalWeightBytes(weights: EngineOptions["weights"]): number {
  return weights.tensors.reduce((sum, tensor) => sum + tensor.bytes, 0);
}
