import { TemplateError } from "../errors.ts";
import { toJson } from "./json.ts";
import { STRING_METHODS } from "./methods.ts";
import { attributeOf, runTest } from "./tests.ts";
import { joinTexts, Text } from "./text.ts";
import { compare, Dict, equal, firstGiven, Float, itemsOf, lengthOf, numberOf, numeric, repr, str, truthy, Tuple, typeName, Undefined } from "./values.ts";
import type { Kwargs, Value } from "./values.ts";

type Filter = (value: Value, args: Value[], kwargs: Kwargs) => Value;
const NO_KWARGS: Kwargs = new Map();

const arg = (args: Value[], kwargs: Kwargs, i: number, name: string, fallback: Value): Value => firstGiven(args[i], kwargs.get(name), fallback);

function need(value: Value): number {
  if (numeric(value)) return numberOf(value);
  throw new TemplateError(`expected a number, not '${typeName(value)}'`);
}

const asText = (name: string): Filter => (value, args, kwargs) => STRING_METHODS[name]!(str(value), args, kwargs);
const folded = (value: Value, caseSensitive: boolean): Value => (value instanceof Text && !caseSensitive ? Text.of(value.s.toLowerCase()) : value);

function sorted(items: readonly Value[], by: (item: Value) => Value, reverse: boolean, caseSensitive: boolean): Value[] {
  const rows = items.map((item) => ({ item, key: folded(by(item), caseSensitive) }));
  rows.sort((a, b) => (reverse ? compare(b.key, a.key) : compare(a.key, b.key)));
  return rows.map(({ item }) => item);
}

function byAttribute(attribute: Value): (item: Value) => Value {
  return attribute === null ? (item) => item : (item) => attributeOf(item, attribute);
}

/** select, reject, selectattr, rejectattr. */
const picking = (wanted: boolean, attribute: boolean): Filter => (value, args) => {
  const [path, rest] = attribute ? [args[0] ?? null, args.slice(1)] : [null, args];
  const [test, ...testArgs] = rest;
  // Nothing to pick from: none is accepted here, unlike in a loop.
  if (!truthy(value)) return [];
  return itemsOf(value).filter((item) => {
    const subject = attribute ? attributeOf(item, path) : item;
    return (test === undefined ? truthy(subject) : runTest(str(test).s, subject, testArgs)) === wanted;
  });
};

const extreme = (sign: number): Filter => (value, args, kwargs) => {
  const items = sorted(itemsOf(value), byAttribute(arg(args, kwargs, 1, "attribute", null)), sign < 0, truthy(arg(args, kwargs, 0, "case_sensitive", false)));
  return items.length > 0 ? items[0]! : new Undefined("No aggregated item, sequence was empty.");
};

function map(value: Value, args: Value[], kwargs: Kwargs): Value {
  if (!truthy(value)) return [];
  if (kwargs.has("attribute")) {
    const fallback = kwargs.get("default");
    return itemsOf(value).map((item) => {
      const found = attributeOf(item, kwargs.get("attribute")!);
      return found instanceof Undefined && fallback !== undefined ? fallback : found;
    });
  }
  const [name, ...rest] = args;
  if (!(name instanceof Text)) throw new TemplateError("map requires a filter argument");
  return itemsOf(value).map((item) => runFilter(name.s, item, rest, kwargs));
}

function indent(value: Value, args: Value[], kwargs: Kwargs): Value {
  const width = arg(args, kwargs, 0, "width", 4);
  const prefix = Text.of(width instanceof Text ? width.s : " ".repeat(need(width)));
  const first = truthy(arg(args, kwargs, 1, "first", false));
  const blank = truthy(arg(args, kwargs, 2, "blank", false));
  // A line break at the end opens one more, empty line.
  const lines = [...(STRING_METHODS["splitlines"]!(str(value).plus(Text.of("\n")), [], NO_KWARGS) as Text[])];
  const out = lines.map((line, i) => (i === 0 || (line.length === 0 && !blank) ? line : prefix.plus(line)));
  const joined = joinTexts(out, Text.of("\n"));
  return first ? prefix.plus(joined) : joined;
}

function join(value: Value, args: Value[], kwargs: Kwargs): Value {
  const items = itemsOf(value).map(byAttribute(arg(args, kwargs, 1, "attribute", null)));
  return joinTexts(items.map(str), str(arg(args, kwargs, 0, "d", Text.EMPTY)));
}

function dictsort(value: Value, args: Value[], kwargs: Kwargs): Value {
  if (!(value instanceof Dict)) throw new TemplateError(`dictsort needs a dict, not '${typeName(value)}'`);
  const position = str(arg(args, kwargs, 1, "by", Text.of("key"))).s === "value" ? 1 : 0;
  const items = [...value.entries.values()].map((pair) => new Tuple(pair));
  return sorted(items, (item) => (item as Tuple).items[position]!, truthy(arg(args, kwargs, 2, "reverse", false)), truthy(arg(args, kwargs, 0, "case_sensitive", false)));
}

function groupby(value: Value, args: Value[], kwargs: Kwargs): Value {
  const by = byAttribute(arg(args, kwargs, 0, "attribute", null));
  const groups: { key: Value; items: Value[] }[] = [];
  for (const item of sorted(itemsOf(value), by, false, false)) {
    const key = by(item);
    const last = groups.at(-1);
    if (last && equal(folded(last.key, false), folded(key, false))) last.items.push(item);
    else groups.push({ key, items: [item] });
  }
  return groups.map(({ key, items }) => new Tuple([key, items]));
}

