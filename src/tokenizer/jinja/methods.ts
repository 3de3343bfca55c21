import { TemplateError } from "../errors.ts";
import { isPythonSpace, joinTexts, Text } from "./text.ts";
import { Callable, Dict, equal, firstGiven, itemsOf, lengthOf, str, Tuple, typeName } from "./values.ts";
import type { Kwargs, Value } from "./values.ts";

type Method<T> = (self: T, args: Value[], kwargs: Kwargs) => Value;

function stringArg(args: Value[], kwargs: Kwargs, i: number, name: string): Text | null {
  const value = firstGiven(args[i], kwargs.get(name), null);
  if (value !== null && !(value instanceof Text)) throw new TemplateError(`${name} must be a str, not ${typeName(value)}`);
  return value;
}

function textArg(args: Value[], kwargs: Kwargs, i: number, name: string): Text {
  return stringArg(args, kwargs, i, name) ?? raise(`missing argument '${name}'`);
}

function intArg(args: Value[], kwargs: Kwargs, i: number, name: string, fallback: number): number {
  const value = firstGiven(args[i], kwargs.get(name), fallback);
  return typeof value === "number" ? value : raise(`${name} must be an int, not ${typeName(value)}`);
}

function raise(message: string): never {
  throw new TemplateError(message);
}

/** A string or a tuple of strings, as startswith and endswith take. */
function affixes(value: Value | undefined): string[] {
  if (value instanceof Text) return [value.s];
  if (value instanceof Tuple) return value.items.map((item) => str(item).s);
  return raise("expected a str or a tuple of str");
}

const limitOf = (count: number) => (count < 0 ? Infinity : count);
const every = (s: string, test: RegExp) => s !== "" && [...s].every((char) => test.test(char));

/** [from, to) of white-space separated words. */
function words(s: string): [number, number][] {
  const found: [number, number][] = [];
  let start = -1;
  for (let at = 0; at <= s.length; at++) {
    const space = at === s.length || isPythonSpace(s[at]!);
    if (!space && start < 0) start = at;
    if (space && start >= 0) {
      found.push([start, at]);
      start = -1;
    }
  }
  return found;
}

function split(self: Text, args: Value[], kwargs: Kwargs): Value[] {
  const separator = stringArg(args, kwargs, 0, "sep");
  const limit = limitOf(intArg(args, kwargs, 1, "maxsplit", -1));
  if (separator) return separator.length === 0 ? raise("empty separator") : self.split(separator.s, limit);
  const found = words(self.s);
  if (found.length <= limit) return found.map(([from, to]) => self.slice(from, to));
  return [...found.slice(0, limit).map(([from, to]) => self.slice(from, to)), self.slice(found[limit]![0], self.length)];
}

function rsplit(self: Text, args: Value[], kwargs: Kwargs): Value[] {
  const separator = stringArg(args, kwargs, 0, "sep");
  const limit = limitOf(intArg(args, kwargs, 1, "maxsplit", -1));
  if (separator) {
    if (separator.length === 0) return raise("empty separator");
    const parts = self.split(separator.s);
    const joined = Math.max(0, parts.length - 1 - limit);
    return joined === 0 ? parts : [joinTexts(parts.slice(0, joined + 1), separator), ...parts.slice(joined + 1)];
  }
  const found = words(self.s);
  if (found.length <= limit) return found.map(([from, to]) => self.slice(from, to));
  const kept = found.length - limit;
  return [self.slice(0, found[kept - 1]![1]).strip("left", null), ...found.slice(kept).map(([from, to]) => self.slice(from, to))];
}

function splitlines(self: Text, args: Value[], kwargs: Kwargs): Value[] {
  const keep = (args[0] ?? kwargs.get("keepends") ?? false) === true;
  const lines: Text[] = [];
  let from = 0;
  for (const match of self.s.matchAll(/\r\n|[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]/g)) {
    lines.push(self.slice(from, keep ? match.index + match[0].length : match.index));
    from = match.index + match[0].length;
  }
  if (from < self.length) lines.push(self.slice(from, self.length));
  return lines;
}

function partition(self: Text, at: number, separator: Text, fallback: [Text, Text, Text]): Tuple {
  return new Tuple(at < 0 ? fallback : [self.slice(0, at), self.slice(at, at + separator.length), self.slice(at + separator.length)]);
}

