import { describe, expect, test } from "bun:test";
import { existsSync, readFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { blocksOf, documents, root, SHELL } from "../../support/markdown-blocks.ts";

describe("documentation", () => {
  test("every block names its language, so that none is left out of the test that runs them", () => {
    expect(documents().flatMap((file) => blocksOf(file).filter(({ language }) => language === "").map(({ line }) => `${file}:${line}: a block without a language (sh for commands, text for drawings)`))).toEqual([]);
  });
  test("marks are on shell blocks, and of a known form", () => {
    const wrong = documents().flatMap((file) => blocksOf(file).filter((block) => block.unknownMark !== null || ((block.notRun ?? block.background) !== null && !SHELL.includes(block.language))));
    expect(wrong.map(({ file, line, unknownMark }) => `${file}:${line}: ${unknownMark ?? "a mark on what is no shell block"}`)).toEqual([]);
  });
  test("links lead to files that exist", () => {
    const broken = documents().flatMap((file) =>
      [...readFileSync(join(root, file), "utf8").matchAll(/\]\(([^)#\s]+)(?:#[^)]*)?\)/g)].map((match) => match[1]!).filter((target) => !/^[a-z]+:/.test(target) && !existsSync(join(root, dirname(file), target))).map((target) => `${file}: ${target}`),
    );
    expect(broken).toEqual([]);
  });
  test("blocks are read as Markdown has them", () => {
    const text = "a\n<!-- not run: why -->\n```sh\nx\n```\n  ```sh\n  y\n  ```\n<!-- run: background http://h:1/p -->\n~~~bash\nz\n~~~\n<!-- run: later -->\n```sh\nw\n```\n";
    expect(blocksOf("a.md", text).map(({ line, language, text: body, notRun, background, unknownMark }) => [line, language, body, notRun, background, unknownMark])).toEqual([
      [3, "sh", "x", "why", null, null],
      [6, "sh", "y", null, null, null],
      [10, "bash", "z", null, "http://h:1/p", null],
      [14, "sh", "w", null, null, "run: later"],
    ]);
    expect(() => blocksOf("a.md", "```sh\nx\n")).toThrow("a.md:1");
  });
});