function unique(value: Value, args: Value[], kwargs: Kwargs): Value {
  const by = byAttribute(arg(args, kwargs, 1, "attribute", null));
  const caseSensitive = truthy(arg(args, kwargs, 0, "case_sensitive", false));
  const seen: Value[] = [];
  return itemsOf(value).filter((item) => {
    const key = folded(by(item), caseSensitive);
    return !seen.some((other) => equal(other, key)) && seen.push(key) > 0;
  });
}

function toInt(value: Value, args: Value[], kwargs: Kwargs): Value {
  if (numeric(value)) return Math.trunc(numberOf(value));
  const s = value instanceof Text ? value.s.trim() : "";
  if (/^[+-]?\d+(_\d+)*$/.test(s)) return Number(s.replaceAll("_", ""));
  return /^[+-]?\d*\.?\d+(e[+-]?\d+)?$/i.test(s) ? Math.trunc(Number(s)) : arg(args, kwargs, 0, "default", 0);
}

function toFloat(value: Value, args: Value[], kwargs: Kwargs): Value {
  if (numeric(value)) return new Float(numberOf(value));
  const s = value instanceof Text ? value.s.trim() : "";
  return s !== "" && Number.isFinite(Number(s)) ? new Float(Number(s)) : arg(args, kwargs, 0, "default", new Float(0));
}

function round(value: Value, args: Value[], kwargs: Kwargs): Value {
  const scale = 10 ** need(arg(args, kwargs, 0, "precision", 0));
  const method = str(arg(args, kwargs, 1, "method", Text.of("common"))).s;
  const scaled = need(value) * scale;
  if (method === "ceil") return new Float(Math.ceil(scaled) / scale);
  if (method === "floor") return new Float(Math.floor(scaled) / scale);
  const low = Math.floor(scaled);
  const even = low % 2 === 0 ? low : low + 1;
  return new Float((scaled - low === 0.5 ? even : Math.round(scaled)) / scale);
}

function batch(value: Value, args: Value[], kwargs: Kwargs): Value {
  const size = need(arg(args, kwargs, 0, "linecount", 1));
  const fill = args[1] ?? kwargs.get("fill_with");
  const items = itemsOf(value);
  const rows: Value[][] = [];
  for (let i = 0; size >= 1 && i < items.length; i += size) rows.push(items.slice(i, i + size));
  const last = rows.at(-1);
  if (last && fill !== undefined && fill !== null) while (last.length < size) last.push(fill);
  return rows;
}

const defaulted: Filter = (value, args, kwargs) =>
  value instanceof Undefined || (truthy(arg(args, kwargs, 1, "boolean", false)) && !truthy(value)) ? arg(args, kwargs, 0, "default_value", Text.EMPTY) : value;

const FILTERS: Record<string, Filter> = {
  tojson: toJson,
  default: defaulted, d: defaulted,
  length: lengthOf, count: lengthOf,
  string: str,
  list: (v) => [...itemsOf(v)],
  first: (v) => firstGiven(itemsOf(v)[0], new Undefined("No first item, sequence was empty.")),
  last: (v) => firstGiven(itemsOf(v).at(-1), new Undefined("No last item, sequence was empty.")),
  reverse: (v) => (v instanceof Text ? Text.join(v.characters().reverse()) : [...itemsOf(v)].reverse()),
  items: (v) => (v instanceof Undefined ? [] : v instanceof Dict ? [...v.entries.values()].map((pair) => new Tuple(pair)) : raiseMapping()),
  join, map, indent, dictsort, groupby, unique, round, batch,
  sort: (v, a, k) => sorted(itemsOf(v), byAttribute(arg(a, k, 2, "attribute", null)), truthy(arg(a, k, 0, "reverse", false)), truthy(arg(a, k, 1, "case_sensitive", false))),
  select: picking(true, false), reject: picking(false, false), selectattr: picking(true, true), rejectattr: picking(false, true),
  min: extreme(1), max: extreme(-1),
  sum: (v, a, k) => {
    const items = itemsOf(v).map(byAttribute(arg(a, k, 0, "attribute", null)));
    const start = arg(a, k, 1, "start", 0);
    const total = items.reduce<number>((sum, item) => sum + need(item), need(start));
    return [start, ...items].some((item) => item instanceof Float) ? new Float(total) : total;
  },
  abs: (v) => (v instanceof Float ? new Float(Math.abs(v.value)) : Math.abs(need(v))),
  int: toInt, float: toFloat,
  upper: asText("upper"), lower: asText("lower"), capitalize: asText("capitalize"), replace: asText("replace"),
  title: (v) => str(v).rewritten(str(v).s.replace(/[^-\s({[<]+/g, (word) => word.slice(0, 1).toUpperCase() + word.slice(1).toLowerCase())),
  trim: (v, a, k) => STRING_METHODS["strip"]!(str(v), a, k),
  center: (v, a, k) => STRING_METHODS["center"]!(str(v), [arg(a, k, 0, "width", 80)], NO_KWARGS),
  wordcount: (v) => (str(v).s.match(/[\p{L}\p{N}_]+/gu) ?? []).length,
  escape: (v) => str(v).escaped(), e: (v) => str(v).escaped(),
  safe: (v) => str(v).asMarkup(),
  pprint: repr,
  urlencode: (v) => str(v).rewritten(encodeURIComponent(str(v).s).replace(/[!'()*]/g, (c) => "%" + c.charCodeAt(0).toString(16).toUpperCase()).replaceAll("%2F", "/")),
};

function raiseMapping(): never {
  throw new TemplateError("Can only get item pairs from a mapping.");
}

export function runFilter(name: string, value: Value, args: Value[], kwargs: Kwargs): Value {
  const filter = Object.hasOwn(FILTERS, name) ? FILTERS[name] : undefined;
  if (!filter) throw new TemplateError(`No filter named '${name}'.`);
  return filter(value, args, kwargs);
}