/** Characters before a UTF-16 offset. */
const position = (s: string, at: number) => (at < 0 ? -1 : [...s.slice(0, at)].length);

function capitalized(s: string): string {
  const [first = "", ...rest] = s;
  return first.toUpperCase() + rest.join("").toLowerCase();
}

function pad(self: Text, args: Value[], kwargs: Kwargs, side: "left" | "right" | "both"): Text {
  const missing = Math.max(0, intArg(args, kwargs, 0, "width", 0) - lengthOf(self));
  const fill = stringArg(args, kwargs, 1, "fillchar")?.s ?? " ";
  const left = side === "left" ? missing : side === "both" ? Math.floor(missing / 2) : 0;
  return Text.join([Text.of(fill.repeat(left)), self, Text.of(fill.repeat(missing - left))]);
}

/** "{} {0} {name}".format(…) with plain fields. */
function format(self: Text, args: Value[], kwargs: Kwargs): Text {
  const parts: Text[] = [];
  let from = 0;
  let next = 0;
  for (const match of self.s.matchAll(/\{\{|\}\}|\{(\w*)\}|[{}]/g)) {
    parts.push(self.slice(from, match.index));
    from = match.index + match[0].length;
    if (match[0] === "{{" || match[0] === "}}") parts.push(self.slice(match.index, match.index + 1));
    else if (match[1] === undefined) raise("format() supports plain fields only: {}, {0}, {name}");
    else {
      const field = match[1] === "" ? String(next++) : match[1];
      const value = /^\d+$/.test(field) ? args[Number(field)] : kwargs.get(field);
      parts.push(value === undefined ? raise(`format() has no argument for field '${field}'`) : str(value));
    }
  }
  return Text.join([...parts, self.slice(from, self.length)]);
}

export const STRING_METHODS: Record<string, Method<Text>> = {
  upper: (s) => s.rewritten(s.s.toUpperCase()),
  lower: (s) => s.rewritten(s.s.toLowerCase()),
  casefold: (s) => s.rewritten(s.s.toLowerCase()),
  capitalize: (s) => s.rewritten(capitalized(s.s)),
  title: (s) => s.rewritten(s.s.replace(/\p{L}+/gu, capitalized)),
  swapcase: (s) => s.rewritten([...s.s].map((c) => (c === c.toUpperCase() ? c.toLowerCase() : c.toUpperCase())).join("")),
  strip: (s, a, k) => s.strip("both", stringArg(a, k, 0, "chars")?.s ?? null),
  lstrip: (s, a, k) => s.strip("left", stringArg(a, k, 0, "chars")?.s ?? null),
  rstrip: (s, a, k) => s.strip("right", stringArg(a, k, 0, "chars")?.s ?? null),
  startswith: (s, a) => affixes(a[0]).some((prefix) => s.s.startsWith(prefix)),
  endswith: (s, a) => affixes(a[0]).some((suffix) => s.s.endsWith(suffix)),
  removeprefix: (s, a, k) => (s.s.startsWith(textArg(a, k, 0, "prefix").s) ? s.slice(textArg(a, k, 0, "prefix").length) : s),
  removesuffix: (s, a, k) => (s.s.endsWith(textArg(a, k, 0, "suffix").s) ? s.slice(0, s.length - textArg(a, k, 0, "suffix").length) : s),
  split,
  rsplit,
  splitlines,
  partition: (s, a, k) => partition(s, s.s.indexOf(textArg(a, k, 0, "sep").s), textArg(a, k, 0, "sep"), [s, Text.EMPTY, Text.EMPTY]),
  rpartition: (s, a, k) => partition(s, s.s.lastIndexOf(textArg(a, k, 0, "sep").s), textArg(a, k, 0, "sep"), [Text.EMPTY, Text.EMPTY, s]),
  replace: (s, a, k) => s.replace(textArg(a, k, 0, "old").s, textArg(a, k, 1, "new"), limitOf(intArg(a, k, 2, "count", -1))),
  join: (s, a) => joinTexts(itemsOf(a[0] ?? raise("join() needs an iterable")).map(joinable), s),
  find: (s, a, k) => position(s.s, s.s.indexOf(textArg(a, k, 0, "sub").s)),
  rfind: (s, a, k) => position(s.s, s.s.lastIndexOf(textArg(a, k, 0, "sub").s)),
  index: (s, a, k) => (s.s.includes(textArg(a, k, 0, "sub").s) ? position(s.s, s.s.indexOf(textArg(a, k, 0, "sub").s)) : raise("substring not found")),
  count: (s, a, k) => (textArg(a, k, 0, "sub").length === 0 ? lengthOf(s) + 1 : s.split(textArg(a, k, 0, "sub").s).length - 1),
  isdigit: (s) => every(s.s, /^[\p{Nd}\u00b2\u00b3\u00b9\u2070-\u2079\u2080-\u2089]$/u),
  isdecimal: (s) => every(s.s, /^\p{Nd}$/u),
  isnumeric: (s) => every(s.s, /^\p{N}$/u),
  isalpha: (s) => every(s.s, /^\p{L}$/u),
  isalnum: (s) => every(s.s, /^[\p{L}\p{N}]$/u),
  isspace: (s) => s.length > 0 && [...s.s].every(isPythonSpace),
  isupper: (s) => s.s !== s.s.toLowerCase() && s.s === s.s.toUpperCase(),
  islower: (s) => s.s !== s.s.toUpperCase() && s.s === s.s.toLowerCase(),
  ljust: (s, a, k) => pad(s, a, k, "right"),
  rjust: (s, a, k) => pad(s, a, k, "left"),
  center: (s, a, k) => pad(s, a, k, "both"),
  zfill: (s, a, k) => {
    const zeros = Text.of("0".repeat(Math.max(0, intArg(a, k, 0, "width", 0) - lengthOf(s))));
    return /^[+-]/.test(s.s) ? Text.join([s.slice(0, 1), zeros, s.slice(1)]) : zeros.plus(s);
  },
  format,
};

