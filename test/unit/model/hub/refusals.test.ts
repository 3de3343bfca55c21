import { describe, expect, test } from "bun:test";
import { existsSync, mkdirSync, readdirSync, readFileSync, symlinkSync, writeFileSync } from "node:fs";
import { createServer } from "node:http";
import { type AddressInfo, createServer as createConnectionServer } from "node:net";
import { join } from "node:path";
import { gzipSync } from "node:zlib";
import { RepoCache } from "../../../../src/model/hub/cache.ts";
import { HubClient } from "../../../../src/model/hub/client.ts";
import { requireRoom } from "../../../../src/model/hub/hub.ts";
import { probeModel } from "../../../../src/model/hub/probe.ts";
import { parseReference } from "../../../../src/model/hub/reference.ts";
import type { Fault } from "../../../support/hub-server.ts";
import { hubAndCache, keepLogs, logged, MODEL, refusal, REPO, SHARDS } from "./support.ts";

keepLogs();
const shard = SHARDS[0]!;
const answers = (status: number, headers: Record<string, string> = {}, only: (path: string) => boolean = () => true): Fault => ({ path }, response) => only(path) && !!response.writeHead(status, headers).end();
const files = Object.fromEntries(readdirSync(MODEL).map((name) => [name, readFileSync(join(MODEL, name))]));

describe("who may read a repo", () => {
  test("a missing one, a private one, a gated one, each in its own words", async () => {
    await using at = await hubAndCache();
    const host = at.hub.url.slice("http://".length);
    at.hub.add("acme/private", files, { readers: ["hf_good"] });
    at.hub.add("acme/gated", files, { readers: ["hf_good"], gated: true });
    expect(await refusal(at.fetched("acme/absent"))).toBe(`--model acme/absent: ${host} knows no such repo, or it is private and needs HF_TOKEN; nor is it a local path`);
    expect(await refusal(at.fetched("acme/private", {}, { token: "hf_bad" }))).toBe(`--model acme/private: ${host} knows no such repo, or the token has no access to it; nor is it a local path`);
    expect(await refusal(at.fetched("acme/gated"))).toBe(`--model acme/gated: access to this repo is gated; accept its conditions on ${at.hub.url}/acme/gated and set HF_TOKEN to a token of that account`);
    expect(await refusal(at.fetched("acme/gated", {}, { token: "hf_bad" }))).toBe(`--model acme/gated: access to this repo is gated; the account of the token has no access: accept the conditions on ${at.hub.url}/acme/gated`);
    at.hub.fault = answers(401, { "X-Error-Message": "Invalid credentials in Authorization header" });
    expect(await refusal(at.fetched(REPO, {}, { token: "hf_bad" }))).toBe(`--model acme/tiny: ${host} refuses the token (HF_TOKEN or ${at.environment.tokenPath}): Invalid credentials in Authorization header`);
  });

  test("the token, of the variable or of the file, goes to the hub and to nobody else", async () => {
    await using at = await hubAndCache();
    at.hub.add(REPO, files, { readers: ["hf_good"] });
    mkdirSync(join(at.environment.tokenPath, ".."), { recursive: true });
    writeFileSync(at.environment.tokenPath, "hf_good\n");
    logged.length = 0;
    await at.fetched();
    for (const { origin, authorization } of at.hub.asked) expect([origin, authorization]).toEqual([origin, origin === "hub" ? "Bearer hf_good" : null]);
    expect(at.hub.asked.some(({ origin }) => origin === "files")).toBe(true);
    expect(logged.join()).not.toContain("hf_good");
    writeFileSync(at.environment.tokenPath, "two words");
    expect(await refusal(at.fetched(`${REPO}@v9`))).toContain("is private and needs HF_TOKEN");
    expect(logged.filter((line) => line.includes("the token file holds no token")).length).toBe(1);
    expect(logged.join()).not.toContain("two words");
    writeFileSync(at.environment.tokenPath, "hf_other");
    expect(await refusal(at.fetched(`${REPO}@v9`))).toContain("no access");
    expect(await refusal(at.fetched(`${REPO}@v9`, {}, { token: "hf_good" }))).toContain("no revision");
  });

  test("a listing elsewhere is followed without the token", async () => {
    await using at = await hubAndCache();
    const seen: (string | undefined)[] = [];
    const front = createServer((request, response) => {
      seen.push(request.headers.authorization);
      response.writeHead(307, { Location: `${at.hub.url}${request.url}` }).end();
    });
    await new Promise<void>((resolve) => front.listen(0, "127.0.0.1", resolve));
    try {
      await at.fetched(REPO, {}, { endpoint: `http://127.0.0.1:${(front.address() as AddressInfo).port}`, token: "hf_good" });
    } finally {
      front.close();
    }
    expect(seen.every((value) => value === "Bearer hf_good")).toBe(true);
    expect(at.hub.asked.every(({ authorization }) => authorization === null)).toBe(true);
  });
});

