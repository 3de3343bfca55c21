// What the image holds. The Dockerfile's last stage copies the tree that this file assembles, so both have the same bytes; the lint compares the rest.
import { createHash } from "node:crypto";
import { chmodSync, chownSync, copyFileSync, existsSync, lstatSync, mkdirSync, readdirSync, readFileSync, realpathSync, rmSync, symlinkSync, writeFileSync } from "node:fs";
import { basename, join } from "node:path";
import { dist, root } from "./paths.mjs";

export const LOADER = "/app/layerscale-loader";
/** Not root, for those who ask for it (`--user layerscale`, runAsUser: 10001). The image itself starts as root. */
export const USER = { name: "layerscale", uid: 10001, gid: 10001, home: "/home/layerscale" };

/** Configuration of the image, as the Dockerfile's last stage sets it. */
export const CONFIG = {
  ENV: {
    // A published port reaches the server only if it does not listen on loopback.
    LAYERSCALE_HOST: "0.0.0.0",
    // What NVIDIA's container runtime brings into the container: the driver's libraries and nvidia-smi.
    NVIDIA_DRIVER_CAPABILITIES: "compute,utility",
  },
  ENTRYPOINT: [LOADER],
  WORKDIR: "/",
  STOPSIGNAL: "SIGTERM",
  EXPOSE: ["8080"],
};

/** Libraries of glibc that the executable and the native libraries ask for. The loader's path is fixed by the ABI. */
const LIBRARY_FOLDER = "/usr/lib/x86_64-linux-gnu";
const LOADER_LIBRARY = { from: "/lib64/ld-linux-x86-64.so.2", to: "/usr/lib64/ld-linux-x86-64.so.2", mode: 0o755 };
const LIBRARIES = ["libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1"];

const text = (...lines) => `${lines.join("\n")}\n`;
const ACCOUNTS = [["root", 0, "/root"], [USER.name, USER.uid, USER.home], ["nobody", 65534, "/nonexistent"]];

/** The tree: directories, links, texts, files of this build and of the system that it was built on. */
function entries() {
  const directory = (to, mode = 0o755, uid = 0) => ({ kind: "directory", to, mode, uid });
  const link = (to, target) => ({ kind: "link", to, target });
  const file = (from, to, mode = 0o644) => ({ kind: "file", from, to, mode });
  const content = (to, body) => ({ kind: "text", to, body, mode: 0o644 });
  // CUDA's library lies there after a build with that task; the CPU's always does.
  const native = readdirSync(dist).filter((name) => /^liblayerscale_(cpu|cuda)\.so$/.test(name)).sort();
  return [
    ...["/app", "/dev", "/etc", "/etc/ssl", "/etc/ssl/certs", "/home", "/models", "/proc", "/sys", "/usr", "/usr/lib", "/usr/lib64", LIBRARY_FOLDER].map((to) => directory(to)),
    directory("/root", 0o700),
    directory(USER.home, 0o755, USER.uid),
    directory("/tmp", 0o1777),
    link("/lib", "usr/lib"),
    link("/lib64", "usr/lib64"),
    file(LOADER_LIBRARY.from, LOADER_LIBRARY.to, LOADER_LIBRARY.mode),
    ...LIBRARIES.map((name) => file(`/lib/x86_64-linux-gnu/${name}`, `${LIBRARY_FOLDER}/${name}`)),
    file("/etc/ssl/certs/ca-certificates.crt", "/etc/ssl/certs/ca-certificates.crt"),
    content("/etc/passwd", text(...ACCOUNTS.map(([name, uid, home]) => `${name}:x:${uid}:${uid}:${name}:${home}:/sbin/nologin`))),
    content("/etc/group", text(...ACCOUNTS.map(([name, gid]) => `${name}:x:${gid}:`))),
    content("/etc/nsswitch.conf", text("passwd: files", "group: files", "hosts: files dns")),
    file(join(dist, "layerscale"), LOADER, 0o755),
    // Beside the executable, so that it need not unpack its own copy: /tmp may be missing, read-only or noexec.
    ...native.map((name) => file(join(dist, name), `/app/${name}`)),
  ];
}

/**
 * Assembles the root file system in an empty folder. Owners are set when root does it, as in a container build.
 * @returns {{ path: string, bytes: number, mode: string, owner: number, sha256: string }[]} its files
 */
