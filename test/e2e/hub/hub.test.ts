import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { existsSync, readdirSync, readFileSync, rmSync, statSync } from "node:fs";
import { join } from "node:path";
import { eventually, launch, Launched, program, required } from "../../support/launch.ts";
import { errorLines, Hub, SMOL, TINY } from "./support.ts";

let hub: Hub;
beforeAll(async () => {
  hub = await Hub.start();
});
afterAll(() => hub[Symbol.asyncDispose]());

function emptyCache(): void {
  rmSync(join(hub.home, "hf"), { recursive: true, force: true });
  hub.server.asked.length = 0;
  hub.server.pace = null;
  hub.server.fault = () => false;
}

const gguf = () => hub.server.repos.get(SMOL)!.files.get("smol.Q4_1.gguf")!;
const partial = () => join(hub.cache, "models--acme--smol-gguf/blobs", `${gguf().etag}.incomplete`);
const partialBytes = () => (existsSync(partial()) ? statSync(partial()).size : 0);

describe("one cache for huggingface_hub and for us", () => {
  test("what we download is served, and found by huggingface_hub and transformers without a hub", async () => {
    emptyCache();
    const { commit, files } = hub.server.repos.get(TINY)!;
    {
      await using server = hub.serve(TINY);
      const { model, url } = await server.log("ready");
      expect(model).toBe(TINY);
      const answer = await (await fetch(`${String(url)}/v1/completions`, { method: "POST", body: JSON.stringify({ prompt: "a", max_tokens: 4, temperature: 0 }) })).json();
      expect(answer).toMatchObject({ model: TINY, usage: { completion_tokens: expect.any(Number) } });
    }
    hub.server.asked.length = 0;
    const offline = { HF_HUB_OFFLINE: "1" };
    const { path } = await hub.python("snapshot", TINY, offline);
    expect(path).toBe(join(hub.cache, "models--acme--tiny/snapshots", commit));
    expect(readdirSync(path as string).sort()).toEqual([...files.keys()].sort());
    expect(hub.differing(TINY, path as string)).toEqual([]);
    expect(await hub.python("scan", TINY, offline)).toEqual({ warnings: [], repos: [{ id: TINY, type: "model", refs: ["main"], files: [...files.keys()].sort() }] });
    expect((await hub.python("tokenize", TINY, offline)).ids.length).toBeGreaterThan(0);
    expect(hub.server.asked).toEqual([]);
    // And with a hub it has nothing left to fetch.
    expect((await hub.python("snapshot", TINY)).path).toBe(path);
    expect(hub.server.paths("GET").filter((asked) => asked.includes("/resolve/"))).toEqual([]);
  });

  test("what huggingface_hub downloaded is served without a request", async () => {
    emptyCache();
    const { path } = await hub.python("snapshot", TINY);
    hub.server.asked.length = 0;
    for (const [model, env] of [[TINY, { HF_HUB_OFFLINE: "1" }], [`${TINY}@${hub.server.repos.get(TINY)!.commit}`, {}]] as const) {
      await using server = hub.serve(model, { env });
      expect((await server.log("ready")).model).toBe(TINY);
    }
    expect(hub.server.asked).toEqual([]);
    expect(hub.differing(TINY, path as string)).toEqual([]);
  });

  test("both at once into the same cache", async () => {
    emptyCache();
    hub.server.pace = { bytes: 20_000, ms: 20 };
    await using server = hub.serve(TINY);
    const [{ path }] = await Promise.all([hub.python("snapshot", TINY), server.log("ready")]);
    expect(hub.differing(TINY, path as string)).toEqual([]);
    expect((await hub.python("scan", TINY)).warnings).toEqual([]);
  });
});

