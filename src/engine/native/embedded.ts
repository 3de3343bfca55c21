import { existsSync } from "node:fs";
import { join } from "node:path";

/** Files inside a compiled executable; the dynamic loader cannot open them. */
export const EMBEDDED_ROOT = "/$bunfs/";

/**
 * Path of the CPU library that the build puts into the executable; in development, of the one in dist/. null when there is none.
 * The import's literal path makes `bun build --compile` embed the file, and fail when it is missing.
 */
export async function embeddedLibraryPath(): Promise<string | null> {
  const compiled = import.meta.dir.startsWith(EMBEDDED_ROOT);
  if (!compiled && !existsSync(join(import.meta.dir, "../../../dist/liblayerscale_cpu.so"))) return null;
  return (await import("../../../dist/liblayerscale_cpu.so", { with: { type: "file" } })).default;
}

/** In development, the CUDA library in dist/. The executable has none inside: it lies beside. */
export async function builtCudaLibraryPath(): Promise<string | null> {
  const built = join(import.meta.dir, "../../../dist/liblayerscale_cuda.so");
  return !import.meta.dir.startsWith(EMBEDDED_ROOT) && existsSync(built) ? built : null;
}
