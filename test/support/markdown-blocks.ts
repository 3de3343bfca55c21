/** Fenced blocks of the documentation, and which of them a test runs. */
import { readdirSync, readFileSync } from "node:fs";
import { join } from "node:path";

export interface Block {
  file: string;
  /** Of its opening fence, from 1. */
  line: number;
  /** Empty when the fence names none. */
  language: string;
  text: string;
  /** From the comment on the line before: `not run: REASON`, or `run: background URL` for a server that the following blocks use. */
  notRun: string | null;
  background: string | null;
  /** A comment of this form that is none of the two. */
  unknownMark: string | null;
}

export const root = join(import.meta.dir, "../..");
export const SHELL = ["sh", "bash", "shell", "console"];

export const documents = (): string[] => ["README.md", "CONTRIBUTING.md", ...readdirSync(join(root, "docs")).filter((name) => name.endsWith(".md")).sort().map((name) => `docs/${name}`)];

export function blocksOf(file: string, text = readFileSync(join(root, file), "utf8")): Block[] {
  const lines = text.split("\n");
  const blocks: Block[] = [];
  for (let at = 0; at < lines.length; at++) {
    const fence = /^(\s*)(`{3,}|~{3,})\s*(\S*)/.exec(lines[at]!);
    if (!fence) continue;
    const [, indent, marks, language] = fence as unknown as [string, string, string, string];
    const end = lines.findIndex((line, index) => index > at && line.trim() === marks);
    if (end < 0) throw new Error(`${file}:${at + 1}: the block does not end`);
    const mark = /^\s*<!--\s*((?:not )?run\b.*?)\s*-->\s*$/.exec(lines[at - 1] ?? "")?.[1] ?? null;
    const notRun = /^not run: (\S.*)$/.exec(mark ?? "")?.[1] ?? null;
    const background = /^run: background (https?:\S+)$/.exec(mark ?? "")?.[1] ?? null;
    blocks.push({ file, line: at + 1, language, text: lines.slice(at + 1, end).map((line) => line.slice(indent.length)).join("\n"), notRun, background, unknownMark: mark !== null && notRun === null && background === null ? mark : null });
    at = end;
  }
  return blocks;
}
