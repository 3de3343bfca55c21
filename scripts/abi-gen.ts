/** Writes src/engine/native/abi.gen.ts from native/layerscale.h and what it includes of its folder. `--check` writes nothing and exits 1 when the file is stale. */
import { existsSync, readFileSync, writeFileSync } from "node:fs";
import { dirname, join } from "node:path";

const ROOT = join(import.meta.dir, "..");
const HEADER = join(ROOT, "native/layerscale.h");
const OUTPUT = join(ROOT, "src/engine/native/abi.gen.ts");

interface Field { type: string; name: string }

/** C scalar → [bun:ffi type, bytes]. Anything with a star is a pointer. */
const SCALARS: Record<string, [ffi: string, bytes: number]> = {
  int32_t: ["i32", 4], uint32_t: ["u32", 4], uint64_t: ["u64", 8], int64_t: ["i64", 8], float: ["f32", 4], double: ["f64", 8], void: ["void", 0],
};

function ffiType(type: string, where: string): string {
  if (type.includes("*")) return "ptr";
  const scalar = SCALARS[type];
  if (scalar === undefined) throw new Error(`layerscale.h: ${where}: type "${type}" is not known to scripts/abi-gen.ts`);
  return scalar[0];
}

/** "const int32_t *tokens" → { type: "const int32_t *", name: "tokens" } */
function declarator(text: string): Field {
  const match = /^(.*?)(\w+)$/s.exec(text.trim());
  if (match === null) throw new Error(`layerscale.h: cannot read the declaration "${text}"`);
  return { type: match[1]!.replace(/\s+/g, " ").trim(), name: match[2]! };
}

function evaluate(text: string): number | null {
  const match = /^\(?\s*(-?(?:0x[0-9a-fA-F]+|\d+))[uUlL]*\s*\)?$/.exec(text.trim());
  return match === null ? null : Number(match[1]);
}

function generate(header: string): string {
  const code = header.replace(/\/\*[\s\S]*?\*\//g, " ").replace(/\/\/[^\n]*/g, " ");
  const out: string[] = [
    "// Generated from native/layerscale.h by scripts/abi-gen.ts. Do not edit: run `bun scripts/abi-gen.ts`.",
    "",
  ];

  for (const match of code.matchAll(/^#define\s+(LS_\w+)[ \t]+(\S[^\n]*)$/gm)) {
    const value = evaluate(match[2]!);
    if (value !== null) out.push(`export const ${match[1]} = ${value};`);
  }

  for (const match of code.matchAll(/typedef\s+enum\s+(\w+)\s*\{([^}]*)\}/g)) {
    out.push("", `export const ${match[1]} = {`);
    let next = 0;
    for (const item of match[2]!.split(",").map((text) => text.trim()).filter((text) => text !== "")) {
      const [name, value] = item.split("=").map((text) => text.trim()) as [string, string | undefined];
      const number = value === undefined ? next : evaluate(value);
      if (number === null) throw new Error(`layerscale.h: enum value "${item}" is not a number`);
      out.push(`  ${name}: ${number},`);
      next = number + 1;
    }
    out.push("} as const;");
  }

  for (const match of code.matchAll(/typedef\s+struct\s+(\w+)\s*\{([^}]*)\}/g)) {
    let offset = 0;
    let alignment = 1;
    const fields: string[] = [];
    for (const text of match[2]!.split(";").map((field) => field.trim()).filter((field) => field !== "")) {
      const { type, name } = declarator(text);
      const bytes = type.includes("*") ? 8 : (SCALARS[type]?.[1] ?? 0);
      if (bytes === 0) throw new Error(`layerscale.h: ${match[1]}.${name}: type "${type}" has no size`);
      offset = Math.ceil(offset / bytes) * bytes;
      alignment = Math.max(alignment, bytes);
      fields.push(`    ${name}: { offset: ${offset}, type: "${ffiType(type, name)}" },`);
      offset += bytes;
    }
    out.push("", `export const ${match[1]} = {`, `  size: ${Math.ceil(offset / alignment) * alignment},`, "  fields: {", ...fields, "  },", "} as const;");
  }

  out.push("", "/** Argument and return types as bun:ffi names them. */", "export const symbols = {");
  let found = 0;
  for (const match of code.matchAll(/^LS_API\s+([\w\s*]+?)\s*(ls_\w+)\s*\(([^)]*)\)\s*;/gm)) {
    const args = match[3]!.trim() === "void" ? [] : match[3]!.split(",").map((arg) => `"${ffiType(declarator(arg).type, match[2]!)}"`);
    out.push(`  ${match[2]}: { args: [${args.join(", ")}], returns: "${ffiType(match[1]!.trim(), match[2]!)}" },`);
    found++;
  }
  const declared = [...code.matchAll(/^LS_API\b/gm)].length;
  if (found !== declared) throw new Error(`layerscale.h: read ${found} of ${declared} LS_API declarations`);
  out.push("} as const;", "");
  return out.join("\n");
}

/** The header with the headers of its folder that it includes in their place. */
function readHeader(path: string): string {
  return readFileSync(path, "utf8").replace(/^#include "([\w.]+)"$/gm, (_, name: string) => readHeader(join(dirname(path), name)));
}

const generated = generate(readHeader(HEADER));
const current = existsSync(OUTPUT) ? readFileSync(OUTPUT, "utf8") : "";
if (process.argv.includes("--check")) {
  if (current !== generated) {
    console.error("src/engine/native/abi.gen.ts does not match native/layerscale.h: run `bun scripts/abi-gen.ts`");
    process.exit(1);
  }
} else if (current !== generated) {
  writeFileSync(OUTPUT, generated);
}