describe("what a repo lacks", () => {
  test("a revision, a file, a tokenizer, weights, a shard", async () => {
    await using at = await hubAndCache();
    const without = (...names: string[]) => Object.fromEntries(Object.entries(files).filter(([name]) => !names.includes(name)));
    expect(await refusal(at.fetched(`${REPO}@v2`))).toBe('--model acme/tiny@v2: the repo has no revision "v2"; expected a branch, a tag or a commit');
    at.hub.add("acme/a", without("tokenizer.json"));
    expect(await refusal(at.fetched("acme/a"))).toBe("--model acme/a: the repo has no tokenizer.json, which a model directory needs");
    at.hub.add("acme/b", { ...without("model.safetensors.index.json", ...SHARDS), "pytorch_model.bin": "x" });
    expect(await refusal(at.fetched("acme/b"))).toBe("--model acme/b: the repo holds neither config.json with model.safetensors or model.safetensors.index.json, nor a .gguf file; weights as pytorch_model.bin are not supported");
    at.hub.add("acme/c", without(shard));
    expect(await refusal(at.fetched("acme/c"))).toBe(`--model acme/c: model.safetensors.index.json names ${shard}, which the repo does not have`);
    at.hub.add("acme/d", { ...files, "model.safetensors.index.json": '{"weight_map":{"x":"../../../etc/passwd.safetensors"}}' });
    expect(await refusal(at.fetched("acme/d"))).toContain('weight_map["x"]: expected the name of a .safetensors file beside the index');
    at.hub.fault = answers(404, { "X-Error-Code": "EntryNotFound" }, (path) => path.endsWith("/config.json"));
    expect(await refusal(at.fetched())).toBe("--model acme/tiny: the repo has no file config.json at this revision");
  });

  test("a tag names the commit it stands for", async () => {
    await using at = await hubAndCache();
    at.hub.add(REPO, files, { tags: ["v1", "refs/pr/7"] });
    await at.fetched(`${REPO}@v1`);
    await at.fetched(`${REPO}@refs/pr/7`);
    expect(["v1", "refs/pr/7"].map((name) => readFileSync(join(at.folder, "refs", name), "utf8"))).toEqual([at.repo.commit, at.repo.commit]);
    expect(existsSync(join(at.folder, "refs/main"))).toBe(false);
  });
});

