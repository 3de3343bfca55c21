import { parseBoolean, UsageError } from "./flags.ts";

export type Env = Record<string, string | undefined>;

/** One variable: how to read it and what help says. An empty value counts as unset; a bad one is an error that names the variable. */
export interface Variable<T> {
  name: string;
  help: string;
  shown: string;
  read(text: string | undefined): T;
}

export function variable<T>(name: string, shown: string, help: string, fallback: T, parse: (text: string, fail: (expected: string) => UsageError) => T): Variable<T> {
  return {
    name,
    help,
    shown,
    read: (text) => (text === undefined || text === "" ? fallback : parse(text, (expected) => new UsageError(`${name}: expected ${expected}, got "${text}"`))),
  };
}
export const text = <T extends string | null>(name: string, shown: string, help: string, fallback: T) => variable<string | T>(name, shown, help, fallback, (value) => value);
export const choice = <T extends string>(name: string, help: string, of: readonly T[], fallback: T) =>
  variable<T>(name, fallback, `${of.join(" | ")}; ${help}`, fallback, (value, fail) => {
    const found = of.find((item) => item === value.toLowerCase());
    if (!found) throw fail(`one of ${of.join(", ")}`);
    return found;
  });
export const integer = <T extends number | null>(name: string, shown: string, help: string, fallback: T, min: number, max: number) =>
  variable<number | T>(name, shown, help, fallback, (value, fail) => {
    const n = /^-?\d+$/.test(value.trim()) ? Number(value) : NaN;
    if (!(n >= min && n <= max)) throw fail(`an integer from ${min} to ${max}`);
    return n;
  });
export const boolean = (name: string, help: string, fallback: boolean) =>
  variable<boolean>(name, String(fallback), help, fallback, (value, fail) => {
    const b = parseBoolean(value);
    if (b === null) throw fail("true or false");
    return b;
  });

export const path = (name: string, help: string, fallback: string) =>
  variable<string>(name, fallback, help, fallback, (value, fail) => {
    if (!/^\/[^\s?#]*$/.test(value)) throw fail("a path that begins with /");
    return value;
  });
export const json = (value: string): unknown => {
  try {
    return JSON.parse(value);
  } catch {
    return undefined;
  }
};

export type VariableTable<T> = { [K in keyof T]: Variable<unknown> };

/** @throws UsageError naming the variable, its value and what was expected */
export function readVariables<T extends object>(table: VariableTable<T>, env: Env): T {
  return Object.fromEntries(Object.entries<Variable<unknown>>(table).map(([key, found]) => [key, found.read(env[found.name])])) as T;
}

/** Help text of a table: one line per variable. */
export function variablesHelp(table: Readonly<Record<string, Variable<unknown>>>): string {
  const rows = Object.values(table);
  const width = Math.max(...rows.map((row) => row.name.length)) + 4;
  return rows.map((row) => `  ${row.name.padEnd(width - 2)}${row.help} [default ${row.shown}]`).join("\n");
}
