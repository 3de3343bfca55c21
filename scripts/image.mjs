// The image without a container engine: node scripts/image.mjs [--into FOLDER] | --lint
// Assembles the root file system that the Dockerfile's last stage copies (build/image/rootfs unless --into), lists its files with their
// hashes (FOLDER.files) and its configuration (FOLDER.json), and reports sizes. --lint compares the Dockerfile with what is assembled.
import { existsSync, mkdirSync, readFileSync, renameSync, rmSync, writeFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { gzipSync } from "node:zlib";
import { assemble, CONFIG, dockerfile, lintDockerfile, missingLibraries, rootfs, USER } from "./lib/image.mjs";
import { die, output, say } from "./lib/run.mjs";

const args = process.argv.slice(2);
const MIB = 1 << 20;

/** Names that a program asks the dynamic loader for. */
function needed(path) {
  const listed = output("readelf", ["-d", path]);
  if (listed === null) throw new Error(`readelf cannot read ${path}; it comes with the compiler (binutils)`);
  return [...listed.matchAll(/\(NEEDED\).*\[(.+)\]/g)].map((match) => match[1]);
}

export function assembleImage(into = rootfs) {
  const part = `${into}.part-${process.pid}`;
  mkdirSync(dirname(into), { recursive: true });
  try {
    const files = assemble(part);
    const missing = missingLibraries(part, needed);
    if (missing.length > 0) throw new Error(`the image lacks libraries: ${missing.join("; ")}`);
    const listed = files.map(({ path, mode, owner, bytes, sha256 }) => `${sha256}  ${mode}  ${owner}  ${bytes}  ${path}\n`).join("");
    const config = `${JSON.stringify({ ...CONFIG, user: USER }, null, 1)}\n`;
    // The same as what lies there: left alone, since somebody may be running from it.
    if (existsSync(into) && [["files", listed], ["json", config]].every(([kind, text]) => existsSync(`${into}.${kind}`) && readFileSync(`${into}.${kind}`, "utf8") === text)) return files;
    rmSync(into, { recursive: true, force: true });
    renameSync(part, into);
    writeFileSync(`${into}.files`, listed);
    writeFileSync(`${into}.json`, config);
    return files;
  } finally {
    rmSync(part, { recursive: true, force: true });
  }
}

function report(into, files) {
  const total = files.reduce((sum, { bytes }) => sum + bytes, 0);
  for (const { path, bytes } of files.toSorted((a, b) => b.bytes - a.bytes).slice(0, 6)) process.stdout.write(`${(bytes / MIB).toFixed(1).padStart(8)} MiB  ${path}\n`);
  process.stdout.write(`${(total / MIB).toFixed(1).padStart(8)} MiB  in ${files.length} files: ${into}\n`);
  if (args.includes("--compressed")) process.stdout.write(`${(files.reduce((sum, { path }) => sum + gzipSync(readFileSync(join(into, path))).length, 0) / MIB).toFixed(1).padStart(8)} MiB  compressed, as a registry keeps it\n`);
}

if (process.argv[1] === new URL(import.meta.url).pathname) {
  try {
    if (args.includes("--lint")) {
      const findings = lintDockerfile(dockerfile());
      for (const finding of findings) process.stderr.write(`Dockerfile: ${finding}\n`);
      process.exit(findings.length === 0 ? 0 : 1);
    }
    const into = args.includes("--into") ? args[args.indexOf("--into") + 1] : rootfs;
    if (!into) die("--into: expected a folder", 2);
    say(`assembling ${into}`);
    report(into, assembleImage(into));
  } catch (error) {
    die(error.message);
  }
}