describe("a download that is stopped", () => {
  test("killed ten times at random points it ends with the right bytes, each fetched about once", async () => {
    emptyCache();
    const { bytes, etag } = gguf();
    hub.server.pace = { bytes: 1 << 20, ms: 5 };
    const points = Array.from({ length: 10 }, () => Math.floor(Math.random() * bytes.length * 0.95)).sort((a, b) => a - b);
    for (const point of points) {
      await using server = hub.serve(SMOL);
      await eventually(() => {
        if (!server.running) throw new Error(`ended by itself: ${server.stderr.slice(-2000)}`);
        return partialBytes() > point;
      }, `more than ${point} bytes of ${points.join(" ")}`);
      server.signal("SIGKILL");
      await server.exit();
      expect(existsSync(join(hub.cache, "models--acme--smol-gguf/blobs", etag))).toBe(false);
    }
    hub.server.pace = null;
    const left = partialBytes();
    await using server = hub.serve(SMOL);
    await server.log("ready");
    expect(readFileSync(join(hub.cache, "models--acme--smol-gguf/blobs", etag)).equals(bytes)).toBe(true);
    expect(hub.server.asked.filter(({ origin }) => origin === "files").at(-1)!.range).toBe(`bytes=${left}-`);
    expect(existsSync(partial())).toBe(false);
  });

  test.each(["SIGTERM", "SIGINT"] as const)("%s ends it at once with 0; health says 503 until then, and the next start goes on", async (signal) => {
    emptyCache();
    hub.server.pace = { bytes: 1 << 18, ms: 20 };
    {
      await using server = hub.serve(SMOL);
      const { url } = await server.log("listening");
      await eventually(() => partialBytes() > 1 << 20, "some bytes");
      expect((await fetch(`${String(url)}/health`)).status).toBe(503);
      server.signal(signal);
      expect(await server.exit()).toBe(0);
      expect(errorLines(server)).toEqual([]);
    }
    const left = partialBytes();
    expect(left).toBeGreaterThan(1 << 20);
    hub.server.pace = null;
    await using server = hub.serve(SMOL);
    await server.log("ready");
    expect(hub.server.asked.filter(({ origin }) => origin === "files").at(-1)!.range).toBe(`bytes=${left}-`);
  });
});

describe("what a start says", () => {
  test("progress as log lines, or as a bar on a terminal", async () => {
    emptyCache();
    {
      await using server = hub.serve(TINY);
      await server.log("ready");
      expect(server.logs.map(({ message }) => message).filter((message) => message.startsWith("download"))).toEqual(["download starts", "download complete", "download starts", "download complete"]);
      expect(server.logs.filter(({ message }) => message === "download starts").at(-1)).toMatchObject({ repo: TINY, files: 2, bytesTotal: expect.any(Number) });
    }
    emptyCache();
    hub.server.pace = { bytes: 1 << 19, ms: 10 };
    // script(1) is not everywhere; Python has terminals.
    const terminal = "import os,pty,sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))";
    await using shown = Launched.command([required("LAYERSCALE_TEST_PYTHON"), "-c", terminal, ...program(), "serve", "--model", SMOL, "--port", "0"], { env: { ...hub.env, LAYERSCALE_LICENSE_KEY: required("LAYERSCALE_LICENSE_KEY") } });
    await eventually(() => /acme\/smol-gguf \[#+-*\] \d+% [\d.]+ MB of [\d.]+ MB, [\d.]+ [kM]B\/s, \d+:\d\d left/.test(shown.stdout), "a bar with rate and time left");
  });

  test.each([
    ["missing", "acme/absent", {}, /^error: --model acme\/absent: .* knows no such repo/],
    ["gated", "acme/gated", {}, /^error: --model acme\/gated: access to this repo is gated/],
    ["another revision", `${TINY}@v9`, {}, /^error: --model acme\/tiny@v9: the repo has no revision "v9"/],
    ["offline", TINY, { HF_HUB_OFFLINE: "1" }, /^error: --model acme\/tiny: HF_HUB_OFFLINE is set/],
    ["a path", "./absent", {}, /^error: --model: "\.\/absent" does not exist/],
  ])("%s: one line and exit code 1", async (_name, model, env, line) => {
    emptyCache();
    hub.server.add("acme/gated", { "config.json": "{}" }, { readers: [], gated: true });
    for (const command of ["serve", "dynamo"]) {
      await using process = launch([command, "--model", model, ...(command === "serve" ? ["--port", "0"] : [])], { env: { ...hub.env, DYN_DISCOVERY_BACKEND: "mem", DYN_TCP_RPC_HOST: "127.0.0.1", ...env } });
      expect(await process.exit()).toBe(1);
      expect(errorLines(process)).toEqual([expect.stringMatching(line)]);
    }
  });

  test("a model that cannot be served is refused before its weights are fetched", async () => {
    emptyCache();
    const files = Object.fromEntries([...hub.server.repos.get(TINY)!.files].map(([name, { bytes }]) => [name, bytes]));
    const config = JSON.parse(files["config.json"]!.toString()) as Record<string, unknown>;
    hub.server.add("acme/mamba", { ...files, "config.json": JSON.stringify({ ...config, architectures: ["MambaForCausalLM"], model_type: "mamba" }) });
    await using server = hub.serve("acme/mamba");
    expect(await server.exit()).toBe(1);
    expect(errorLines(server)).toEqual([expect.stringContaining("MambaForCausalLM")]);
    expect(hub.server.asked.filter(({ path }) => path.endsWith(".safetensors"))).toEqual([]);
  });
});