describe("a hub that does not answer as it should", () => {
  test("busy or broken for a moment: asked again; for long: one line with the count", async () => {
    await using at = await hubAndCache();
    let times = 0;
    at.hub.fault = (asked, response) => asked.path.startsWith("/api/") && ++times <= 2 && !!response.writeHead(times === 1 ? 429 : 503, { "Retry-After": "0" }).end();
    await at.fetched();
    expect(times).toBe(3);
    at.hub.fault = answers(502);
    expect(await refusal(at.fetched(`${REPO}@v3`))).toMatch(/^--model acme\/tiny@v3: listing of the repo: 127\.0\.0\.1:\d+ answers 502 \(3 tries\)/);
  });

  test("an expired signature gets another one", async () => {
    await using at = await hubAndCache();
    let refused = 0;
    at.hub.fault = (asked, response) => asked.origin === "files" && refused++ === 0 && !!response.writeHead(403).end();
    await at.fetched();
    expect(refused).toBe(3);
  });

  test("nobody there, or silence", async () => {
    await using at = await hubAndCache();
    expect(await refusal(at.fetched(REPO, {}, { endpoint: "http://127.0.0.1:1" }))).toMatch(/listing of the repo: 127\.0\.0\.1:1: the connection was refused \(3 tries\)/);
    at.hub.fault = () => true;
    expect(await refusal(at.fetched(REPO, {}, { metadataSeconds: 0.05 }))).toMatch(/did not answer within 0\.05 s \(3 tries\)/);
    at.hub.fault = ({ origin }, response) => origin === "files" && !!response.writeHead(200, { "Content-Length": "100000" }).write("x");
    expect(await refusal(at.fetched(REPO, {}, { stallSeconds: 0.2 }))).toMatch(/: model-0000\d-of-00002\.safetensors: 127\.0\.0\.1:\d+ sent nothing for 0\.2 s \(3 tries\); the download goes on from there/);
  });

  test("a listing that drips for ever, and what is no HTTP", async () => {
    await using at = await hubAndCache();
    at.hub.fault = ({ path }, response) => {
      if (!path.startsWith("/api/")) return false;
      response.on("close", clearInterval.bind(null, setInterval(() => response.write(" "), 5)));
      return !!response.writeHead(200);
    };
    const listing = new HubClient(parseReference(REPO)!, at.environment, new AbortController().signal, { tries: 3, firstPauseMs: 1 }, 50).listing();
    expect(await refusal(listing.then(() => ""))).toMatch(/listing of the repo: 127\.0\.0\.1:\d+ has not sent all of it within 0\.05 s$/);
    await using noise = Object.assign(createConnectionServer((socket) => void socket.once("data", () => socket.end(Buffer.alloc(200, 0xff)))), { [Symbol.asyncDispose]: async () => void noise.close() });
    await new Promise<void>((resolve) => noise.listen(0, "127.0.0.1", resolve));
    expect(await refusal(at.fetched(`${REPO}@other`, {}, { endpoint: `http://127.0.0.1:${(noise.address() as AddressInfo).port}` }))).toMatch(/: the answer is not HTTP \(3 tries\)$/);
  });

  test("a certificate nobody trusts is told at once", async () => {
    await using at = await hubAndCache();
    const folder = join(at.environment.cacheDir, "..", "tls");
    mkdirSync(folder, { recursive: true });
    const [key, cert] = [join(folder, "key.pem"), join(folder, "cert.pem")];
    expect(Bun.spawnSync(["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-keyout", key, "-out", cert, "-subj", "/CN=hub", "-addext", "subjectAltName=IP:127.0.0.1"]).exitCode).toBe(0);
    const server = Bun.serve({ hostname: "127.0.0.1", port: 0, tls: { key: Bun.file(key), cert: Bun.file(cert) }, fetch: () => new Response() });
    try {
      expect(await refusal(at.fetched(REPO, { retry: { tries: 3, firstPauseMs: 3_600_000 } }, { endpoint: `https://127.0.0.1:${server.port}` }))).toMatch(/its certificate is not trusted \(.*\); NODE_EXTRA_CA_CERTS names/);
    } finally {
      await server.stop(true);
    }
  });

  test("the model in the cache serves when the hub cannot be asked or denies access, with a warning", async () => {
    await using at = await hubAndCache();
    const path = await at.fetched();
    logged.length = 0;
    expect(await at.fetched(REPO, {}, { endpoint: "http://127.0.0.1:1" })).toBe(path);
    at.hub.fault = answers(403);
    expect(await at.fetched()).toBe(path);
    expect(logged.filter((line) => line.includes("the model in the cache is used")).length).toBe(2);
    at.hub.repos.delete(REPO);
    at.hub.fault = () => false;
    expect(await refusal(at.fetched())).toContain("knows no such repo");
  });

  test("something that is no hub", async () => {
    await using at = await hubAndCache();
    const hint = "check HF_ENDPOINT and proxies";
    for (const [body, what] of [["<html>", "a listing in JSON"], ["{}", 'the commit of "main"'], [`{"sha":"${"a".repeat(40)}"}`, "a list of files"], ['{"sha":"../../x","siblings":[]}', 'the commit of "main"']] as const) {
      at.hub.fault = (_asked, response) => !!response.writeHead(200).end(body);
      expect(await refusal(at.fetched())).toBe(`--model acme/tiny: ${at.hub.url} answers without ${what}, as no hub does; ${hint}`);
    }
    at.hub.fault = answers(418);
    expect(await refusal(at.fetched())).toContain("answers 418, expected a hub");
    at.hub.fault = (asked, response) => !!response.writeHead(302, { Location: asked.path }).end();
    expect(await refusal(at.fetched())).toContain("more than 8 redirects");
    at.hub.tellsBlobs = false;
    at.hub.fault = ({ path, method }, response) => path.endsWith(shard) && method === "HEAD" && !!response.writeHead(200, { "Content-Length": "5" }).end();
    expect(await refusal(at.fetched())).toContain(`does not tell an etag of ${shard}, as a hub does`);
    at.hub.fault = ({ path, method }, response) => path.endsWith(shard) && method === "HEAD" && !!response.writeHead(200, { ETag: '"../../../x"', "Content-Length": "5" }).end();
    expect(await refusal(at.fetched())).toContain("does not tell an etag");
  });

  test("names that leave the folder are nobody's files", async () => {
    await using at = await hubAndCache();
    const listing = { sha: at.repo.commit, siblings: [...at.repo.files.keys(), "../../evil.gguf", "/etc/x.gguf", "a/../b.gguf"].map((rfilename) => ({ rfilename })) };
    at.hub.fault = ({ path }, response) => path.startsWith("/api/") && !!response.writeHead(200).end(JSON.stringify(listing));
    await at.fetched();
    expect(at.hub.paths("HEAD").join()).not.toMatch(/evil|etc|\.\./);
    expect(await refusal(at.fetched("acme/tiny:evil.gguf"))).toContain("it has no .gguf file");
  });

  test("bytes that do not match the checksum: once is mended, twice is refused and nothing is kept", async () => {
    await using at = await hubAndCache();
    const { etag, bytes } = at.repo.files.get(shard)!;
    let bad = 1;
    at.hub.fault = ({ origin, path }, response) => origin === "files" && path === `/${etag}` && bad-- > 0 && !!response.writeHead(200, { "Content-Length": String(bytes.length) }).end(Buffer.alloc(bytes.length, 5));
    expect(readFileSync(join(await at.fetched(), shard)).equals(bytes)).toBe(true);

    await using other = await hubAndCache();
    const small = other.repo.files.get("tokenizer.json")!;
    other.hub.fault = ({ method, path }, response) => method === "GET" && path.endsWith("/tokenizer.json") && !!response.writeHead(200).end(Buffer.alloc(small.bytes.length, 32));
    expect(await refusal(other.fetched())).toBe(`--model acme/tiny: tokenizer.json: the bytes do not match the checksum ${small.etag} that the hub gives, twice; a proxy or mirror alters them, or the file is damaged there`);
    expect(existsSync(other.blob(small.etag))).toBe(false);
    expect(readFileSync(`${other.blob(small.etag)}.incomplete`).length).toBe(0);
    expect(existsSync(join(other.folder, "refs/main"))).toBe(false);
  });

  test("an etag of a mirror's own: the hash of the listing counts; one in capitals is a hash", async () => {
    for (const [name, etag] of [[shard, "mirror-1"], ["config.json", "mirror-1"], ["config.json", null]] as const) {
      await using at = await hubAndCache();
      const file = at.repo.files.get(name)!;
      let wrong = true;
      at.hub.fault = ({ method, path }, response) => {
        if (!path.endsWith(`/${name}`)) return false;
        response.writeHead(200, { ETag: `"${etag ?? file.etag.toUpperCase()}"`, "Content-Length": String(file.bytes.length) });
        return !!response.end(method === "HEAD" ? undefined : wrong ? Buffer.alloc(file.bytes.length, 32) : file.bytes);
      };
      expect(await refusal(at.fetched())).toContain(`${name}: the bytes do not match the checksum ${file.etag} that the hub gives, twice`);
      wrong = false;
      expect(readFileSync(join(await at.fetched(), name)).equals(file.bytes)).toBe(true);
    }
  });

  test("a proxy that compresses: its length is not the file's", async () => {
    await using at = await hubAndCache();
    const file = at.repo.files.get("config.json")!;
    const packed = gzipSync(file.bytes);
    at.hub.fault = ({ method, path }, response) =>
      path.endsWith("/config.json") && !!response.writeHead(200, { ETag: `W/"${file.etag}"`, "Content-Encoding": "gzip", "Content-Length": String(packed.length) }).end(method === "HEAD" ? undefined : packed);
    expect(readFileSync(join(await at.fetched(), "config.json")).equals(file.bytes)).toBe(true);
  });

  test("more bytes than were announced", async () => {
    await using at = await hubAndCache();
    const { etag, bytes } = at.repo.files.get(shard)!;
    at.hub.fault = ({ origin, path }, response) => origin === "files" && path === `/${etag}` && !!response.writeHead(200).end(Buffer.concat([bytes, Buffer.from("x")]));
    expect(await refusal(at.fetched())).toContain(`sends more than the ${bytes.length} bytes that the file has`);
  });
});

