import { describe, expect, test } from "bun:test";
import { existsSync, lstatSync, mkdirSync, readdirSync, readFileSync, readlinkSync, rmSync, symlinkSync, truncateSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { FileLock } from "../../../../src/util/flock.ts";
import { eventually } from "../../../support/launch.ts";
import { hubAndCache, keepLogs, logged, MODEL, refusal, REPO, SHARDS } from "./support.ts";

keepLogs();
const shard = SHARDS[0]!;
const bytesOf = (name: string) => readFileSync(join(MODEL, name));

/** Every file of the model, through the snapshot. */
function expectWhole(path: string): void {
  expect(readdirSync(path).sort()).toEqual(readdirSync(MODEL).sort());
  for (const name of readdirSync(MODEL)) expect([name, readFileSync(join(path, name)).equals(bytesOf(name))]).toEqual([name, true]);
}

describe("a model that is not in the cache", () => {
  test("lies there afterwards as huggingface_hub lays it out", async () => {
    await using at = await hubAndCache();
    const path = await at.fetched();
    expect(path).toBe(join(at.folder, "snapshots", at.repo.commit));
    expectWhole(path);
    for (const [name, { etag }] of at.repo.files) expect(readlinkSync(join(path, name))).toBe(`../../blobs/${etag}`);
    expect(readdirSync(join(at.folder, "blobs")).sort()).toEqual([...at.repo.files.values()].map(({ etag }) => etag).sort());
    expect(readFileSync(join(at.folder, "refs/main"), "utf8")).toBe(at.repo.commit);
    expect(readFileSync(join(at.environment.cacheDir, "CACHEDIR.TAG"), "utf8")).toStartWith("Signature: 8a477f597d28d172789f06886806bc55");
    expect(at.hub.paths("GET").filter((asked) => asked.includes("/resolve/")).length).toBe(at.repo.files.size);
  });

  test("is asked for by one listing the second time, and by nothing when its commit is named", async () => {
    await using at = await hubAndCache();
    await at.fetched();
    at.hub.asked.length = 0;
    await at.fetched();
    expect(at.hub.asked.map(({ path }) => path)).toEqual([`/api/models/${REPO}/revision/main`]);
    at.hub.asked.length = 0;
    await at.fetched(`${REPO}@${at.repo.commit}`);
    await at.fetched(REPO, {}, { offline: true });
    expect(at.hub.asked).toEqual([]);
  });

  test("only what is needed is fetched", async () => {
    await using at = await hubAndCache();
    const files = Object.fromEntries(readdirSync(MODEL).map((name) => [name, bytesOf(name)]));
    at.hub.add(REPO, { ...files, "README.md": "x", "pytorch_model.bin": "x", "model-00009-of-00009.safetensors": "x", "onnx/model.onnx": "x", "chat_template.jinja": "{{ messages }}", ".gitattributes": "x" });
    expect(readdirSync(await at.fetched()).sort()).toEqual([...readdirSync(MODEL), "chat_template.jinja"].sort());
  });

  test("files of equal content are one blob and one transfer", async () => {
    await using at = await hubAndCache();
    const files = Object.fromEntries(readdirSync(MODEL).map((name) => [name, bytesOf(name)]));
    at.hub.add(REPO, { ...files, "added_tokens.json": "{}", "special_tokens_map.json": "{}" });
    const path = await at.fetched();
    expect(readlinkSync(join(path, "added_tokens.json"))).toBe(readlinkSync(join(path, "special_tokens_map.json")));
    expect(at.hub.paths("GET").filter((asked) => /added_tokens|special_tokens/.test(asked)).length).toBe(1);
  });

  test("a branch that moved: equal files are not fetched again, and the ref moves when all is there", async () => {
    await using at = await hubAndCache();
    await at.fetched();
    const before = at.repo.commit;
    const files = Object.fromEntries(readdirSync(MODEL).map((name) => [name, bytesOf(name)]));
    const next = at.hub.add(REPO, { ...files, "generation_config.json": '{"eos_token_id": 2}', [SHARDS[1]!]: Buffer.concat([bytesOf(SHARDS[1]!), Buffer.from("x")]) });
    at.hub.fault = ({ origin }, response) => origin === "files" && !!response.destroy();
    at.hub.asked.length = 0;
    expect(await refusal(at.fetched())).toContain("goes on from there");
    expect(readFileSync(join(at.folder, "refs/main"), "utf8")).toBe(before);
    expect(await at.fetched(REPO, {}, { offline: true })).toContain(before);
    at.hub.fault = () => false;
    expect(await at.fetched()).toContain(next.commit);
    expect(readFileSync(join(at.folder, "refs/main"), "utf8")).toBe(next.commit);
    expect([...new Set(at.hub.paths("GET").filter((path) => path.includes("/resolve/")).map((path) => path.split("/").at(-1)))].sort()).toEqual(["generation_config.json", SHARDS[1]!]);
  });

  test("settings are judged before weights are asked for", async () => {
    await using at = await hubAndCache();
    const seen: string[][] = [];
    const refuse = at.fetched(REPO, {
      onSettings(directory) {
        seen.push(readdirSync(directory).sort());
        throw Object.assign(new Error("not this one"), { name: "ModelError" });
      },
    });
    expect(await refusal(refuse)).toBe("not this one");
    expect(seen).toEqual([readdirSync(MODEL).filter((name) => !name.endsWith(".safetensors")).sort()]);
    expect(at.hub.asked.some(({ path }) => path.endsWith(".safetensors"))).toBe(false);
  });

  test("a .gguf file: the only one, or the one that is named, with its folder", async () => {
    await using at = await hubAndCache();
    const one = at.hub.add("acme/one", { "README.md": "x", "one-Q4_1.gguf": Buffer.alloc(30_000, 1) });
    expect(await at.fetched("acme/one")).toBe(join(at.environment.cacheDir, "models--acme--one/snapshots", one.commit, "one-Q4_1.gguf"));
    expect(await at.fetched("acme/one", {}, { offline: true })).toEndWith("one-Q4_1.gguf");
    at.hub.add("acme/many", { "q4/a.gguf": Buffer.alloc(30_000, 2), "q8/a.gguf": Buffer.alloc(30_000, 3) });
    expect(await refusal(at.fetched("acme/many"))).toBe("--model acme/many: the repo has 2 .gguf files; say which, as org/name:FILE.gguf: q4/a.gguf, q8/a.gguf");
    const path = await at.fetched("acme/many:q8/a.gguf");
    expect(readlinkSync(path)).toStartWith("../../../blobs/");
    expect(readFileSync(path).equals(Buffer.alloc(30_000, 3))).toBe(true);
    expect(await refusal(at.fetched("acme/many:q2/a.gguf"))).toContain("has no file q2/a.gguf; its .gguf files: q4/a.gguf, q8/a.gguf");
  });
});

describe("a transfer that is interrupted", () => {
  test("goes on by Range from what a process before left, and from a cut", async () => {
    await using at = await hubAndCache();
    const file = at.repo.files.get(shard)!;
    mkdirSync(join(at.folder, "blobs"), { recursive: true });
    writeFileSync(`${at.blob(file.etag)}.incomplete`, file.bytes.subarray(0, 10_000));
    let cut = false;
    at.hub.fault = (asked, response) => {
      if (asked.origin !== "files" || !asked.path.includes(file.etag) || cut) return false;
      cut = true;
      // Half of the rest under the length of all of it, then nothing.
      response.writeHead(206, { "Content-Range": `bytes 10000-${file.bytes.length - 1}/${file.bytes.length}`, "Content-Length": String(file.bytes.length - 10_000) });
      response.write(file.bytes.subarray(10_000, 30_000), () => response.destroy());
      return true;
    };
    expectWhole(await at.fetched());
    const ranges = at.hub.asked.filter(({ origin, path }) => origin === "files" && path.includes(file.etag)).map(({ range }) => Number(/^bytes=(\d+)-$/.exec(range ?? "")?.[1]));
    expect(ranges.length).toBe(2);
    expect(ranges[0]).toBe(10_000);
    expect(ranges[1]).toBeGreaterThanOrEqual(10_000);
    expect(existsSync(`${at.blob(file.etag)}.incomplete`)).toBe(false);
  });

  test("a complete rest needs no transfer; one that is too long or garbled is given up", async () => {
    await using at = await hubAndCache();
    const [a, b] = SHARDS.map((name) => at.repo.files.get(name)!);
    mkdirSync(join(at.folder, "blobs"), { recursive: true });
    writeFileSync(`${at.blob(a!.etag)}.incomplete`, a!.bytes);
    writeFileSync(`${at.blob(b!.etag)}.incomplete`, Buffer.alloc(b!.bytes.length + 1));
    expectWhole(await at.fetched());
    expect(at.hub.asked.filter(({ origin }) => origin === "files").map(({ path, range }) => [path, range])).toEqual([[`/${b!.etag}`, null]]);
    rmSync(at.folder, { recursive: true });
    mkdirSync(join(at.folder, "blobs"), { recursive: true });
    writeFileSync(`${at.blob(a!.etag)}.incomplete`, Buffer.alloc(5000, 9));
    expectWhole(await at.fetched());
  });

  test("a server without ranges sends all again", async () => {
    await using at = await hubAndCache();
    const file = at.repo.files.get(shard)!;
    mkdirSync(join(at.folder, "blobs"), { recursive: true });
    writeFileSync(`${at.blob(file.etag)}.incomplete`, file.bytes.subarray(0, 10_000));
    at.hub.fault = (asked, response) => {
      if (asked.origin !== "files" || !asked.path.includes(file.etag)) return false;
      response.writeHead(200, { "Content-Length": String(file.bytes.length) }).end(file.bytes);
      return true;
    };
    expectWhole(await at.fetched());
  });

  test("a blob that something cut, and a link to nowhere, are mended", async () => {
    await using at = await hubAndCache();
    const path = await at.fetched();
    truncateSync(at.blob(at.repo.files.get(shard)!.etag), 100);
    rmSync(join(path, shard));
    symlinkSync("../../blobs/nothing", join(path, "tokenizer.json.new"));
    rmSync(join(path, "tokenizer.json"));
    symlinkSync("../../blobs/nothing", join(path, "tokenizer.json"));
    rmSync(join(path, "tokenizer.json.new"));
    expectWhole(await at.fetched());
    expect(lstatSync(join(path, "tokenizer.json")).isSymbolicLink()).toBe(true);
  });

  test("a blob that something cut behind its link is told by the listing, and mended", async () => {
    await using at = await hubAndCache();
    const path = await at.fetched();
    truncateSync(at.blob(at.repo.files.get(shard)!.etag), 100);
    truncateSync(at.blob(at.repo.files.get("config.json")!.etag), 10);
    // A file system without links has copies in the snapshot.
    rmSync(join(path, "tokenizer.json"));
    writeFileSync(join(path, "tokenizer.json"), "{");
    expectWhole(await at.fetched());
  });

  test("a server that has no rest of the file sends all of it again", async () => {
    for (const [name, origin] of [[shard, "files"], ["config.json", "hub"]] as const) {
      await using at = await hubAndCache();
      const file = at.repo.files.get(name)!;
      mkdirSync(join(at.folder, "blobs"), { recursive: true });
      writeFileSync(`${at.blob(file.etag)}.incomplete`, file.bytes.subarray(0, 100));
      at.hub.fault = (asked, response) => asked.origin === origin && asked.range !== null && !!response.writeHead(416, { "Content-Range": "bytes */50" }).end();
      expectWhole(await at.fetched());
      expect(at.hub.asked.some(({ range }) => range === "bytes=100-")).toBe(true);
    }
  });

  test("the signal ends it at once; the next start goes on", async () => {
    await using at = await hubAndCache();
    at.hub.pace = { bytes: 5000, ms: 5 };
    const stop = new AbortController();
    const running = at.fetched(REPO, { signal: stop.signal }).catch((error: unknown) => error);
    const partial = `${at.blob(at.repo.files.get(shard)!.etag)}.incomplete`;
    await eventually(() => existsSync(partial) && lstatSync(partial).size > 10_000, "some bytes");
    const reason = new Error("stopped by SIGTERM");
    stop.abort(reason);
    expect(await running).toBe(reason);
    const left = lstatSync(partial).size;
    expect(left).toBeGreaterThan(10_000);
    at.hub.pace = null;
    at.hub.asked.length = 0;
    expectWhole(await at.fetched());
    expect(at.hub.asked.find(({ origin, path }) => origin === "files" && partial.includes(path.slice(1)))?.range).toBe(`bytes=${left}-`);
  });

  test("two at once fetch each file once", async () => {
    await using at = await hubAndCache();
    at.hub.pace = { bytes: 20_000, ms: 2 };
    logged.length = 0;
    const [one, two] = await Promise.all([at.fetched(), at.fetched()]);
    expect(one).toBe(two);
    expectWhole(one);
    expect(at.hub.asked.filter(({ origin }) => origin === "files").map(({ path }) => path).sort()).toEqual(SHARDS.map((name) => `/${at.repo.files.get(name)!.etag}`).sort());
    expect(logged.some((line) => line.includes("another process downloads the file, waiting"))).toBe(true);
  });

  test("a lock is waited for, and ends with the signal", async () => {
    await using at = await hubAndCache();
    await at.fetched();
    const path = join(at.environment.cacheDir, ".locks/models--acme--tiny", `${at.repo.files.get(shard)!.etag}.lock`);
    const held = await FileLock.acquire(path, new AbortController().signal);
    const stop = new AbortController();
    const waiting = FileLock.acquire(path, stop.signal, () => stop.abort(new Error("enough"))).catch((error: unknown) => error as Error);
    expect((await waiting as Error).message).toBe("enough");
    held.release();
    (await FileLock.acquire(path, new AbortController().signal, () => { throw new Error("it is free"); })).release();
  });
});
