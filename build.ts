/**
 * The task runner: `bun build.ts [abi | native | cuda | cuda-tests | native-tests-release | native-tests-sanitize | compile | check | all]…`.
 * Slow results are cached by content, so a second run does nothing twice.
 */
import { $ } from "bun";
import { copyFileSync, existsSync, mkdirSync, readFileSync, renameSync, rmSync, statSync, writeFileSync } from "node:fs";
import { availableParallelism } from "node:os";
import { dirname, join } from "node:path";
import { ensureCudaToolkit } from "./scripts/lib/cuda.mjs";
import { cacheDir, contentHash, dist, executable, root } from "./scripts/lib/paths.mjs";
import { say } from "./scripts/lib/run.mjs";

const LOCK_POLL_MS = 500;
const LOCK_LIMIT_MS = 30 * 60_000;
const LIBRARY = "liblayerscale_cpu.so";
const CUDA_LIBRARY = "liblayerscale_cuda.so";
const CUDA_LIBRARY_LIMIT = 60e6;
const sources = [join(root, "native"), join(root, "cpu")];
const cudaSources = [...sources, join(root, "cuda"), join(root, "scripts", "cuda-toolkit.txt")];

/** Generates src/engine/native/abi.gen.ts from native/layerscale.h. */
async function abi(): Promise<void> {
  await $`${process.execPath} scripts/abi-gen.ts`.cwd(root).quiet();
}

/** Configures and builds a CMake tree; returns the build folder. Trees are cached by sources, compiler and options. */
export async function cmakeBuild(name: string, options: string[], targets: string[], inputs = sources): Promise<string> {
  const compiler = await $`g++ -dumpfullversion -dumpmachine`.text();
  const folder = join(cacheDir, "native", `${name}-${contentHash(inputs, [compiler, ...options])}`);
  const done = join(folder, `.done-${targets.join("-")}`);
  if (existsSync(done) && madeAs(folder, "CMAKE_CACHEFILE_DIR", folder)) return folder;
  await exclusive(`${folder}.lock`, () => buildTree(folder, name, options, targets, done));
  return folder;
}

async function buildTree(folder: string, name: string, options: string[], targets: string[], done: string): Promise<void> {
  const moved = !madeAs(folder, "CMAKE_CACHEFILE_DIR", folder);
  if (existsSync(done) && !moved) return;
  say(`building ${targets.join(", ")} (${name})`);
  // CMake refuses a tree that was begun from another checkout, and one that lay under another name lists its tests there.
  if (moved || !madeAs(folder, "CMAKE_HOME_DIRECTORY", join(root, "native"))) rmSync(folder, { recursive: true, force: true });
  mkdirSync(folder, { recursive: true });
  await $`cmake -S ${join(root, "native")} -B ${folder} -DCMAKE_BUILD_TYPE=Release ${options}`.quiet();
  await $`cmake --build ${folder} -j ${availableParallelism()} ${targets.flatMap((target) => ["--target", target])}`;
  writeFileSync(done, "");
}

/** Whether a build tree was configured with this value of a path that CMake keeps. */
function madeAs(folder: string, name: string, path: string): boolean {
  const cache = join(folder, "CMakeCache.txt");
  return existsSync(cache) && readFileSync(cache, "utf8").includes(`\n${name}:INTERNAL=${path}\n`);
}

/** Two checkouts share the cached trees: one builds at a time. A lock whose process has ended is void. */
async function exclusive(lock: string, body: () => Promise<void>): Promise<void> {
  const owner = join(lock, "pid");
  mkdirSync(join(lock, ".."), { recursive: true });
  for (let waited = 0; ; waited++) {
    try {
      mkdirSync(lock);
      writeFileSync(owner, String(process.pid));
      break;
    } catch (error) {
      if ((error as NodeJS.ErrnoException).code !== "EEXIST") throw error;
    }
    if (waited === 0) say(`waiting for another build (${lock})`);
    await Bun.sleep(LOCK_POLL_MS);
    // Without a pid yet its owner has just begun; after a while it has died there.
    const pid = existsSync(owner) ? Number(readFileSync(owner, "utf8")) : 0;
    if (pid === 0 ? waited > 20 : !existsSync(`/proc/${pid}`)) rmSync(lock, { recursive: true, force: true });
    if (waited * LOCK_POLL_MS > LOCK_LIMIT_MS) throw new Error(`another build has held ${lock} for ${LOCK_LIMIT_MS / 60_000} minutes`);
  }
  try {
    await body();
  } finally {
    rmSync(lock, { recursive: true, force: true });
  }
}

async function native(): Promise<void> {
  toDist(await cmakeBuild("release", [], ["layerscale_cpu"]), LIBRARY);
}

/** Copies a built file to dist/, under its name or another, when it is another one. */
function toDist(folder: string, file: string, name = file): void {
  const target = join(dist, name);
  const built = join(folder, file);
  mkdirSync(dirname(target), { recursive: true });
  if (existsSync(target) && Buffer.compare(readFileSync(target), readFileSync(built)) === 0) return;
  copyFileSync(built, `${target}.tmp`);
  renameSync(`${target}.tmp`, target);
}

/** dist/liblayerscale_cuda.so: kernels for all architectures, from pinned compiler packages; no GPU is needed. */
async function cuda(): Promise<void> {
  const { folder } = await cudaTree(["layerscale_cuda"]);
  const bytes = statSync(join(folder, CUDA_LIBRARY)).size;
  if (bytes >= CUDA_LIBRARY_LIMIT) throw new Error(`${CUDA_LIBRARY} has ${bytes} bytes; expected less than ${CUDA_LIBRARY_LIMIT}`);
  toDist(folder, CUDA_LIBRARY);
}

