import { afterEach, describe, expect, test } from "bun:test";
import { existsSync, mkdtempSync, readdirSync, readFileSync, rmSync, statSync, unlinkSync, utimesSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { DiscoveryError } from "../../../src/dynamo/discovery/discovery.ts";
import { escapeFileName, escapeSegment, unescapeKey } from "../../../src/dynamo/discovery/escape.ts";
import { FileDiscovery, RENEW_MS, TTL_MS } from "../../../src/dynamo/discovery/file.ts";
import { eventChannelRecord, eventSourceRecord, instance, instanceRecord, modelRecord } from "../../../src/dynamo/discovery/records.ts";
import { stringifyJson } from "../../../src/dynamo/protocol/bigint-json.ts";
import { refuseConflict } from "../../../src/dynamo/registration/conflict.ts";

const name = { namespace: "dynamo", component: "backend", endpoint: "generate" };
const id = 0xe0634cbc480eab4dn;
const record = () => instanceRecord(name, instance(name, id, { tcp: "127.0.0.1:46859/e0634cbc480eab4d/generate" }, "cuda", "msgpack"));
const open: FileDiscovery[] = [];
const roots: string[] = [];
let now = Date.now();
function discovery(root = mkdtempSync(join(tmpdir(), "ls-kv-")), instanceId = id): FileDiscovery {
  now = Date.now();
  const made = new FileDiscovery(root, instanceId, { clock: () => now });
  open.push(made);
  roots.push(root);
  return made;
}
afterEach(async () => {
  for (const item of open.splice(0)) await item.close();
  for (const root of roots.splice(0)) rmSync(root, { recursive: true, force: true });
});
const file = (d: FileDiscovery) => join(d.root, "v1/instances/dynamo%2Fbackend%2Fgenerate%2Fe0634cbc480eab4d");

describe("keys", () => {
  test("file names escape everything but letters and digits", () => {
    expect(escapeFileName("dynamo/backend/worker_kv-x.y/é")).toBe("dynamo%2Fbackend%2Fworker%5Fkv%2Dx%2Ey%2F%C3%A9");
    expect(unescapeKey("a%2Fb%5F")).toBe("a/b_");
    expect(unescapeKey("%zz")).toBeNull();
  });
  test("segments keep - and _", () => expect(escapeSegment("kv_metrics-a.b")).toBe("kv_metrics-a%2Eb"));
});

describe("records", () => {
  test("instance: the JSON of the reference, byte for byte", () => {
    expect(stringifyJson(record().value)).toBe(
      '{"type":"Endpoint","component":"backend","endpoint":"generate","namespace":"dynamo","instance_id":16168851458736696141,"transport":{"tcp":"127.0.0.1:46859/e0634cbc480eab4d/generate"},"device_type":"cuda","request_plane_codec":"msgpack"}',
    );
  });
  test("model and event records carry the same id in key and value", () => {
    expect(modelRecord(name, id, {})).toMatchObject({ bucket: "v1/mdc", key: "dynamo/backend/generate/e0634cbc480eab4d", value: { type: "Model", instance_id: id } });
    const channel = eventChannelRecord(name, "kv-events", 0x1b1a5910484c57n, { kind: "Zmq", config: { endpoint: "tcp://127.0.0.1:42447" } });
    expect(channel.key).toBe("namespace/dynamo/component/backend/endpoint/generate/topic/kv-events/1b1a5910484c57");
    expect(stringifyJson(channel.value)).toBe(
      '{"type":"EventChannel","scope":{"kind":"endpoint","endpoint":{"namespace":"dynamo","component":"backend","name":"generate"}},"topic":"kv-events","instance_id":7628794198772823,"transport":{"kind":"Zmq","config":{"endpoint":"tcp://127.0.0.1:42447"}}}',
    );
    const source = eventSourceRecord(name, "kv-events", 5n, id, instance({ ...name, endpoint: "worker_kv_query_source_5" }, id, { tcp: "a" }, "cpu", "json"));
    expect(source).toMatchObject({ bucket: "v1/event_sources", value: { publisher_id: 5n, metadata: { worker: { worker_id: id, dp_rank: 0 }, publisher_id: 5n, recovery_target: { endpoint: "worker_kv_query_source_5", instance_id: id } } } });
  });
});

describe("file discovery", () => {
  test("a record is a flat file with the escaped key; nothing temporary stays; others may delete it", async () => {
    const d = discovery();
    await d.add(record());
    expect(readFileSync(file(d), "utf8")).toBe(stringifyJson(record().value));
    expect(readdirSync(join(d.root, "v1/instances"))).toEqual(["dynamo%2Fbackend%2Fgenerate%2Fe0634cbc480eab4d"]);
    expect(statSync(join(d.root, "v1/instances")).mode & 0o777).toBe(0o777);
    expect(statSync(file(d)).mode & 0o444).toBe(0o444);
  });
  test("under a strict umask too", async () => {
    const before = process.umask(0o077);
    try {
      const d = discovery(join(mkdtempSync(join(tmpdir(), "ls-kv-")), "made"));
      await d.add(record());
      for (const folder of ["", "v1", "v1/instances", "v1/mdc"]) expect(statSync(join(d.root, folder)).mode & 0o777).toBe(0o777);
      expect(statSync(file(d)).mode & 0o777).toBe(0o644);
      await d.replace(record());
      expect(statSync(file(d)).mode & 0o777).toBe(0o644);
    } finally {
      process.umask(before);
    }
  });
  test("an existing record is never overwritten", async () => {
    const d = discovery();
    await d.add(record());
    const other = discovery(d.root);
    await expect(other.add({ ...record(), value: { type: "Endpoint" } })).rejects.toThrow(DiscoveryError);
    expect(readFileSync(file(d), "utf8")).toContain("46859");
  });
  test("renewal keeps the mtime inside the time to live", async () => {
    expect(RENEW_MS * 3).toBeLessThan(TTL_MS);
    const d = discovery();
    await d.add(record());
    utimesSync(file(d), 1000, 1000);
    now = 2_000_000_000_000;
    d.touch();
    expect(statSync(file(d)).mtimeMs).toBe(2_000_000_000_000);
  });
  test("a record that somebody removed comes back, also when the whole directory went", async () => {
    const d = discovery();
    await d.add(record());
    unlinkSync(file(d));
    d.touch();
    expect(existsSync(file(d))).toBe(true);
    rmSync(d.root, { recursive: true });
    d.touch();
    expect(readFileSync(file(d), "utf8")).toBe(stringifyJson(record().value));
  });
  test("files of the dead expire by age, own ones and fresh ones stay", async () => {
    const d = discovery();
    await d.add(record());
    const at = (n: string, ageMs: number) => {
      const path = join(d.root, "v1/mdc", n);
      writeFileSync(path, "{}");
      utimesSync(path, (now - ageMs) / 1000, (now - ageMs) / 1000);
      return path;
    };
    const [stale, fresh, orphan] = [at("old", TTL_MS + 1), at("new", TTL_MS - 1000), at(".tmp_0011", TTL_MS + 1)];
    utimesSync(file(d), 1, 1);
    d.touch();
    expect([stale, fresh, orphan, file(d)].map(existsSync)).toEqual([false, true, false, true]);
  });
  test("listing skips stale, foreign and broken files", async () => {
    const d = discovery();
    await d.add(modelRecord(name, id, { display_name: "a" }));
    const folder = join(d.root, "v1/mdc");
    writeFileSync(join(folder, escapeFileName("dynamo/backend/generate/1")), "{");
    writeFileSync(join(folder, escapeFileName("other/backend/generate/2")), "{}");
    writeFileSync(join(folder, escapeFileName("dynamo/backend/generate/3")), "{}");
    utimesSync(join(folder, escapeFileName("dynamo/backend/generate/3")), 1, 1);
    expect((await d.list("v1/mdc", "dynamo/backend/generate/")).map((item) => item.key)).toEqual(["dynamo/backend/generate/e0634cbc480eab4d"]);
  });
  test("remove and close leave nothing behind", async () => {
    const d = discovery();
    await d.add(record());
    await d.add(modelRecord(name, id, {}));
    await d.remove("v1/instances", record().key);
    expect(existsSync(file(d))).toBe(false);
    d.touch();
    expect(existsSync(file(d))).toBe(false);
    await d.remove("v1/instances", record().key);
    await d.close();
    expect(readdirSync(join(d.root, "v1/mdc"))).toEqual([]);
  });
  test("a directory that cannot be used is refused by its variable", () => {
    const root = mkdtempSync(join(tmpdir(), "ls-kv-"));
    roots.push(root);
    writeFileSync(join(root, "file"), "");
    expect(() => new FileDiscovery(join(root, "file"), id)).toThrow(/DYN_FILE_KV/);
  });
});

describe("one model per endpoint", () => {
  const card = { display_name: "acme/a", source_path: "/models/a" };
  const other = (value: Record<string, unknown>) => modelRecord(name, 7n, value);
  test("same name or same source joins, another model is refused with both names", async () => {
    const d = discovery();
    await refuseConflict(d, name, "own", card);
    await d.add(other({ display_name: "acme/a", source_path: "/elsewhere" }));
    await refuseConflict(d, name, "own", card);
    await d.remove("v1/mdc", other({}).key);
    await d.add(other({ display_name: "acme/b", source_path: "/models/a" }));
    await refuseConflict(d, name, "own", card);
    await d.remove("v1/mdc", other({}).key);
    await d.add(other({ display_name: "acme/b", source_path: "/models/b" }));
    await expect(refuseConflict(d, name, "own", card)).rejects.toThrow(/"acme\/a".*"acme\/b"/);
    await refuseConflict(d, name, other({}).key, card);
  });
});
