// What the demonstrations share: the real Dynamo frontend and LayerScale workers on file discovery, all on loopback, every wait bounded.
import { spawn } from "node:child_process";
import { createWriteStream, mkdirSync, mkdtempSync, readFileSync, rmSync } from "node:fs";
import { createServer } from "node:net";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { build } from "../build.mjs";
import { ensureModel } from "./model.mjs";
import { COMMUNITY_KEY, executable } from "./paths.mjs";
import { ensureDynamoVenv } from "./python-env.mjs";
import { say } from "./run.mjs";

export const NAME = "SmolLM2-135M-Instruct";
const START_MS = 120_000;
const ANSWER_MS = 120_000;
/** A worker waits out Dynamo's grace period of 5 s. */
const STOP_MS = 30_000;

/** The caller's settings for a Dynamo of their own stay out of the demo. */
const inherited = Object.fromEntries(Object.entries(process.env).filter(([name]) => !/^(DYN|ETCD|NATS|POD)_/.test(name)));

/** A program with its output in a log file, ended by its own pid. */
class Program {
  constructor(name, work, command, args, env) {
    this.name = name;
    this.log = join(work, `${name.replaceAll(" ", "-")}.log`);
    const out = createWriteStream(this.log);
    this.child = spawn(command, args, { env: { ...inherited, ...env }, stdio: ["ignore", "pipe", "pipe"] });
    this.child.stdout.pipe(out, { end: false });
    this.child.stderr.pipe(out, { end: false });
    this.ended = new Promise((resolve) => {
      this.child.on("error", (error) => resolve({ code: 127, why: error.message }));
      this.child.on("exit", (code, signal) => resolve({ code, why: signal ?? `exit code ${code}` }));
    });
    void this.ended.then((end) => (this.end = end));
  }
  fail(what) {
    const tail = readFileSync(this.log, "utf8").trim().split("\n").slice(-15).join("\n");
    throw new Error(`${this.name} ${what}; its last lines:\n${tail}`);
  }
  /** SIGTERM, then SIGKILL when the time is over. Returns the exit code, null when it had to be killed. */
  async stop() {
    if (!this.end) this.child.kill("SIGTERM");
    const end = await within(this.ended, STOP_MS);
    if (end !== null) return end.code;
    this.child.kill("SIGKILL");
    await within(this.ended, 5_000);
    return null;
  }
}

/** The promise's value, or null after the time. */
function within(promise, ms) {
  let timer;
  return Promise.race([promise, new Promise((resolve) => (timer = setTimeout(() => resolve(null), ms)))]).finally(() => clearTimeout(timer));
}

async function freePort() {
  const server = createServer();
  await new Promise((resolve) => server.listen(0, "127.0.0.1", resolve));
  const { port } = server.address();
  await new Promise((resolve) => server.close(resolve));
  return port;
}

const ok = (url) => async () => (await fetch(url, { signal: AbortSignal.timeout(5_000) })).ok;

/** A frontend and its workers. */
class Demo {
  constructor() {
    this.work = mkdtempSync(join(tmpdir(), "layerscale-demo-"));
    const kv = join(this.work, "kv");
    mkdirSync(kv);
    this.loopback = { DYN_DISCOVERY_BACKEND: "file", DYN_FILE_KV: kv, DYN_TCP_RPC_HOST: "127.0.0.1", DYN_TCP_RESPONSE_STREAM_HOST: "lo", POD_IP: "127.0.0.1" };
    this.programs = [];
    this.base = "";
  }

  async waitFor(what, check) {
    const deadline = Date.now() + START_MS;
    for (;;) {
      for (const program of this.programs) if (program.end) program.fail(`ended while waiting until ${what} (${program.end.why})`);
      if (await check().catch(() => false)) return;
      if (Date.now() > deadline) this.programs[0].fail(`did not get so far in ${START_MS / 1000} s: ${what}`);
      await new Promise((resolve) => setTimeout(resolve, 100));
    }
  }

  /** Builds what is needed and starts the frontend. */
  async frontend() {
    await build();
    this.model = await ensureModel();
    const python = await ensureDynamoVenv();
    const http = await freePort();
    this.base = `http://127.0.0.1:${http}`;
    say(`starting the Dynamo frontend on ${this.base}`);
    const args = ["-m", "dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", String(http), "--router-mode", "kv"];
    this.programs.push(new Program("frontend", this.work, python, args, { ...this.loopback, HF_HUB_OFFLINE: "1" }));
  }

