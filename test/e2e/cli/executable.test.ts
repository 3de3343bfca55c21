import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { copyFileSync, existsSync, mkdirSync, mkdtempSync, readdirSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";

const executable = process.env.LAYERSCALE_TEST_EXECUTABLE!;
const gguf = process.env.LAYERSCALE_TEST_GGUF!;
const key = process.env.LAYERSCALE_LICENSE_KEY!;
const EXPIRED =
  "LSK-eyJpZCI6ImV4cGlyZWQtZXhhbXBsZSIsInRpZXIiOiJwcm8iLCJzZXNzaW9ucyI6NjQsImlhdCI6IjIwMjUtMDEtMDEiLCJleHAiOiIyMDI1LTEyLTMxIn0.6NGPRNi2pHY_I-wlPtgZY9CYoHZKRbnJ25ttneWFePkFg7F74849uezORsjq_WZuHqcgkpHyI_p17S1qjiVEDw";

let folder: string;
beforeAll(() => {
  folder = mkdtempSync(join(tmpdir(), "layerscale-alone-"));
  copyFileSync(executable, join(folder, "layerscale"));
});
afterAll(() => rmSync(folder, { recursive: true, force: true }));

/** Runs the copied file with nothing but what is given in its environment. */
function run(args: string[], env: Record<string, string> = {}) {
  const result = Bun.spawnSync([join(folder, "layerscale"), ...args], { cwd: folder, env: { PATH: process.env.PATH!, TMPDIR: folder, ...env }, timeout: 60_000 });
  return { code: result.exitCode, out: result.stdout.toString(), err: result.stderr.toString() };
}

describe("the executable, alone in a folder", () => {
  test("--version needs no licence and names version, commit, ABI and devices", () => {
    const { code, out } = run(["--version"]);
    expect(code).toBe(0);
    expect(out).toMatch(/^layerscale \d+\.\d+\.\d+ \(commit [0-9a-f]{7,}|unknown\)/);
    expect(out).toMatch(/ABI \d+/);
    expect(out).toMatch(/devices: cpu/);
  });

  test.each([
    [["--help"]], [["serve", "--help"]], [["dynamo", "--help"]], [["--model", "x"]], [["--nonsense"]], [["dynamo", "--ctx", "bad"]],
  ])("without a key, %p says so and ends with 78", (args) => {
    const { code, out, err } = run(args);
    expect(code).toBe(78);
    expect(out).toBe("");
    expect(err.trim().split("\n")).toEqual([expect.stringContaining("no key given")]);
  });

  test("each bad key has its own line", () => {
    const lines = [["x"], [EXPIRED], [key.slice(0, -8) + "AAAAAAA" + "A"]].map(([bad]) => run(["--help", "--license-key", bad!]));
    expect(lines.map((line) => line.code)).toEqual([78, 78, 78]);
    expect(lines.map((line) => line.err.trim().split("\n").length)).toEqual([1, 1, 1]);
    expect(new Set(lines.map((line) => line.err)).size).toBe(3);
  });

  test("the flag beats the variable", () => {
    expect(run(["--help", "--license-key", key], { LAYERSCALE_LICENSE_KEY: "x" }).code).toBe(0);
    expect(run(["--help", "--license-key", "x"], { LAYERSCALE_LICENSE_KEY: key }).code).toBe(78);
  });

  test("no subcommand is serve; help of serve shows no Dynamo option", () => {
    const env = { LAYERSCALE_LICENSE_KEY: key };
    expect(run(["--help"], env).out).toContain("layerscale [serve] --model");
    expect(run(["serve", "--help"], env).out).not.toMatch(/DYN_|--namespace/);
    expect(run(["serve", "--help"], env).out).toMatch(/HF_HUB_CACHE/);
    expect(run(["dynamo", "--help"], env).out).toMatch(/Engine options[^]*Worker options/);
  });

  test.each([
    [["--model", "no/such-repo"], 1, /--model no\/such-repo: HF_HUB_OFFLINE is set and no commit of revision "main" is known/],
    [["--model", "./no/such-folder"], 1, /"\.\/no\/such-folder" does not exist/],
    [["--modle", "x"], 2, /--modle.*did you mean --model/],
    [["--model", "x", "--tp", "4"], 2, /--tp.*"4"/],
    [["--model", "x", "--kv-cache-dtype", "int3"], 2, /--kv-cache-dtype.*"int3"/],
    [["--model", "x", "--speculative-algorithm", "NGRAM"], 2, /--speculative-algorithm.*"NGRAM"/],
    [["dynamo", "--model", "x", "--disaggregation-mode", "encode"], 2, /no separate encoder/],
  ])("%p is refused in one line with code %d", (args, code, line) => {
    const result = run(args, { LAYERSCALE_LICENSE_KEY: key, DYN_DISCOVERY_BACKEND: "file", DYN_FILE_KV: join(folder, "kv"), HF_HOME: join(folder, "hf"), HF_HUB_OFFLINE: "1" });
    const errors = result.err.trim().split("\n").filter((text) => !text.startsWith("{"));
    expect(errors).toEqual([expect.stringMatching(line)]);
    expect(result.code).toBe(code);
  });

  test.each(["directory", "fifo"])("a chat template that is a %s is refused at once, in one line", (kind) => {
    const template = join(folder, `template-${kind}`);
    if (kind === "fifo") expect(Bun.spawnSync(["mkfifo", template]).exitCode).toBe(0);
    else mkdirSync(template);
    const env = { LAYERSCALE_LICENSE_KEY: key, DYN_DISCOVERY_BACKEND: "file", DYN_FILE_KV: join(folder, "kv"), DYN_TCP_RPC_HOST: "127.0.0.1" };
    const result = run(["dynamo", "--model", gguf, "--custom-jinja-template", template], env);
    expect(result.err.trim().split("\n").filter((text) => !text.startsWith("{"))).toEqual([expect.stringContaining("expected a regular file")]);
    expect(result.code).toBe(2);
  });

  test("a .env file beside it changes nothing", () => {
    writeFileSync(join(folder, ".env"), `LAYERSCALE_LICENSE_KEY=${key}\n`);
    expect(run(["--help"]).code).toBe(78);
    rmSync(join(folder, ".env"));
  });

  test("starts leave at most one copy of the native library behind, and it is reused", () => {
    const temporary = join(folder, "tmp");
    mkdirSync(temporary);
    for (let i = 0; i < 5; i++) expect(run(["--version"], { TMPDIR: temporary }).code).toBe(0);
    const libraries = readdirSync(temporary, { recursive: true }).map(String).filter((name) => name.endsWith(".so"));
    expect(libraries.length).toBeLessThanOrEqual(1);
  });

  test("a forced instruction set that the machine lacks, or nobody knows, is refused by name", () => {
    const { code, err } = run(["--model", gguf, "--port", "0"], { LAYERSCALE_LICENSE_KEY: key, LAYERSCALE_CPU_ISA: "sse9" });
    expect(code).toBe(1);
    expect(err).toContain("LAYERSCALE_CPU_ISA");
    expect(err).toContain("sse9");
  });

  test("an address space too small is told as one: by name, value and what was expected", () => {
    const limited = (kib: number) => {
      const command = ["bash", "-c", `ulimit -v ${kib}; exec "$@"`, "_", join(folder, "layerscale"), "--model", gguf, "--port", "0"];
      const { exitCode, stderr } = Bun.spawnSync(command, { cwd: folder, env: { PATH: process.env.PATH!, TMPDIR: folder, LAYERSCALE_LICENSE_KEY: key }, timeout: 60_000 });
      return { code: exitCode, last: stderr.toString().trim().split("\n").at(-1)! };
    };
    expect(limited(400_000)).toEqual({ code: 1, last: "error: cannot load the native library: this process cannot map memory for machine code: its address space is limited to 400000 KiB (ulimit -v), expected unlimited" });
  });

  test("a host that is none is refused before anything is opened", () => {
    for (const host of ["é", "999.1.1.1"]) {
      const { code, err } = run(["--model", gguf, "--host", host], { LAYERSCALE_LICENSE_KEY: key });
      expect([code, err]).toEqual([2, `error: --host / LAYERSCALE_HOST: expected an IP address or a name of this machine, got "${host}"\n`]);
    }
  });

  test("the model under test is there", () => expect(existsSync(gguf)).toBe(true));
});
