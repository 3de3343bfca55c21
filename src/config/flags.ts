import { parseArgs } from "node:util";

/** A command line or environment that cannot be used. The message names the flag or variable, the value and what was expected. */
export class UsageError extends Error {
  override name = "UsageError";
}

interface Common {
  help: string;
  /** Variable read when the flag is absent; an empty value counts as absent. */
  env?: string;
  /** What stands for the value in help: `<N>`. */
  metavar?: string;
}
export type Flag =
  | (Common & { kind: "string"; default: string | null })
  | (Common & { kind: "int"; default: number | null; min: number; max: number })
  | (Common & { kind: "float"; default: number | null; above?: number; max: number })
  | (Common & { kind: "enum"; of: readonly string[]; default: string })
  | (Common & { kind: "bool"; default: boolean })
  | (Common & { kind: "list"; of: readonly string[]; default: readonly string[] })
  /** Takes no value; presence turns it on (its variable: a boolean). */
  | (Common & { kind: "switch" });

export type FlagTable = Record<string, Flag>;

type Value<F extends Flag> = F extends { kind: "string" | "enum" } ? (F extends { default: null } ? string | null : F extends { kind: "string"; default: infer D } ? (D extends string ? string : string | null) : string)
  : F extends { kind: "int" | "float"; default: infer D } ? (D extends number ? number : number | null)
  : F extends { kind: "list" } ? string[]
  : boolean;
export type FlagValues<T extends FlagTable> = { [K in keyof T]: Value<T[K]> };

/** Keeps literal types, so that `FlagValues` is exact. */
export function flags<const T extends FlagTable>(table: T): T {
  return table;
}

/** "maxNumSeqs" -> "max-num-seqs" */
export const flagName = (key: string): string => key.replace(/[A-Z]/g, (c) => "-" + c.toLowerCase());

/**
 * Parses argv (without program and subcommand) by the table: flag, else variable, else default.
 * @throws UsageError for an unknown flag (with the nearest name), a missing, superfluous or bad value, a positional argument
 */
export function parseFlags<T extends FlagTable>(table: T, argv: readonly string[], env: Record<string, string | undefined>): FlagValues<T> {
  const given = tokenize(table, argv);
  const values: Record<string, unknown> = {};
  for (const [key, flag] of Object.entries(table)) {
    const name = flagName(key);
    if (given.has(name)) values[key] = flag.kind === "switch" ? true : convert(flag, given.get(name) as string, `--${name}`);
    else if (flag.env !== undefined && env[flag.env]) values[key] = convert(flag, env[flag.env] as string, flag.env);
    else values[key] = flag.kind === "switch" ? false : flag.kind === "list" ? [...flag.default] : flag.default;
  }
  return values as FlagValues<T>;
}

/** Flag name → raw text ("" for a switch). The last of repeated flags wins. */
function tokenize(table: FlagTable, argv: readonly string[]): Map<string, string> {
  const options = Object.fromEntries(
    Object.entries(table).map(([key, flag]) => [flagName(key), { type: flag.kind === "switch" ? ("boolean" as const) : ("string" as const) }]),
  );
  const { tokens } = parseArgs({ args: [...argv], options, strict: false, tokens: true, allowPositionals: true });
  const given = new Map<string, string>();
  for (const token of tokens) {
    if (token.kind === "positional") throw new UsageError(`unexpected argument "${token.value}"; options start with --`);
    if (token.kind !== "option") continue;
    const option = options[token.name];
    if (!option || token.rawName !== `--${token.name}`) throw new UsageError(unknownFlag(token.rawName, Object.keys(options)));
    if (option.type === "boolean" && token.value !== undefined)
      throw new UsageError(`--${token.name}: takes no value, got "${token.value}"`);
    if (option.type === "string" && token.value === undefined) throw new UsageError(`--${token.name}: expected a value`);
    // `--model --port 1` is a forgotten value, not a model called "--port".
    if (option.type === "string" && !token.inlineValue && token.value?.startsWith("--"))
      throw new UsageError(`--${token.name}: expected a value, got the flag "${token.value}"`);
    given.set(token.name, token.value ?? "");
  }
  return given;
}