describe("without the hub", () => {
  test("what is there is used, what is not is named", async () => {
    await using at = await hubAndCache();
    const offline = { offline: true, endpoint: "http://127.0.0.1:1" };
    const where = `in ${at.environment.cacheDir} (HF_HUB_CACHE)`;
    expect(await refusal(at.fetched(REPO, {}, offline))).toBe(`--model acme/tiny: HF_HUB_OFFLINE is set and no commit of revision "main" is known ${where}`);
    const path = await at.fetched();
    expect(await at.fetched(REPO, {}, offline)).toBe(path);
    for (const [name, missing] of [[SHARDS[1]!, SHARDS[1]!], ["model.safetensors.index.json", "model.safetensors"], ["tokenizer.json", "tokenizer.json"], ["config.json", "config.json"]] as const) {
      await Bun.file(join(path, name)).delete();
      expect(await refusal(at.fetched(REPO, {}, offline))).toBe(`--model acme/tiny: HF_HUB_OFFLINE is set and ${missing} of commit ${at.repo.commit} is not ${where}`);
    }
    // What huggingface_hub left half done: its list of the repo tells what is still to come.
    await at.fetched();
    mkdirSync(join(at.folder, "trees"));
    writeFileSync(join(at.folder, "trees", `${at.repo.commit}.json`), JSON.stringify({ format_version: 1, files: Object.fromEntries([...at.repo.files.keys(), "README.md"].map((name) => [name, { size: 1, blob_id: "x" }])) }));
    expect(await at.fetched(REPO, {}, offline)).toBe(path);
    await Bun.file(join(path, "tokenizer_config.json")).delete();
    expect(await refusal(at.fetched(REPO, {}, offline))).toContain("tokenizer_config.json of commit");
    // An index that is none is no model either, and no reason not to ask the hub.
    writeFileSync(at.blob(at.repo.files.get("model.safetensors.index.json")!.etag), "{");
    expect(await refusal(at.fetched(REPO, {}, offline))).toMatch(/tokenizer_config\.json|a readable model\.safetensors\.index\.json/);
    expect(await refusal(at.fetched(`acme/tiny@${"b".repeat(40)}`, {}, offline))).toContain("config.json of commit bbbb");
  });
});

