import { describe, expect, test } from "bun:test";
import { mkdirSync } from "node:fs";
import { readHubEnvironment } from "../../../../src/config/hub-env.ts";
import { parseReference, referenceText } from "../../../../src/model/hub/reference.ts";
import { bytesText, durationText, Progress } from "../../../../src/model/hub/progress.ts";
import { keepLogs, logged, scratch } from "./support.ts";

keepLogs();

describe("what --model means", () => {
  test.each([
    ["Qwen/Qwen3-8B", "Qwen/Qwen3-8B", null, null],
    ["gpt2", "gpt2", null, null],
    ["Qwen/Qwen3-8B@v1.0", "Qwen/Qwen3-8B", "v1.0", null],
    ["Qwen/Qwen3-8B@refs/pr/7", "Qwen/Qwen3-8B", "refs/pr/7", null],
    ["a/b:q4/x-Q4_1.gguf", "a/b", null, "q4/x-Q4_1.gguf"],
    ["a/b@main:x.GGUF", "a/b", "main", "x.GGUF"],
  ])("%s is a repo", (text, repo, revision, file) => {
    expect(parseReference(text)).toEqual({ repo, revision, file });
    expect(referenceText(parseReference(text)!)).toBe(text);
  });

  test.each(["/models/Qwen3", "./no-such", "../no-such", "~/models/x", "models/", "a/b/c", "model.gguf", "a/model.gguf", "a\\b", "", ".", "..x"].filter((path) => path !== "."))("%p looks like a path and is not there", (text) => {
    expect(() => parseReference(text)).toThrow(`--model: "${text}" does not exist`);
  });

  test.each(["a b", "a--b/c", "-a/b", "a/b.git", "a/b@", "a/b:", "é/b", "a\0b", "a/b@v:"])("%p is neither", (text) => {
    expect(() => parseReference(text)).toThrow(/--model: .*(neither a path that exists nor a repo id|does not exist)/);
  });

  test.each(["a/b@../x", "a/b@x..y", "a/b@/x", "a/b@-x", "a/b@x//y", "a/b@x/.y", "a/b@x.lock"])("%p is no revision", (text) => {
    expect(() => parseReference(text)).toThrow("cannot be a revision");
  });

  test.each(["a/b:model.safetensors", "a/b:../x.gguf", "a/b:/x.gguf", "a/b:x/../y.gguf", "a/b:x//y.gguf"])("%p names no .gguf file of a repo", (text) => {
    expect(() => parseReference(text)).toThrow("expected a .gguf file behind the colon");
  });

  test("what exists wins", () => {
    const before = process.cwd();
    process.chdir(scratch);
    try {
      expect(parseReference("acme/there")).not.toBeNull();
      mkdirSync("acme/there", { recursive: true });
      expect(parseReference("acme/there")).toBeNull();
      expect(parseReference("acme")).toBeNull();
    } finally {
      process.chdir(before);
    }
  });
});

describe("variables", () => {
  const read = (env: Record<string, string>) => readHubEnvironment({ HOME: "/u", ...env });
  test.each([
    [{}, "/u/.cache/huggingface/hub", "/u/.cache/huggingface/token"],
    [{ XDG_CACHE_HOME: "/c" }, "/c/huggingface/hub", "/c/huggingface/token"],
    [{ XDG_CACHE_HOME: "/c", HF_HOME: "/h" }, "/h/hub", "/h/token"],
    [{ HF_HOME: "~/h" }, "/u/h/hub", "/u/h/token"],
    [{ HF_HOME: "/h", HF_HUB_CACHE: "/b" }, "/b", "/h/token"],
    [{ HUGGINGFACE_HUB_CACHE: "/old" }, "/old", "/u/.cache/huggingface/token"],
    [{ HUGGINGFACE_HUB_CACHE: "/old", HF_HUB_CACHE: "/new", HF_TOKEN_PATH: "/t" }, "/new", "/t"],
  ])("%p", (env, cacheDir, tokenPath) => {
    expect(read(env)).toMatchObject({ cacheDir, tokenPath });
  });
  test("tokens and addresses", () => {
    expect(read({}).token).toBeNull();
    expect(read({ HUGGING_FACE_HUB_TOKEN: "old" }).token).toBe("old");
    expect(read({ HUGGING_FACE_HUB_TOKEN: "old", HF_TOKEN: " hf_x\n" }).token).toBe("hf_x");
    expect(read({ HF_ENDPOINT: "https://mirror/hf//" }).endpoint).toBe("https://mirror/hf");
    expect(() => read({ HF_ENDPOINT: "mirror" })).toThrow('HF_ENDPOINT: expected an http:// or https:// address, got "mirror"');
    expect(() => read({ HF_TOKEN: "two words" })).toThrow(/^HF_TOKEN: expected a token(?!.*two words)/);
    expect(() => read({ HF_HUB_OFFLINE: "perhaps" })).toThrow("HF_HUB_OFFLINE: expected true or false");
  });
});

describe("progress", () => {
  test("sizes and times", () => {
    expect([0, 999, 1000, 16_060_522_240, 999_600].map(bytesText)).toEqual(["0 B", "999 B", "1.00 kB", "16.1 GB", "1.00 MB"]);
    expect([0, 59.6, 61, 3723].map(durationText)).toEqual(["0:00", "1:00", "1:01", "1:02:03"]);
  });

  test("the rate is that of the last ten seconds and of received bytes alone", () => {
    let now = 0;
    const drawn: string[] = [];
    const progress = new Progress("acme/tiny", 1000, 1, { terminal: (text) => void drawn.push(text), now: () => now });
    progress.start();
    progress.add(400, true);
    now = 1000;
    progress.tick();
    expect(progress.state()).toEqual({ bytes: 400, bytesTotal: 1000, bytesPerSecond: 0, secondsLeft: null });
    progress.add(100);
    now = 2000;
    progress.tick();
    expect(progress.state()).toEqual({ bytes: 500, bytesTotal: 1000, bytesPerSecond: 50, secondsLeft: 10 });
    expect(drawn.at(-1)).toBe("\r\x1b[Kacme/tiny [############------------] 50% 500 B of 1.00 kB, 50 B/s, 0:10 left");
    for (let i = 0; i < 12; i++) {
      now += 1000;
      progress.tick();
    }
    expect(progress.state().bytesPerSecond).toBe(0);
    progress.stop(true);
    expect(drawn.at(-1)).toBe("\r\x1b[K");
  });

  test("without a terminal it is log lines with rate and time left", () => {
    let now = 0;
    logged.length = 0;
    const progress = new Progress("acme/tiny", 1000, 1, { terminal: null, now: () => now });
    progress.start();
    progress.add(250);
    for (let i = 0; i < 20; i++) {
      now += 250;
      progress.tick();
    }
    progress.stop(false);
    const lines = logged.map((line) => JSON.parse(line) as Record<string, unknown>);
    expect(lines.map(({ message }) => message)).toEqual(["download starts", "downloading", "download stopped"]);
    expect(lines[1]).toMatchObject({ repo: "acme/tiny", bytes: 250, bytesTotal: 1000, bytesPerSecond: 50, secondsLeft: 15 });
  });
});
