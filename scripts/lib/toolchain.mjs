// What a build needs, installed once: node modules (Bun among them) and a check of the system's compilers.
import { existsSync, mkdirSync, readFileSync, statSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { contentHash, root } from "./paths.mjs";
import { die, output, run, say } from "./run.mjs";

const stamp = join(root, "node_modules", ".layerscale-lock");
// Bun's install script moves the binary from the platform package into the package `bun`. Where npm is set up to run no install scripts, the binary stays
// in the platform package and the file in `bun` is a small placeholder.
const bunFiles = [join("bun", "bin", "bun.exe"), ...["bun-linux-x64", "bun-linux-x64-baseline"].map((name) => join("@oven", name, "bin", "bun"))].map((path) => join(root, "node_modules", path));
const REAL_BINARY_BYTES = 1 << 20;
const isBun = (file) => existsSync(file) && statSync(file).size > REAL_BINARY_BYTES;

/** Path of the pinned Bun; installs node modules when the lock file changed. */
export async function ensureBun() {
  const lock = contentHash([join(root, "package-lock.json")]);
  const current = existsSync(stamp) && readFileSync(stamp, "utf8") === lock;
  if (!current || !bunFiles.some(isBun)) {
    say("installing packages (npm ci)");
    await run("npm", ["ci", "--no-audit", "--no-fund", "--loglevel=error"], { cwd: root });
    mkdirSync(join(root, "node_modules"), { recursive: true });
    writeFileSync(stamp, lock);
  }
  return bunFiles.find(isBun) ?? die("the npm package of Bun holds no Linux x86-64 binary; is this a Linux x86-64 machine?");
}

export function checkCompilers() {
  for (const [tool, hint] of [["cmake", "cmake"], ["g++", "g++"], ["make", "make"]])
    if (output(tool, ["--version"]) === null) die(`${tool} is missing; on Debian: apt-get install ${hint}`);
}