describe("the disk", () => {
  test("too small for what is still missing: said before a byte is on the line", async () => {
    await using at = await hubAndCache();
    at.hub.fault = ({ path, method }, response) =>
      method === "HEAD" && path.endsWith(shard) && !!response.writeHead(302, { Location: "http://127.0.0.1:1/x", "X-Linked-Etag": `"${"a".repeat(64)}"`, "X-Linked-Size": "900000000000000" }).end();
    expect(await refusal(at.fetched())).toMatch(/^--model acme\/tiny: 900 TB are still to be downloaded, but only [\d.]+ [GMT]B are free in .*\/hub \(HF_HUB_CACHE\)$/);
    expect(at.hub.asked.some(({ origin }) => origin === "files")).toBe(false);
  });

  test("room for the download alone is not enough", async () => {
    await using at = await hubAndCache();
    const cache = new RepoCache(at.environment.cacheDir, REPO);
    expect(() => requireRoom(cache, cache.freeBytes()! - (32 << 20), "x")).toThrow(/^x: .* are still to be downloaded, but only .* are free in .*\(HF_HUB_CACHE\), of which 67\.1 MB must stay free$/);
    expect(() => requireRoom(cache, 0, "x")).not.toThrow();
  });

  test("that fills up on the way", async () => {
    await using at = await hubAndCache();
    mkdirSync(join(at.folder, "blobs"), { recursive: true });
    symlinkSync("/dev/full", `${at.blob(at.repo.files.get(shard)!.etag)}.incomplete`);
    expect(await refusal(at.fetched())).toMatch(new RegExp(`^--model acme/tiny: ${shard} in .* \\(HF_HUB_CACHE\\): the disk is full; make room, the download goes on from there \\(ENOSPC`));
  });

  test("that is no place for a cache", async () => {
    await using at = await hubAndCache();
    writeFileSync(join(at.environment.cacheDir, "..", "..", "file"), "");
    const [cacheDir, words] = [join(at.environment.cacheDir, "..", "..", "file"), /its folder in .*file \(HF_HUB_CACHE\): it cannot be written \(ENOTDIR/];
    expect(await refusal(at.fetched(REPO, {}, { cacheDir }))).toMatch(words);
    expect(await refusal(probeModel(parseReference(REPO)!, { ...at.environment, cacheDir }, new AbortController().signal).then(() => ""))).toMatch(words);
  });
});