function convert(flag: Flag, text: string, source: string): unknown {
  const fail = (expected: string) => new UsageError(`${source}: expected ${expected}, got "${text}"`);
  switch (flag.kind) {
    case "string":
      if (text.trim() === "") throw fail("a value");
      return text;
    case "int": {
      const n = /^[+-]?\d+$/.test(text.trim()) ? Number(text) : NaN;
      if (!(n >= flag.min && n <= flag.max)) throw fail(`an integer from ${flag.min} to ${flag.max}`);
      return n;
    }
    case "float": {
      const n = text.trim() === "" ? NaN : Number(text);
      if (!(n > (flag.above ?? 0) && n <= flag.max)) throw fail(`a number above ${flag.above ?? 0}, up to ${flag.max}`);
      return n;
    }
    case "enum":
      if (!flag.of.includes(text)) throw fail(`one of ${flag.of.join(", ")}`);
      return text;
    case "list": {
      const items = text.split(",").map((item) => item.trim().toLowerCase()).filter((item) => item !== "");
      if (items.length === 0 || items.some((item) => !flag.of.includes(item))) throw fail(`a comma-separated list of ${flag.of.join(", ")}`);
      return items;
    }
    case "bool":
    case "switch":
      return parseBoolean(text) ?? (() => { throw fail("true or false"); })();
  }
}

/** Words that Dynamo's own tools take for booleans; null for anything else. */
export function parseBoolean(text: string): boolean | null {
  if (/^(1|true|yes|on)$/i.test(text.trim())) return true;
  if (/^(0|false|no|off)$/i.test(text.trim())) return false;
  return null;
}

function unknownFlag(raw: string, names: string[]): string {
  const word = raw.replace(/^-+/, "");
  const near = names.map((name) => ({ name, d: distance(word, name) })).sort((a, b) => a.d - b.d)[0];
  const hint = near && near.d <= Math.max(2, Math.floor(word.length / 3)) ? `; did you mean --${near.name}?` : "; see --help";
  return `unknown option ${raw}${hint}`;
}

/** Levenshtein distance, two rows. */
function distance(a: string, b: string): number {
  let previous = Array.from({ length: b.length + 1 }, (_, j) => j);
  for (let i = 1; i <= a.length; i++) {
    const row = [i];
    for (let j = 1; j <= b.length; j++)
      row.push(Math.min(row[j - 1]! + 1, previous[j]! + 1, previous[j - 1]! + (a[i - 1] === b[j - 1] ? 0 : 1)));
    previous = row;
  }
  return previous[b.length]!;
}

/** Help text of a table: one line per flag, wrapped by hand in the table, variable and default behind. */
export function helpText(table: FlagTable): string {
  const rows = Object.entries(table).map(([key, flag]) => {
    const value = flag.kind === "switch" ? "" : ` <${flag.metavar ?? { string: "TEXT", int: "N", float: "F", enum: "NAME", bool: "B", list: "LIST" }[flag.kind]}>`;
    const notes: string[] = [];
    if (flag.kind === "enum") notes.push(flag.of.join(" | "));
    if (flag.env) notes.push(`env ${flag.env}`);
    if (flag.kind !== "switch" && flag.default !== null) notes.push(`default ${Array.isArray(flag.default) ? flag.default.join(",") : flag.default}`);
    return { left: `  --${flagName(key)}${value}`, right: flag.help + (notes.length ? ` [${notes.join("; ")}]` : "") };
  });
  const width = Math.min(44, Math.max(...rows.map((row) => row.left.length)) + 2);
  return rows.map((row) => (row.left.length < width ? row.left.padEnd(width) + row.right : `${row.left}\n${" ".repeat(width)}${row.right}`)).join("\n");
}
