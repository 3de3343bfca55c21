// npm start: install, build, get the default model, serve it. A second start finds all of that done and only serves.
import { spawn } from "node:child_process";
import { build } from "./build.mjs";
import { ensureModel } from "./lib/model.mjs";
import { COMMUNITY_KEY, executable } from "./lib/paths.mjs";
import { die, say } from "./lib/run.mjs";

const READY_LIMIT_MS = 120_000;

try {
  await build();
  const model = await ensureModel();
  const args = process.argv.slice(2);
  const port = flag(args, "--port") ?? (process.env.LAYERSCALE_PORT || "8080");
  const host = flag(args, "--host") ?? (process.env.LAYERSCALE_HOST || "127.0.0.1");
  say(`starting layerscale serve on http://${host}:${port}`);
  // What was built is the CPU library; a visible GPU would make a start without the other one a refusal. A later flag wins.
  const server = spawn(executable, ["serve", "--model", model, "--host", host, "--port", port, "--device", "cpu", ...args], {
    stdio: "inherit",
    env: { ...process.env, LAYERSCALE_LICENSE_KEY: process.env.LAYERSCALE_LICENSE_KEY || COMMUNITY_KEY },
  });
  for (const signal of ["SIGINT", "SIGTERM"]) process.on(signal, () => server.kill(signal));
  server.on("error", (error) => die(`${executable} cannot be started: ${error.message}`));
  server.on("exit", (code, signal) => process.exit(signal ? 1 : code));
  try {
    await ready(`http://${host}:${port}`);
  } catch (error) {
    server.kill("SIGTERM");
    throw error;
  }
  say(`ready. Try:

  curl http://${host}:${port}/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{"messages":[{"role":"user","content":"What is the capital of France?"}],"max_tokens":64,"temperature":0}'

Stop with Ctrl-C.`);
} catch (error) {
  die(error.message);
}

/** Value of `--name VALUE` or `--name=VALUE`; the last one counts. */
function flag(args, name) {
  const found = args.findLastIndex((word) => word === name || word.startsWith(`${name}=`));
  if (found < 0) return undefined;
  return args[found] === name ? args[found + 1] : args[found].slice(name.length + 1);
}

/** Waits for /health 200; a server that ends first ends this script through its exit handler. */
async function ready(base) {
  const deadline = Date.now() + READY_LIMIT_MS;
  while (Date.now() < deadline) {
    const status = await fetch(`${base}/health`).then((response) => response.status, () => 0);
    if (status === 200) return;
    await new Promise((resolve) => setTimeout(resolve, 50));
  }
  throw new Error(`the server was not ready after ${READY_LIMIT_MS / 1000} s`);
}
