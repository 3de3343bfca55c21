// Servers that tests of the Dynamo worker run against. Their Debian packages are unpacked into the cache, not installed: no service starts, and the system stays as it is.
import { existsSync, mkdirSync, mkdtempSync, readdirSync, renameSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { cacheDir } from "./paths.mjs";
import { output, say } from "./run.mjs";

/** package -> where its program lies, how to ask whether it runs, and the variable by which tests find it */
const SERVERS = [
  { package: "etcd-server", program: "usr/bin/etcd", variable: "LAYERSCALE_TEST_ETCD", tests: "etcd discovery" },
  { package: "nats-server", program: "usr/sbin/nats-server", variable: "LAYERSCALE_TEST_NATS", tests: "the NATS request and event planes" },
  { package: "prometheus", program: "usr/bin/prometheus", variable: "LAYERSCALE_TEST_PROMETHEUS", tests: "the dashboard's queries" },
];
const MINUTE_MS = 60_000;

const runs = (path) => output(path, ["--version"], { timeout: MINUTE_MS }) !== null;

/** Unpacks a package of this system's own Debian release. @returns path of its program, or null */
function unpack(server) {
  const home = join(cacheDir, "packages", `${server.package}-${process.arch}`);
  const path = join(home, server.program);
  if (existsSync(path)) return path;
  if (output("apt-get", ["--version"]) === null || output("dpkg-deb", ["--version"]) === null) return null;
  say(`fetching ${server.package} (Debian package, once)`);
  const work = mkdtempSync(join(tmpdir(), "layerscale-package-"));
  const options = { cwd: work, timeout: 5 * MINUTE_MS };
  try {
    // Package lists are often absent from images; only root may fetch them.
    if (output("apt-get", ["download", "-q", server.package], options) === null) {
      output("apt-get", ["update", "-q"], options);
      if (output("apt-get", ["download", "-q", server.package], options) === null) return null;
    }
    const [file] = readdirSync(work).filter((name) => name.endsWith(".deb"));
    if (file === undefined || output("dpkg-deb", ["-x", file, "root"], options) === null) return null;
    const unpacked = join(work, "root");
    if (!runs(join(unpacked, server.program))) return null;
    mkdirSync(join(cacheDir, "packages"), { recursive: true });
    rmSync(home, { recursive: true, force: true });
    // Copied first: the cache may be on another file system, and a run beside this one must not see half of it.
    const part = `${home}.part-${process.pid}`;
    if (output("cp", ["-a", unpacked, part]) === null) return null;
    renameSync(part, home);
    return path;
  } finally {
    rmSync(work, { recursive: true, force: true });
  }
}

/**
 * The servers that this machine has or can get: by their variable, on the path, in the cache, or from Debian.
 * @returns {{ env: Record<string, string>, missing: string[] }} `missing`: one line each, with what is left out
 */
export function ensureServers() {
  const env = {};
  const missing = [];
  for (const server of SERVERS) {
    const name = server.program.split("/").at(-1);
    const path = [process.env[server.variable], name].find((candidate) => candidate && runs(candidate)) ?? unpack(server);
    if (path === null) missing.push(`${name} is missing (on Debian: apt-get install ${server.package}); tests of ${server.tests} are left out`);
    else env[server.variable] = path;
  }
  return { env, missing };
}
