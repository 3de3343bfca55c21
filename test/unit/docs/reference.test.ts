/** The reference pages: that they are fresh is a static check; here, that nothing which is read is missing from the tables they are made of. */
import { expect, test } from "bun:test";
import { Glob } from "bun";
import { readFileSync } from "node:fs";
import { join } from "node:path";

const root = join(import.meta.dir, "../../..");
const flags = readFileSync(join(root, "docs/reference-flags.md"), "utf8");
const metrics = readFileSync(join(root, "docs/reference-metrics.md"), "utf8");

/** Not for people: where the shell is, what builds, tests and fuzzers set. */
const APART = new Set(["HOME", "LAYERSCALE_FUZZ_SAVE", "LAYERSCALE_COMMIT", "LS_FAKE_QUEUES"]);

async function sources(folder: string, pattern: string): Promise<string> {
  const texts: string[] = [];
  for await (const file of new Glob(pattern).scan(join(root, folder))) texts.push(await Bun.file(join(root, folder, file)).text());
  return texts.join("\n");
}

test("every variable that the sources name is in the reference", async () => {
  const text = (await sources("src", "**/*.ts")) + (await sources("native", "**/*.{h,cpp}")) + (await sources("cpu", "*.{h,cpp}"));
  const read = [...text.matchAll(/process\.env\.([A-Z_]+)|getenv\("([A-Z_]+)"|\b((?:LAYERSCALE|DYN|HF|ETCD|NATS)_[A-Z][A-Z_]*[A-Z])\b/g)].map((match) => match[1] ?? match[2] ?? match[3]!);
  const known = new Set([...flags.matchAll(/`([A-Z][A-Z0-9_]+)`/g)].map((match) => match[1]!));
  const missing = [...new Set(read)].filter((name) => !known.has(name) && !APART.has(name) && !/_$/.test(name));
  expect(missing.sort()).toEqual([]);
});

test("every metric family that the sources name is in the reference", async () => {
  const text = await sources("src", "**/*.ts");
  const named = [...new Set([...text.matchAll(/"((?:layerscale|dynamo)_[a-z0-9_]+_(?:total|seconds|bytes|percent|rate|blocks|pages\w*|requests\w*|tasks|capacity|depth|queue|request))"/g)].map((match) => match[1]!))];
  expect(named.length).toBeGreaterThan(40);
  expect(named.filter((name) => !metrics.includes(`\`${name}\``))).toEqual([]);
});
