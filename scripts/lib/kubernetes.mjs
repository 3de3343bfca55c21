// A real Kubernetes API server for the tests of discovery, built from its published Go modules at fixed checksums.
import { existsSync, mkdirSync, readFileSync, renameSync, rmSync } from "node:fs";
import { join } from "node:path";
import { cacheDir, contentHash, root } from "./paths.mjs";
import { output, run, say } from "./run.mjs";

const SOURCES = join(root, "scripts", "lib", "kubernetes-apiserver");
const GO_NEEDED = [1, 24];

/** Version of Kubernetes that go.mod asks for: "1.33.1". */
export const kubernetesVersion = /k8s\.io\/kubernetes v(\S+)/.exec(readFileSync(join(SOURCES, "go.mod"), "utf8"))[1];

/** The go command of the path or of the usual place of its archive, when new enough; null when there is none. */
function findGo() {
  for (const go of ["go", "/usr/local/go/bin/go"]) {
    const found = /go(\d+)\.(\d+)/.exec(output(go, ["env", "GOVERSION"]) ?? "");
    if (found && Number(found[1]) * 1000 + Number(found[2]) >= GO_NEEDED[0] * 1000 + GO_NEEDED[1]) return go;
  }
  return null;
}

const LEFT_OUT = "tests of Kubernetes discovery are left out";
const BUILD_LIMIT_MS = 45 * 60_000;

/**
 * The API server: LAYERSCALE_TEST_KUBE_APISERVER, the cache, or built once per list of sources (some minutes).
 * @returns {Promise<{ env: Record<string, string>, missing: string[] }>} `missing`: what to install, and what is left out
 */
export async function ensureKubeApiServer() {
  const found = (path) => ({ env: { LAYERSCALE_TEST_KUBE_APISERVER: path }, missing: [] });
  const missing = (text) => ({ env: {}, missing: [`${text}; ${LEFT_OUT}`] });
  if (output("openssl", ["version"]) === null) return missing("openssl is missing (on Debian: apt-get install openssl)");
  const given = process.env.LAYERSCALE_TEST_KUBE_APISERVER;
  if (given) return output(given, ["--version"]) === null ? missing(`LAYERSCALE_TEST_KUBE_APISERVER="${given}" does not run`) : found(given);
  const home = join(cacheDir, "kubernetes", `${kubernetesVersion}-${contentHash([SOURCES], [process.arch])}`);
  const path = join(home, "kube-apiserver");
  if (existsSync(path)) return found(path);
  const go = findGo();
  if (go === null) return missing(`kube-apiserver ${kubernetesVersion} is missing, and so is Go ${GO_NEEDED.join(".")} or newer to build it (https://go.dev/dl)`);
  say(`building kube-apiserver ${kubernetesVersion} (once; 6 minutes on 2 idle cores)`);
  mkdirSync(home, { recursive: true });
  const part = `${path}.part-${process.pid}`;
  try {
    // Checksums of every module are in go.sum: -mod=readonly refuses anything else.
    const env = { ...process.env, GOTOOLCHAIN: "local", GOFLAGS: "", CGO_ENABLED: "0" };
    await run(go, ["build", "-mod=readonly", "-trimpath", "-buildvcs=false", "-ldflags=-s -w", "-o", part, "."], { cwd: SOURCES, env, timeout: BUILD_LIMIT_MS });
    renameSync(part, path);
  } catch (error) {
    return missing(`kube-apiserver ${kubernetesVersion} is missing: its build failed (${error.message})`);
  } finally {
    rmSync(part, { force: true });
  }
  return found(path);
}
