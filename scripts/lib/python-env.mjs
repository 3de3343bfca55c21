// Python environments with the real Dynamo frontend and the reference libraries that tests compare with; one per Dynamo release.
import { existsSync, mkdirSync, renameSync, rmSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { cacheDir, contentHash } from "./paths.mjs";
import { output, run, runShowing, say } from "./run.mjs";

/** The release that the worker is written for, then those whose frontends it is tested with too. */
export const DYNAMO_VERSIONS = ["1.5.0", "1.5.1", "1.6.1"];

// Dynamo itself goes in without its dependencies: one optional one does not build without a GPU. The second list is what the frontend imports.
const dynamo = (version) => [`ai-dynamo==${version}`, `ai-dynamo-runtime==${version}`];
const LIBRARIES = ["aiohttp", "kubernetes>=32.0.1,<33", "msgspec", "prometheus-client", "pyzmq", "tqdm", "transformers", "typing-extensions", "zstandard", "pydantic>=2.10.6,<2.13", "uvloop", "openai", "jinja2"];

const homeOf = (version) => join(cacheDir, "venv", `dynamo-${contentHash([], [...dynamo(version), ...LIBRARIES])}`);
const pythonOf = (home) => join(home, "bin", "python");

/** What pip says that takes long: each file that it gets, and the copying at the end. */
function progress(line) {
  const file = /^\s*(?:Downloading|Using cached) (?:\S*\/)?([^\s/]+) \(([^)]+)\)/.exec(line);
  if (file) return `${file[1]} (${file[2]})`;
  return line.startsWith("Installing collected packages") ? "copying files" : null;
}

/** Path of the environment's python; made once per list of versions. */
export async function ensureDynamoVenv(version = DYNAMO_VERSIONS[0]) {
  const home = homeOf(version);
  const python = pythonOf(home);
  if (existsSync(join(home, "complete"))) return python;
  const base = ["python3.11", "python3"].find((name) => output(name, ["-c", "import sys,venv; sys.exit(sys.version_info[:2] < (3, 10))"]) !== null);
  if (!base) throw new Error("Python 3.10 or newer with venv is missing; on Debian: apt-get install python3-venv python3-pip");
  say(`making a Python environment with the Dynamo ${version} frontend (once; about 600 MB)`);
  rmSync(home, { recursive: true, force: true });
  mkdirSync(join(cacheDir, "venv"), { recursive: true });
  await run(base, ["-m", "venv", home]);
  const pip = (...args) => runShowing(python, ["-m", "pip", "install", "--progress-bar=off", "--disable-pip-version-check", ...args], progress);
  await pip("--no-deps", ...dynamo(version));
  // Dynamo names libraries that its frontend does without; pip would call that a conflict.
  await pip("--no-warn-conflicts", ...LIBRARIES);
  writeFileSync(join(home, "complete.tmp"), "");
  renameSync(join(home, "complete.tmp"), join(home, "complete"));
  return python;
}

/** The environments to test with, as `version=python` words: all of them with `all`, else those that exist beside the first. */
export async function dynamoEnvironments(all) {
  const words = [];
  for (const version of DYNAMO_VERSIONS) {
    if (all || version === DYNAMO_VERSIONS[0] || existsSync(join(homeOf(version), "complete"))) words.push(`${version}=${await ensureDynamoVenv(version)}`);
  }
  return words;
}
