/** The thread that keeps records alive, and the file store's answers to a file system that refuses. */
import { afterEach, describe, expect, test } from "bun:test";
import { spawnSync } from "node:child_process";
import { chmodSync, existsSync, mkdirSync, mkdtempSync, readdirSync, readFileSync, rmSync, statSync, unlinkSync, utimesSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { BUCKETS, DiscoveryError } from "../../../src/dynamo/discovery/discovery.ts";
import { FileDiscovery } from "../../../src/dynamo/discovery/file.ts";
import { DiscoveryThread } from "../../../src/dynamo/discovery/thread/discovery-thread.ts";
import { pulseWatch } from "../../../src/dynamo/discovery/thread/run.ts";
import { DEFAULT_FILTER } from "../../../src/util/log-filter.ts";
import { until } from "./plane-client.ts";

const ID = 0xe0634cbc480eab4dn;
const record = { bucket: "v1/instances" as const, key: "dynamo/backend/generate/e0634cbc480eab4d", value: { instance_id: ID } };
const FILE = "v1/instances/dynamo%2Fbackend%2Fgenerate%2Fe0634cbc480eab4d";
const undo: (() => unknown)[] = [];
afterEach(async () => {
  for (const step of undo.splice(0).reverse()) await step();
});
function folder(): string {
  const made = mkdtempSync(join(tmpdir(), "ls-kv-"));
  undo.push(() => rmSync(made, { recursive: true, force: true }));
  return made;
}
async function thread(root: string, entry?: string): Promise<DiscoveryThread> {
  const made = await DiscoveryThread.open({ kind: "file", root, instanceId: ID }, DEFAULT_FILTER, entry);
  undo.push(() => made.close());
  return made;
}
function files(root: string): FileDiscovery {
  const made = new FileDiscovery(root, ID);
  undo.push(() => made.close());
  return made;
}

/** What a promise is rejected with. expect().rejects holds messages of other threads back while it waits. */
const refusal = (promise: Promise<unknown>): Promise<Error | null> => promise.then(() => null, (error: Error) => error);

describe("the discovery thread", () => {
  test("does what the store does: ids of 64 bits, values, refusals, a clean end", async () => {
    const root = folder();
    const d = await thread(root);
    expect([d.instanceId, await d.renew()]).toEqual([ID, ID]);
    await d.add(record);
    expect(readFileSync(join(root, FILE), "utf8")).toBe('{"instance_id":16168851458736696141}');
    expect(await d.list("v1/instances", "dynamo/")).toEqual([record]);
    expect(await refusal(d.add(record))).toBeInstanceOf(DiscoveryError);
    await d.replace({ ...record, value: { taints: [] } });
    expect((await d.list("v1/instances", "dynamo/"))[0]!.value).toEqual({ taints: [] });
    await d.remove(record.bucket, record.key);
    expect(existsSync(join(root, FILE))).toBe(false);
    await d.add(record);
    await d.close();
    expect(BUCKETS.flatMap((bucket) => readdirSync(join(root, bucket)))).toEqual([]);
    expect((await refusal(d.add(record)))?.message).toMatch("discovery is closed");
    expect((await refusal(d.renew()))?.message).toMatch("discovery is closed");
  });
  test("renews and restores while the main thread does not come round once", async () => {
    const root = folder();
    const d = await thread(root);
    await d.add(record);
    const path = join(root, FILE);
    /** Blocks this thread: no timer and no promise of it runs. */
    const block = (condition: () => boolean) => {
      const end = Date.now() + 20_000;
      while (!condition()) {
        if (Date.now() > end) throw new Error("not within 20 s");
        Bun.sleepSync(10);
      }
    };
    utimesSync(path, 1, 1);
    block(() => statSync(path).mtimeMs > 1_000_000);
    unlinkSync(path);
    block(() => existsSync(path));
    expect(readFileSync(path, "utf8")).toContain("16168851458736696141");
  }, 60_000);
  test("a store that cannot be used is a refusal at once", async () => {
    const root = join(folder(), "file");
    writeFileSync(root, "");
    expect((await refusal(thread(root)))?.message).toMatch(/^DYN_FILE_KV: cannot use directory/);
  });
  test("a thread that dies is a lost identity; the next one is another", async () => {
    const d = await thread(folder(), join(import.meta.dir, "../../support/dying-discovery.ts"));
    const causes: string[] = [];
    d.onLost((cause) => causes.push(cause));
    expect(await refusal(d.add(record))).toBeInstanceOf(DiscoveryError);
    await until("told", () => causes.length > 0);
    expect((await refusal(d.add(record)))?.message).toMatch(causes[0]!);
    expect(await d.renew()).not.toBe(ID);
    await d.remove(record.bucket, record.key);
  });
  test("a main thread that hangs for a minute loses its records, one that comes back renews them", () => {
    const pulse = new Int32Array(new SharedArrayBuffer(4));
    let now = 0;
    const alive = pulseWatch(pulse, () => now);
    const at = (seconds: number, beats: number) => {
      now = seconds * 1000;
      Atomics.add(pulse, 0, beats);
      return alive();
    };
    expect([at(1, 1), at(59, 0), at(62, 0), at(100, 0), at(101, 1), at(160, 0), at(162, 0)]).toEqual([true, true, false, false, true, true, false]);
  });
});

describe("a directory that refuses", () => {
  const root = process.getuid?.() === 0;
  /** Another user than root, whom no permission stops. */
  const asNobody = <T>(body: () => T): T => {
    process.seteuid!(65_534);
    try {
      return body();
    } finally {
      process.seteuid!(0);
    }
  };
  const at = (path: string) => () => void files(path);

  test("what is no directory", () => {
    const base = folder();
    writeFileSync(join(base, "file"), "");
    expect(at(join(base, "file"))).toThrow(/^DYN_FILE_KV: cannot use directory ".*\/file": (a part of the path is no|it is no) directory/);
    mkdirSync(join(base, "kv/v1"), { recursive: true });
    writeFileSync(join(base, "kv/v1/instances"), "");
    expect(at(join(base, "kv"))).toThrow(/DYN_FILE_KV: .*directory/);
  });
  test.skipIf(!root)("no right to make it, to write into it, or to read it", () => {
    const base = folder();
    chmodSync(base, 0o755);
    expect(() => asNobody(at(join(base, "kv")))).toThrow(/DYN_FILE_KV: .*this user may not write there/);
    files(join(base, "kv"));
    chmodSync(join(base, "kv/v1/mdc"), 0o755);
    expect(() => asNobody(at(join(base, "kv")))).toThrow(/this user may not write there.*v1\/mdc/);
    chmodSync(join(base, "kv/v1/mdc"), 0o733);
    expect(() => asNobody(at(join(base, "kv")))).toThrow(/DYN_FILE_KV: .*v1\/mdc/);
    chmodSync(join(base, "kv/v1/mdc"), 0o777);
    asNobody(at(join(base, "kv")));
  });

  /** A file system of its own, of 64 KiB; null where this user may not mount. */
  const mounted = (): string | null => {
    const at = folder();
    if (spawnSync("mount", ["-t", "tmpfs", "-o", "size=64k", "tmpfs", at]).status !== 0) return null;
    undo.push(() => spawnSync("umount", ["-l", at]));
    return at;
  };
  const probe = mounted();
  if (probe !== null) spawnSync("umount", ["-l", probe]);

  test.skipIf(probe === null)("a full disk: told by name, no empty file stays, and a lost record comes back when there is room", async () => {
    const base = mounted()!;
    const d = files(base);
    await d.add(record);
    const filler = join(base, "filler");
    spawnSync("sh", ["-c", `cat /dev/zero > ${filler}`]);
    const other = { ...record, key: "a/b/c/1" };
    await expect(d.add(other)).rejects.toThrow(/DYN_FILE_KV: cannot write record .*: the disk is full/);
    // What is there is kept alive; it needs no room.
    utimesSync(join(base, FILE), 1, 1);
    d.touch();
    expect(statSync(join(base, FILE)).mtimeMs).toBeGreaterThan(1_000_000);
    unlinkSync(join(base, FILE));
    spawnSync("sh", ["-c", `cat /dev/zero >> ${filler}`]);
    d.touch();
    expect(readdirSync(join(base, "v1/instances"))).toEqual([]);
    unlinkSync(filler);
    d.touch();
    expect(readFileSync(join(base, FILE), "utf8")).toContain("16168851458736696141");
  });
  test.skipIf(probe === null)("a read-only directory: told at start; one that becomes so keeps the worker running and is used again later", async () => {
    const base = mounted()!;
    const d = files(base);
    await d.add(record);
    utimesSync(join(base, FILE), 1, 1);
    expect(spawnSync("mount", ["-o", "remount,ro", base]).status).toBe(0);
    expect(at(base)).toThrow(/DYN_FILE_KV: cannot use directory .*: it is mounted read-only/);
    d.touch();
    d.touch();
    expect(statSync(join(base, FILE)).mtimeMs).toBe(1000);
    expect(spawnSync("mount", ["-o", "remount,rw", base]).status).toBe(0);
    d.touch();
    expect(statSync(join(base, FILE)).mtimeMs).toBeGreaterThan(1_000_000);
  });
});