function joinable(item: Value): Text {
  return item instanceof Text ? item : raise(`sequence item: expected str instance, ${typeName(item)} found`);
}

const DICT_METHODS: Record<string, Method<Dict>> = {
  items: (d) => [...d.entries.values()].map((pair) => new Tuple(pair)),
  keys: (d) => [...itemsOf(d)],
  values: (d) => [...d.entries.values()].map(([, value]) => value),
  get: (d, a, k) => firstGiven(d.get(a[0] ?? null), a[1], k.get("default"), null),
  copy: (d) => {
    const copy = new Dict();
    for (const [key, value] of d.entries.values()) copy.set(key, value);
    return copy;
  },
};

const LIST_METHODS: Record<string, Method<Value[]>> = {
  index: (l, a) => {
    const at = l.findIndex((item) => equal(item, a[0] ?? null));
    return at < 0 ? raise(`${str(a[0] ?? null).s} is not in list`) : at;
  },
  count: (l, a) => l.filter((item) => equal(item, a[0] ?? null)).length,
  copy: (l) => [...l],
};

/** What the sandbox of chat templates forbids: everything that changes a value in place. */
const MUTATING: Record<string, readonly string[]> = {
  list: ["append", "clear", "extend", "insert", "pop", "remove", "reverse", "sort"],
  dict: ["clear", "pop", "popitem", "setdefault", "update"],
};

/** A method of a value, bound to it; undefined if its type has none of this name. */
export function methodOf(self: Value, name: string): Callable | undefined {
  const bind = <T extends Value>(table: Record<string, Method<T>>, value: T): Callable | undefined => {
    const method = Object.hasOwn(table, name) ? table[name] : undefined;
    return method && new Callable(name, (args, kwargs) => method(value, args, kwargs));
  };
  if (MUTATING[typeName(self)]?.includes(name))
    return new Callable(name, () => raise(`access to attribute '${name}' of '${typeName(self)}' object is unsafe.`));
  if (self instanceof Text) return bind(STRING_METHODS, self);
  if (self instanceof Dict) return bind(DICT_METHODS, self);
  if (Array.isArray(self)) return bind(LIST_METHODS, self);
  if (self instanceof Tuple) return bind({ index: LIST_METHODS["index"]!, count: LIST_METHODS["count"]! }, [...self.items]);
  return undefined;
}