  /** Starts a worker; ready when this resolves. Workers stop before the frontend. Returns the address of its system server. */
  async worker(name, ...args) {
    say(`starting a LayerScale ${name} with ${NAME}`);
    const system = await freePort();
    const env = { ...this.loopback, DYN_SYSTEM_PORT: String(system), DYN_SYSTEM_HOST: "127.0.0.1", LAYERSCALE_LICENSE_KEY: process.env.LAYERSCALE_LICENSE_KEY || COMMUNITY_KEY };
    this.programs.unshift(new Program(name, this.work, executable, ["dynamo", "--model", this.model, "--served-model-name", NAME, "--device", "cpu", ...args], env));
    await this.waitFor(`the ${name} is ready`, ok(`http://127.0.0.1:${system}/health`));
    return `http://127.0.0.1:${system}`;
  }

  async served() {
    await this.waitFor("the frontend lists the model", async () => (await (await fetch(`${this.base}/v1/models`)).json()).data.some((item) => item.id === NAME));
    // Listed models may still be in preparation for a moment.
    await this.waitFor("the frontend serves the model", async () => {
      const body = JSON.stringify({ model: NAME, prompt: "a", max_tokens: 1 });
      return (await fetch(`${this.base}/v1/completions`, { method: "POST", headers: { "content-type": "application/json" }, body, signal: AbortSignal.timeout(ANSWER_MS) })).ok;
    });
  }

  /** Prints the answer while it streams; returns its text and usage. */
  async ask(question) {
    const response = await fetch(`${this.base}/v1/chat/completions`, {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: JSON.stringify({ model: NAME, messages: [{ role: "user", content: question }], max_tokens: 128, temperature: 0, stream: true, stream_options: { include_usage: true } }),
      signal: AbortSignal.timeout(ANSWER_MS),
    });
    if (!response.ok) throw new Error(`the frontend answered ${response.status}: ${await response.text()}`);
    let text = "";
    let usage = null;
    let pending = "";
    const decoder = new TextDecoder();
    for await (const bytes of response.body) {
      const lines = (pending + decoder.decode(bytes, { stream: true })).split("\n");
      pending = lines.pop();
      for (const line of lines) {
        if (!line.startsWith("data: ") || line === "data: [DONE]") continue;
        const event = JSON.parse(line.slice(6));
        if (event.error) throw new Error(`the stream ended with ${JSON.stringify(event.error)}`);
        const piece = event.choices?.[0]?.delta?.content ?? "";
        process.stdout.write(piece);
        text += piece;
        usage = event.usage ?? usage;
      }
    }
    process.stdout.write("\n");
    if (text.trim() === "") throw new Error("the answer is empty");
    return { text, usage };
  }

  /** Stops workers, then the frontend. Returns whether every worker ended well. */
  async stop() {
    let well = true;
    // The workers first: they leave discovery, wait out the grace period and exit 0.
    for (const program of this.programs) {
      say(`stopping the ${program.name}`);
      const end = await program.stop();
      if (program.name === "frontend" || end === 0) continue;
      process.stderr.write(`error: the ${program.name} ended with ${end === null ? "SIGKILL" : `exit code ${end}`}\n`);
      well = false;
    }
    return well;
  }
}

/** Runs a demonstration and ends the process: 0 when the answer came and all programs stopped. */
export async function runDemo(body) {
  const demo = new Demo();
  const interrupted = new Promise((_, reject) => {
    for (const signal of ["SIGINT", "SIGTERM"]) process.once(signal, () => reject(new Error(`interrupted by ${signal}`)));
  });
  interrupted.catch(() => {});
  let code = 0;
  try {
    await Promise.race([body(demo), interrupted]);
  } catch (error) {
    process.stderr.write(`error: ${error.message}\n`);
    code = 1;
  }
  if (!(await demo.stop())) code = 1;
  if (code === 0) rmSync(demo.work, { recursive: true, force: true });
  else process.stderr.write(`logs are in ${demo.work}\n`);
  if (code === 0) say("done");
  process.exit(code);
}
