// npm test: sets up what the tests need and runs all of them. The last line counts: `N passed, N failed`.
//   --only check,native,cuda,unit,e2e   some groups        --proofs   the long versions too        -t NAME   only TypeScript tests with this name
import { spawn } from "node:child_process";
import { existsSync, mkdirSync, mkdtempSync, readdirSync, readFileSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { build } from "./build.mjs";
import { assembleImage } from "./image.mjs";
import { rootfs } from "./lib/image.mjs";
import { ensureKubeApiServer } from "./lib/kubernetes.mjs";
import { ensureModel } from "./lib/model.mjs";
import { ensureServers } from "./lib/packages.mjs";
import { cacheDir, COMMUNITY_KEY, executable, root } from "./lib/paths.mjs";
import { dynamoEnvironments, DYNAMO_VERSIONS } from "./lib/python-env.mjs";
import { die, say } from "./lib/run.mjs";

const args = process.argv.slice(2);
const option = (name) => (args.includes(name) ? args[args.indexOf(name) + 1] : undefined);
const groups = option("--only")?.split(",") ?? ["check", "native", "cuda", "unit", "e2e"];
const total = { passed: 0, failed: 0 };
const failures = [];
const work = mkdtempSync(join(tmpdir(), "layerscale-test-"));

/** Runs a program with output passed through, or kept when `quiet`; returns its exit code and text. Every run is bounded. */
function program(command, commandArgs, env = {}, limitSeconds = 1200, quiet = false) {
  return new Promise((resolve) => {
    const child = spawn(command, commandArgs, { cwd: root, env: { ...process.env, ...env }, stdio: ["ignore", "pipe", "pipe"] });
    let text = "";
    const timer = setTimeout(() => child.kill("SIGKILL"), limitSeconds * 1000);
    for (const stream of [child.stdout, child.stderr])
      stream.on("data", (data) => {
        text += data;
        if (!quiet) process.stdout.write(data);
      });
    child.on("error", (error) => resolve({ code: 127, text: `${command}: ${error.message}` }));
    child.on("close", (code) => {
      clearTimeout(timer);
      resolve({ code: code ?? 1, text });
    });
  });
}

function count(name, passed, failed) {
  total.passed += passed;
  total.failed += failed;
  if (failed) failures.push(`${name}: ${failed} failed`);
}

/** One step that either works or not, counted as one test. */
async function step(name, body) {
  say(name);
  try {
    await body();
    count(name, 1, 0);
    return true;
  } catch (error) {
    process.stdout.write(`not ok ${name}: ${error.message}\n`);
    count(name, 0, 1);
    return false;
  }
}

async function bunTask(bun, ...words) {
  const { code } = await program(bun, [join(root, "build.ts"), ...words]);
  if (code !== 0) throw new Error(`build.ts ${words.join(" ")} ended with exit code ${code}`);
}

/** Calls `body` for all of them, two at a time: most native tests keep one core busy. */
async function inPairs(items, body) {
  const left = [...items];
  const lane = async () => {
    for (let item = left.shift(); item !== undefined; item = left.shift()) await body(item);
  };
  await Promise.all([lane(), lane()]);
}

/** Native test programs print `N passed, N failed`; the kernels' ones walk every instruction set the machine has, and the emulated ones. */
async function nativeTests(bun, flavours) {
  for (const [flavour, task] of flavours) {
    if (!(await step(`native tests build (${flavour})`, () => bunTask(bun, task)))) continue;
    await inPairs(JSON.parse(readFileSync(join(root, "dist", `native-tests-${flavour}.json`), "utf8")), async (test) => {
      const name = `${flavour} ${test.name}`;
      say(name);
      const [command, ...words] = test.command;
      const { code, text } = await program(command, words, { ASAN_OPTIONS: "detect_leaks=1", UBSAN_OPTIONS: "halt_on_error=1:print_stacktrace=1" }, 600, true);
      process.stdout.write(`${name}:\n${text}`);
      const found = [...text.matchAll(/^(\d+) passed, (\d+) failed$/gm)].pop();
      // Fuzzers and the check of exported symbols are one test each: they tell by their exit code.
      const [passed, failed] = found ? [Number(found[1]), Number(found[2])] : code === 0 ? [1, 0] : [0, 1];
      count(name, passed, code !== 0 && failed === 0 ? 1 : failed);
    });
  }
}

/** `bun test` with a JUnit report, which has the counts. A file that cannot be loaded counts as a failure. */
async function bunTests(bun, name, folders, env, limitSeconds) {
  for (const folder of folders) if (!existsSync(join(root, folder)) || readdirSync(join(root, folder)).length === 0) throw new Error(`${folder} holds no tests`);
  say(`${name} tests`);
  const report = join(work, `${name}.xml`);
  const filter = option("-t") ? ["-t", option("-t")] : [];
  const { code, text } = await program(bun, ["test", ...folders.map((folder) => `./${folder}`), "--timeout=120000", "--reporter=junit", `--reporter-outfile=${report}`, ...filter], env, limitSeconds);
  const xml = existsSync(report) ? readFileSync(report, "utf8") : "";
  const root_ = /<testsuites[^>]*\btests="(\d+)"[^>]*\bfailures="(\d+)"/.exec(xml);
  const skipped = Number(/<testsuites[^>]*\bskipped="(\d+)"/.exec(xml)?.[1] ?? 0);
  const tests = Number(root_?.[1] ?? 0);
  const failed = Number(root_?.[2] ?? 0);
  const broken = code !== 0 && failed === 0 ? 1 : 0;
  if (skipped) process.stdout.write(`${name}: ${skipped} left out (hardware or programs this machine lacks)\n`);
  if (broken) process.stdout.write(`not ok ${name}: bun test ended with exit code ${code}${text ? "" : " without output"}\n`);
  count(name, tests - failed - skipped, failed + broken);
}

try {
  const bun = await build();
  const has = (group) => groups.includes(group);
  const model = has("unit") || has("e2e") ? await ensureModel() : "";
  const proofs = args.includes("--proofs");
  const dynamo = has("unit") || has("e2e") ? await dynamoEnvironments(proofs && has("e2e")) : [];
  const absent = DYNAMO_VERSIONS.filter((version) => has("e2e") && !dynamo.some((word) => word.startsWith(`${version}=`)));
  if (absent.length) process.stdout.write(`tests: not with the frontends of Dynamo ${absent.join(", ")}, which are not installed; npm run proofs installs them\n`);
  const servers = has("unit") || has("e2e") ? ensureServers() : { env: {}, missing: [] };
  const kube = has("e2e") ? await ensureKubeApiServer() : { env: {}, missing: [] };
  for (const line of [...servers.missing, ...kube.missing]) process.stdout.write(`tests: ${line}\n`);
  mkdirSync(join(cacheDir, "test-models"), { recursive: true });
  const env = {
    LAYERSCALE_TEST_GGUF: model,
    LAYERSCALE_TEST_PYTHON: dynamo[0]?.split("=")[1] ?? "",
    LAYERSCALE_TEST_DYNAMO: dynamo.join(" "),
    LAYERSCALE_TEST_EXECUTABLE: executable,
    LAYERSCALE_TEST_ROOTFS: rootfs,
    LAYERSCALE_TEST_MODELS: join(cacheDir, "test-models"),
    LAYERSCALE_LICENSE_KEY: COMMUNITY_KEY,
    ...servers.env,
    ...kube.env,
    ...(proofs ? { LAYERSCALE_PROOFS: "1" } : {}),
    // All traffic of tests stays on loopback.
    DYN_TCP_RPC_HOST: "127.0.0.1",
    DYN_TCP_RESPONSE_STREAM_HOST: "lo",
    POD_IP: "127.0.0.1",
  };
  if (has("check")) await step("types, lint, generated bindings", () => bunTask(bun, "check"));
  if (has("native")) await nativeTests(bun, [["release", "native-tests-release"], ["sanitize", "native-tests-sanitize"]]);
  // Kernels in the simulator, the library for all GPUs, and what the compiler made of it: no GPU is needed.
  if (has("cuda")) await nativeTests(bun, [["cuda", "cuda-tests"]]);
  // Holds the device libraries that lie in dist/ by now, as the executable there finds them.
  if (has("e2e")) await step("the image's root file system", () => assembleImage());
  if (has("unit")) await bunTests(bun, "unit", ["test/unit"], env, 900);
  if (has("e2e")) {
    // Deployments spend much of their time waiting for leases and grace times to pass; the other half of the tests runs meanwhile.
    const others = readdirSync(join(root, "test/e2e"), { withFileTypes: true }).filter((entry) => entry.isDirectory() && entry.name !== "dynamo").map((entry) => `test/e2e/${entry.name}`);
    const seconds = proofs ? 9000 : 2000;
    await Promise.all([bunTests(bun, "e2e-dynamo", ["test/e2e/dynamo"], env, seconds), bunTests(bun, "e2e", others, env, seconds)]);
  }
} catch (error) {
  die(`${error.stack ?? error}\n0 passed, 1 failed`);
} finally {
  rmSync(work, { recursive: true, force: true });
}
for (const failure of failures) process.stdout.write(`FAILED ${failure}\n`);
process.stdout.write(`${total.passed} passed, ${total.failed} failed\n`);
process.exit(total.failed || !total.passed ? 1 : 0);
