// The CUDA compiler: pinned Python packages unpacked into the cache. No driver and no GPU are needed to build.
import { existsSync, mkdirSync, renameSync, rmSync } from "node:fs";
import { join } from "node:path";
import { cacheDir, contentHash, root } from "./paths.mjs";
import { output, run, say } from "./run.mjs";

const PACKAGES = join(root, "scripts", "cuda-toolkit.txt");

/** Root of a toolkit with bin/nvcc, include and lib: LAYERSCALE_CUDA_TOOLKIT, else the pinned packages (380 MB), fetched once per list. */
export async function ensureCudaToolkit() {
  const given = process.env.LAYERSCALE_CUDA_TOOLKIT;
  if (given) {
    if (!existsSync(join(given, "bin", "nvcc"))) throw new Error(`LAYERSCALE_CUDA_TOOLKIT="${given}" holds no bin/nvcc`);
    return given;
  }
  const home = join(cacheDir, "cuda", `toolkit-${contentHash([PACKAGES])}`);
  const toolkit = join(home, "nvidia", "cu13");
  if (existsSync(toolkit)) return toolkit;
  const python = ["python3.11", "python3"].find((name) => output(name, ["-m", "pip", "--version"]) !== null);
  if (!python) throw new Error("python3 with pip is missing; on Debian: apt-get install python3-pip");
  say("getting the CUDA compiler (once; 130 MB of Python packages)");
  const part = `${home}.part-${process.pid}`;
  mkdirSync(part, { recursive: true });
  try {
    await run(python, ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-compile", "--only-binary=:all:", "--require-hashes", "--target", part, "-r", PACKAGES], { stdio: ["ignore", "inherit", "inherit"] });
    try {
      renameSync(part, home);
    } catch (error) {
      if (!existsSync(toolkit)) throw error; // made meanwhile by another run
    }
  } finally {
    rmSync(part, { recursive: true, force: true });
  }
  return toolkit;
}
