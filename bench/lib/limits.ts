import { $ } from "bun";
import { existsSync, mkdirSync } from "node:fs";
import { join } from "node:path";
import { cacheDir, contentHash } from "../../scripts/lib/paths.mjs";

export interface MachineLimits {
  threads: number;
  /** Memory read bandwidth with all cores, GB/s. */
  read_gb_s: number;
  /** f32 multiply-add peak with all cores, GFLOP/s. */
  fma_gflop_s: number;
}

/** Measured now, since a shared host changes by the hour. */
export async function machineLimits(): Promise<MachineLimits> {
  const source = join(import.meta.dir, "../native/limits.cpp");
  const program = join(cacheDir, "bench", `limits-${contentHash([source])}`);
  if (!existsSync(program)) {
    mkdirSync(join(cacheDir, "bench"), { recursive: true });
    await $`g++ -std=c++20 -O3 -march=native -ffast-math -pthread ${source} -o ${program}`;
  }
  return JSON.parse(await $`${program}`.text()) as MachineLimits;
}