export function assemble(into) {
  rmSync(into, { recursive: true, force: true });
  mkdirSync(into, { recursive: true });
  chmodSync(into, 0o755);
  const files = [];
  for (const entry of entries()) {
    const path = join(into, entry.to);
    if (entry.kind === "link") {
      symlinkSync(entry.target, path);
      continue;
    }
    if (entry.kind === "directory") mkdirSync(path, { recursive: true });
    else if (entry.kind === "text") writeFileSync(path, entry.body);
    else {
      if (!existsSync(entry.from)) throw new Error(`the image needs ${entry.from}, which does not exist${entry.from.startsWith(root) ? " (npm run build makes it)" : ""}`);
      copyFileSync(realpathSync(entry.from), path);
    }
    chmodSync(path, entry.mode);
    if (process.getuid() === 0) chownSync(path, entry.uid ?? 0, entry.uid ?? 0);
    if (entry.kind === "directory") continue;
    const bytes = readFileSync(path);
    files.push({ path: entry.to, bytes: bytes.length, mode: entry.mode.toString(8), owner: entry.uid ?? 0, sha256: createHash("sha256").update(bytes).digest("hex") });
  }
  return files;
}

/** Libraries that the executables of the tree ask for and the tree does not hold. @param read (path) => list of NEEDED names */
export function missingLibraries(into, read) {
  const folders = [join(into, LIBRARY_FOLDER), join(into, "/usr/lib64"), join(into, "/app")];
  const held = new Set(folders.flatMap((folder) => readdirSync(folder)));
  const programs = folders.flatMap((folder) => readdirSync(folder).map((name) => join(folder, name))).filter((path) => lstatSync(path).isFile());
  // The driver's libraries come from the machine.
  return programs.flatMap((path) => read(path).filter((name) => !held.has(name) && !/^lib(cuda|nvidia-ml)\.so/.test(name)).map((name) => `${basename(path)} needs ${name}`));
}

/** Instructions of a Dockerfile as [stage, instruction, rest]; continued lines joined, comments dropped. */
export function parseDockerfile(source) {
  const lines = source.split("\n").filter((line) => !/^\s*(#|$)/.test(line)).join("\n").replace(/\s*\\\n\s*/g, " ").split("\n");
  const out = [];
  let stage = "";
  for (const line of lines) {
    const [, instruction, rest] = /^\s*(\w+)\s+(.*?)\s*$/.exec(line) ?? [null, line, ""];
    if (instruction.toUpperCase() === "FROM") stage = /\sAS\s+(\S+)$/i.exec(rest)?.[1] ?? "runtime";
    out.push([stage, instruction.toUpperCase(), rest]);
  }
  return out;
}

/** Where the build stage assembles the tree. */
const TREE = "/rootfs";

/** What the last stage must say, in any order: nothing more and nothing less. */
function expectedRuntime() {
  return [
    `COPY --from=build ${TREE}/ /`,
    ...Object.entries(CONFIG.ENV).map(([name, value]) => `ENV ${name}=${value}`),
    `WORKDIR ${CONFIG.WORKDIR}`,
    ...CONFIG.EXPOSE.map((port) => `EXPOSE ${port}`),
    `STOPSIGNAL ${CONFIG.STOPSIGNAL}`,
    `ENTRYPOINT ${JSON.stringify(CONFIG.ENTRYPOINT)}`,
  ];
}

/** @returns {string[]} where Dockerfile and this file are out of step */
export function lintDockerfile(source) {
  const instructions = parseDockerfile(source);
  const findings = [];
  const last = instructions.filter(([stage]) => stage === "runtime");
  if (last[0]?.[2] !== "scratch") findings.push(`the last stage: expected FROM scratch, got ${last[0]?.[2] ?? "none"}`);
  const found = last.slice(1).map(([, instruction, rest]) => `${instruction} ${instruction === "ENTRYPOINT" ? rest.replace(/,\s*/g, ",") : rest}`);
  const expected = expectedRuntime();
  for (const line of expected) if (!found.includes(line)) findings.push(`the last stage lacks: ${line}`);
  for (const line of found) if (!expected.includes(line)) findings.push(`the last stage has what the assembled tree does not: ${line}`);
  const build = instructions.filter(([stage]) => stage === "build").map(([, instruction, rest]) => `${instruction} ${rest}`);
  for (const line of ["RUN npm ci", "RUN node scripts/build.mjs ${TASKS}", `RUN node scripts/image.mjs --into ${TREE}`]) if (!build.includes(line)) findings.push(`the build stage lacks: ${line}`);
  // The manifests give a worker GPUs, which an image without the CUDA library refuses to start beside.
  if (!build.includes('ARG TASKS="all cuda"')) findings.push('the build stage lacks: ARG TASKS="all cuda"');
  for (const tool of ["cmake", "python3-pip"]) if (!build.some((line) => line.startsWith("RUN apt-get") && line.split(/\s+/).includes(tool))) findings.push(`the build stage does not install ${tool}, which the build needs`);
  if (instructions.some(([stage, instruction]) => stage === "runtime" && instruction === "USER")) findings.push("USER: the image starts as root, which the discovery directory and /root/.cache/huggingface rely on");
  return findings;
}

export const dockerfile = () => readFileSync(join(root, "Dockerfile"), "utf8");
export const imageFolder = join(root, "build", "image");
export const rootfs = join(imageFolder, "rootfs");
