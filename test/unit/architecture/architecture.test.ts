import { expect, test } from "bun:test";
import { Glob } from "bun";
import { dirname, join, relative } from "node:path";

const src = join(import.meta.dir, "../../../src");

/** Low to high; a file may import its own folder and lower layers. Folders of one layer do not import each other unless listed in BESIDE. */
const LAYERS = [["util"], ["config", "telemetry"], ["license", "model", "tokenizer", "engine"], ["runtime"], ["serve", "dynamo"], ["doctor"], ["cli"], ["main"]];
/** Imports between folders of one layer, or of types from above, that are meant: [from, to, types only]. */
const ALLOWED: [string, string, boolean][] = [
  ["telemetry", "engine", true],
  ["model", "tokenizer", true],
];

const layerOf = (folder: string) => LAYERS.findIndex((layer) => layer.includes(folder));
const folderOf = (path: string) => (path.includes("/") ? path.split("/")[0]! : path.replace(/\.ts$/, ""));

interface Import {
  from: string;
  to: string;
  typesOnly: boolean;
}

/** Every relative import of every source file, type imports included (the transpiler's scan drops those). */
async function imports(): Promise<Import[]> {
  const transpiler = new Bun.Transpiler({ loader: "ts" });
  const found: Import[] = [];
  for await (const file of new Glob("**/*.ts").scan(src)) {
    const text = await Bun.file(join(src, file)).text();
    const runtime = new Set(transpiler.scanImports(text).map((item) => item.path));
    const all = new Set([...runtime, ...[...text.matchAll(/(?:from|import)\s*\(?\s*["'](\.[^"']+)["']/g)].map((match) => match[1]!)]);
    for (const path of all) {
      if (!path.startsWith(".")) continue;
      const to = relative(src, join(src, dirname(file), path));
      if (to.startsWith("..")) continue; // package.json and the built library
      found.push({ from: file, to, typesOnly: !runtime.has(path) });
    }
  }
  return found;
}

test("every source folder has a layer", async () => {
  const folders = new Set((await imports()).map((item) => folderOf(item.from)));
  expect([...folders].filter((folder) => layerOf(folder) < 0)).toEqual([]);
});

test("no import goes upwards or sideways", async () => {
  const wrong = (await imports()).filter(({ from, to, typesOnly }) => {
    const [a, b] = [folderOf(from), folderOf(to)];
    if (a === b || layerOf(b) < layerOf(a)) return false;
    return !ALLOWED.some(([x, y, types]) => x === a && y === b && (!types || typesOnly));
  });
  expect(wrong.map((item) => `${item.from} imports ${item.to}`)).toEqual([]);
});

test("only main ends the process", async () => {
  const guilty: string[] = [];
  for await (const file of new Glob("**/*.ts").scan(src))
    if (file !== "main.ts" && /process\.exit\s*\(/.test(await Bun.file(join(src, file)).text())) guilty.push(file);
  expect(guilty).toEqual([]);
});
