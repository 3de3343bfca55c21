/** File discovery on a disk that fills up or turns read-only. A small file system of its own plays the disk, so only root can run these. */
import { afterEach, beforeEach, describe, expect, test } from "bun:test";
import { chmodSync, existsSync, mkdirSync, mkdtempSync, rmSync, statSync, unlinkSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { escapeFileName } from "../../../src/dynamo/discovery/escape.ts";
import { eventually, launch, required } from "../../support/launch.ts";
import { Deployment, LIMIT_MS, NAME, type Worker } from "./support.ts";

const TEST_MS = 4 * LIMIT_MS;
const root = process.getuid?.() === 0;

let disk: string;
let d: Deployment | null = null;

async function mount(...args: string[]): Promise<void> {
  const child = Bun.spawn(args, { stdout: "ignore", stderr: "pipe" });
  if ((await child.exited) !== 0) throw new Error(`${args.join(" ")}: ${await new Response(child.stderr).text()}`);
}
const readOnly = (on: boolean) => mount("mount", "-o", `remount,${on ? "ro" : "rw"}`, disk);

let fillers = 0;
/** Takes the last free byte. */
function fill(): void {
  for (const bytes of [65536, 4096, 1])
    for (let full = false; !full; ) {
      const path = join(disk, `fill-${fillers++}`);
      try {
        writeFileSync(path, Buffer.alloc(bytes));
      } catch (error) {
        if ((error as NodeJS.ErrnoException).code !== "ENOSPC") throw error;
        if (existsSync(path)) unlinkSync(path);
        full = true;
      }
    }
}
function empty(): void {
  for (const name of new Bun.Glob("fill-*").scanSync(disk)) unlinkSync(join(disk, name));
}

const start = (kv: string) =>
  launch(["dynamo", "--model", required("LAYERSCALE_TEST_GGUF"), "--served-model-name", NAME, "--max-total-tokens", "4096"], {
    env: { DYN_DISCOVERY_BACKEND: "file", DYN_FILE_KV: kv, DYN_TCP_RPC_HOST: "127.0.0.1" },
  });
/** One line that names the variable, and exit code 1. */
async function expectRefusal(kv: string): Promise<void> {
  await using process = start(kv);
  expect(await process.exit(LIMIT_MS)).toBe(1);
  const lines = process.stderr.trim().split("\n").filter((line) => !line.startsWith("{"));
  expect(lines).toEqual([expect.stringContaining("DYN_FILE_KV")]);
}

const recordFile = (worker: Worker) => join(disk, "kv", "v1/instances", escapeFileName(`dynamo/backend/generate/${worker.instance}`));
const present = (worker: Worker) => statSync(recordFile(worker), { throwIfNoEntry: false }) !== undefined;

describe.skipIf(!root)("a disk of its own", () => {
  beforeEach(async () => {
    disk = mkdtempSync(join(tmpdir(), "layerscale-disk-"));
    await mount("mount", "-t", "tmpfs", "-o", "size=512k,mode=0777", "layerscale-test", disk);
    mkdirSync(join(disk, "kv"));
  });
  afterEach(async () => {
    await d?.[Symbol.asyncDispose]();
    d = null;
    await mount("umount", "-l", disk);
    rmSync(disk, { recursive: true, force: true });
  }, TEST_MS);

  test("full at the start: one line, exit code 1", async () => {
    fill();
    await expectRefusal(join(disk, "kv"));
  }, TEST_MS);

  test("read-only at the start: one line, exit code 1", async () => {
    await readOnly(true);
    await expectRefusal(join(disk, "kv"));
    await readOnly(false);
  }, TEST_MS);

  test("full while it serves: records stay alive; one that is lost comes back when there is room", async () => {
    d = await Deployment.start("round-robin", [], join(disk, "kv"));
    const worker = await d.worker();
    fill();
    const before = statSync(recordFile(worker)).mtimeMs;
    await eventually(() => statSync(recordFile(worker)).mtimeMs > before, "the record is renewed on a full disk", LIMIT_MS);
    expect((await d.ask("completions", "a", { max_tokens: 1 })).status).toBe(200);
    unlinkSync(recordFile(worker));
    // What the removal gave back is taken again, before the worker looks.
    fill();
    await worker.process.log("discovery record cannot be renewed, trying on", LIMIT_MS);
    expect(present(worker)).toBe(false);
    empty();
    await d.served();
    expect(present(worker)).toBe(true);
  }, TEST_MS);

  test("read-only while it serves: it serves on, and is renewed when the disk can be written again", async () => {
    d = await Deployment.start("round-robin", [], join(disk, "kv"));
    const worker = await d.worker();
    await readOnly(true);
    await worker.process.log("discovery record cannot be renewed, trying on", LIMIT_MS);
    expect((await d.ask("completions", "a", { max_tokens: 1 })).status).toBe(200);
    await readOnly(false);
    await worker.process.log("discovery record is renewed again", LIMIT_MS);
    await d.served();
    expect(present(worker)).toBe(true);
  }, TEST_MS);
});

test.skipIf(root)("a directory that this user may not write: one line, exit code 1", async () => {
  const kv = mkdtempSync(join(tmpdir(), "layerscale-kv-"));
  try {
    chmodSync(kv, 0o555);
    await expectRefusal(kv);
  } finally {
    chmodSync(kv, 0o755);
    rmSync(kv, { recursive: true, force: true });
  }
}, TEST_MS);