async function cudaTree(targets: string[]): Promise<{ folder: string; toolkit: string }> {
  const toolkit = await ensureCudaToolkit();
  return { folder: await cmakeBuild("cuda", [`-DLS_CUDA_TOOLKIT=${toolkit}`], targets, cudaSources), toolkit };
}

/** The library, the same one over simulated kernels (dist/liblayerscale_cuda_sim.so), the tests, what bench/gpu.sh takes to a GPU, and the check of what the compiler made. */
async function cudaTests(): Promise<void> {
  await cuda();
  const { folder, toolkit } = await cudaTree(["cuda_tests", "cuda_gpu_programs", "layerscale_cuda"]);
  toDist(folder, "liblayerscale_cuda_sim.so");
  for (const [program, name] of [["cuda_gpu_checks", "gpu/checks"], ["cuda_gpu_step_bench", "gpu/step_bench"], ["cuda_sim_checks", "gpu-sim/checks"], ["cuda_step_bench", "gpu-sim/step_bench"]] as const) toDist(folder, program, name);
  // The tree lists the tests of the core too, which this task does not build.
  const tests = await ctests(folder, /^(cuda_|exports_layerscale_cuda)/);
  tests.push({ name: "machine code", command: ["node", join(root, "scripts", "cuda-report.mjs"), "check", folder, toolkit] });
  writeFileSync(join(dist, "native-tests-cuda.json"), JSON.stringify(tests, null, 1));
}

/** Builds the native tests and lists their commands, as CMake's test driver knows them, in dist/native-tests-<flavour>.json. */
async function nativeTests(flavour: "release" | "sanitize"): Promise<void> {
  const folder = await cmakeBuild(flavour, flavour === "sanitize" ? ["-DLS_SANITIZE=ON"] : [], ["all"]);
  mkdirSync(dist, { recursive: true });
  writeFileSync(join(dist, `native-tests-${flavour}.json`), JSON.stringify(await ctests(folder), null, 1));
}

async function ctests(folder: string, wanted = /^/): Promise<{ name: string; command: string[] }[]> {
  const listed = (await $`ctest --test-dir ${folder} --show-only=json-v1`.quiet().json()) as { tests: { name: string; command?: string[] }[] };
  return listed.tests.filter(({ name }) => wanted.test(name)).map(({ name, command }) => {
    // Listed without a command: its program is not where the tree says.
    if (!command?.length) throw new Error(`the program of the test ${name} is missing in ${folder}; remove that folder to build it again`);
    return { name, command };
  });
}

/** dist/layerscale: one file with the native library embedded. */
async function compile(): Promise<void> {
  const commit = (await $`git rev-parse --short=12 HEAD`.cwd(root).quiet().nothrow().text()).trim() || "unknown";
  const inputs = [join(root, "src"), join(root, "package.json"), join(root, "package-lock.json"), join(root, "build.ts"), join(dist, LIBRARY)];
  const stamp = contentHash(inputs, [commit, Bun.version]);
  const stampFile = join(dist, ".layerscale-stamp");
  if (existsSync(executable) && existsSync(stampFile) && readFileSync(stampFile, "utf8") === stamp) return;
  say("compiling dist/layerscale");
  rmSync(stampFile, { force: true });
  // Without the autoload switches the executable would read .env and bunfig.toml of whatever directory it is started in.
  await $`${process.execPath} build --compile --minify --sourcemap=none --bytecode --format=esm --no-compile-autoload-dotenv --no-compile-autoload-bunfig --define LAYERSCALE_COMMIT=${JSON.stringify(commit)} --outfile ${executable} ${join(root, "src/main.ts")}`.cwd(root).quiet();
  writeFileSync(stampFile, stamp);
}

/** Static checks: generated bindings and reference pages are fresh, types, lint, manifests, Dockerfile. */
async function check(): Promise<void> {
  await $`${process.execPath} scripts/abi-gen.ts --check`.cwd(root);
  await $`${process.execPath} scripts/docs-gen.ts --check`.cwd(root);
  await $`${join(root, "node_modules/.bin/tsc")} --noEmit`.cwd(root);
  await $`${join(root, "node_modules/.bin/oxlint")} --quiet src test bench scripts build.ts`.cwd(root);
  await $`${process.execPath} scripts/lint-manifests.ts`.cwd(root);
  await $`${process.execPath} scripts/image.mjs --lint`.cwd(root);
}

const tasks: Record<string, () => Promise<void>> = {
  abi,
  native,
  cuda,
  "cuda-tests": cudaTests,
  compile,
  check,
  "native-tests-release": () => nativeTests("release"),
  "native-tests-sanitize": () => nativeTests("sanitize"),
  all: async () => {
    await abi();
    await native();
    await compile();
  },
};

if (import.meta.main) {
  const names = process.argv.slice(2);
  for (const name of names.length ? names : ["all"]) {
    const task = tasks[name];
    if (!task) {
      console.error(`error: unknown task "${name}"; expected ${Object.keys(tasks).join(", ")}`);
      process.exit(2);
    }
    try {
      await task();
    } catch (error) {
      const shell = error as { stdout?: Buffer; stderr?: Buffer };
      console.error(`error: task ${name} failed: ${error}\n${shell.stdout ?? ""}${shell.stderr ?? ""}`);
      process.exit(1);
    }
  }
}
