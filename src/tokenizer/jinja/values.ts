import { TemplateError } from "../errors.ts";
import { Text } from "./text.ts";

/** Values of a template, with Python's distinctions: int is a number, float a Float, str a Text, list an array. */
export type Value = null | boolean | number | Float | Text | Value[] | Tuple | Dict | Namespace | Callable | Undefined;

export class Float {
  constructor(readonly value: number) {}
}

export class Tuple {
  constructor(readonly items: readonly Value[]) {}
}

export type Key = string | number | boolean | null;

/** A dict: insertion order, keys compared by value; each entry keeps its key as given, with its origin. */
export class Dict {
  readonly entries = new Map<Key, [Value, Value]>();

  get(key: Value): Value | undefined {
    const plain = keyOf(key);
    return plain === undefined ? undefined : this.entries.get(plain)?.[1];
  }

  set(key: Value, value: Value): void {
    const plain = keyOf(key);
    if (plain === undefined) throw new TemplateError(`unhashable type: '${typeName(key)}'`);
    this.entries.set(plain, [this.entries.has(plain) ? this.entries.get(plain)![0] : key, value]);
  }
}

export class Namespace {
  readonly attributes = new Map<string, Value>();
}

export type Kwargs = ReadonlyMap<string, Value>;
export class Callable {
  constructor(
    readonly name: string,
    readonly call: (args: Value[], kwargs: Kwargs) => Value,
    /** Fields of the object that is called (`loop` is one). */
    readonly attributes: ReadonlyMap<string, Value> = new Map(),
  ) {}
}

export class Undefined {
  constructor(readonly reason: string) {}
}

function keyOf(key: Value): Key | undefined {
  if (key instanceof Text) return key.s;
  if (key instanceof Float) return key.value;
  return key === null || typeof key === "boolean" || typeof key === "number" ? key : undefined;
}

/** The first that was given: none (null) is a value, undefined is not. */
export function firstGiven(...candidates: [...(Value | undefined)[], Value]): Value {
  return candidates.find((candidate) => candidate !== undefined) as Value;
}

export const numeric = (value: Value): value is number | Float | boolean => typeof value === "number" || typeof value === "boolean" || value instanceof Float;
export const numberOf = (value: number | Float | boolean): number => (value instanceof Float ? value.value : Number(value));

export function typeName(value: Value): string {
  if (value === null) return "NoneType";
  if (typeof value === "boolean") return "bool";
  if (typeof value === "number") return "int";
  if (value instanceof Float) return "float";
  if (value instanceof Text) return "str";
  if (Array.isArray(value)) return "list";
  if (value instanceof Tuple) return "tuple";
  if (value instanceof Dict) return "dict";
  if (value instanceof Namespace) return "Namespace";
  return value instanceof Callable ? "function" : "Undefined";
}

export function truthy(value: Value): boolean {
  if (value === null || value instanceof Undefined) return false;
  if (numeric(value)) return numberOf(value) !== 0;
  if (value instanceof Text) return value.length > 0;
  if (Array.isArray(value)) return value.length > 0;
  if (value instanceof Tuple) return value.items.length > 0;
  return value instanceof Dict ? value.entries.size > 0 : true;
}

export function equal(a: Value, b: Value): boolean {
  if (numeric(a) && numeric(b)) return numberOf(a) === numberOf(b);
  if (a instanceof Text && b instanceof Text) return a.s === b.s;
  if (Array.isArray(a) && Array.isArray(b)) return sameItems(a, b);
  if (a instanceof Tuple && b instanceof Tuple) return sameItems(a.items, b.items);
  if (a instanceof Dict && b instanceof Dict) {
    if (a.entries.size !== b.entries.size) return false;
    for (const [key, [, value]] of a.entries) {
      const other = b.entries.get(key);
      if (!other || !equal(value, other[1])) return false;
    }
    return true;
  }
  return a === b || (a instanceof Undefined && b instanceof Undefined);
}

function sameItems(a: readonly Value[], b: readonly Value[]): boolean {
  return a.length === b.length && a.every((item, i) => equal(item, b[i]!));
}

/** Order of two values; @throws TemplateError where Python has none. */
export function compare(a: Value, b: Value): number {
  if (numeric(a) && numeric(b)) return Math.sign(numberOf(a) - numberOf(b));
  if (a instanceof Text && b instanceof Text) return compareStrings(a.s, b.s);
  const listA = a instanceof Tuple ? a.items : a;
  const listB = b instanceof Tuple ? b.items : b;
  if (Array.isArray(listA) && Array.isArray(listB) && typeName(a) === typeName(b)) {
    for (let i = 0; i < Math.min(listA.length, listB.length); i++) {
      if (!equal(listA[i]!, listB[i]!)) return compare(listA[i]!, listB[i]!);
    }
    return Math.sign(listA.length - listB.length);
  }
  throw new TemplateError(`'<' not supported between instances of '${typeName(a)}' and '${typeName(b)}'`);
}

/** By code point, as Python orders strings. */
export function compareStrings(a: string, b: string): number {
  for (let i = 0; i < a.length && i < b.length; ) {
    const x = a.codePointAt(i)!;
    const y = b.codePointAt(i)!;
    if (x !== y) return x < y ? -1 : 1;
    i += x > 0xffff ? 2 : 1;
  }
  return Math.sign(a.length - b.length);
}

/** What a `for` walks over. */
export function itemsOf(value: Value): readonly Value[] {
  if (Array.isArray(value)) return value;
  if (value instanceof Tuple) return value.items;
  if (value instanceof Text) return value.characters();
  if (value instanceof Dict) return [...value.entries.values()].map(([key]) => key);
  if (value instanceof Undefined) return [];
  throw new TemplateError(`'${typeName(value)}' object is not iterable`);
}

export function lengthOf(value: Value): number {
  if (value instanceof Text) return value.characters().length;
  if (value instanceof Dict) return value.entries.size;
  if (Array.isArray(value) || value instanceof Tuple || value instanceof Undefined) return itemsOf(value).length;
  throw new TemplateError(`object of type '${typeName(value)}' has no len()`);
}

/** str(value), as {{ value }} prints it. */
export function str(value: Value): Text {
  if (value instanceof Text) return value;
  if (value instanceof Undefined) return Text.EMPTY;
  return repr(value);
}

export function repr(value: Value): Text {
  if (value instanceof Text) return value.rewritten(quoted(value.s));
  if (value === null) return Text.of("None");
  if (typeof value === "boolean") return Text.of(value ? "True" : "False");
  if (typeof value === "number") return Text.of(integerText(value));
  if (value instanceof Float) return Text.of(floatText(value.value));
  if (Array.isArray(value)) return listed("[", value.map(repr), "]");
  if (value instanceof Tuple) return listed("(", value.items.map(repr), value.items.length === 1 ? ",)" : ")");
  if (value instanceof Dict)
    return listed("{", [...value.entries.values()].map(([key, item]) => Text.join([repr(key), Text.of(": "), repr(item)])), "}");
  if (value instanceof Namespace) return listed("<Namespace {", [...value.attributes].map(([k, v]) => Text.join([Text.of(`${quoted(k)}: `), repr(v)])), "}>");
  return value instanceof Undefined ? Text.of("Undefined") : Text.of(`<function ${value.name}>`);
}

function listed(open: string, items: Text[], close: string): Text {
  return Text.join([Text.of(open), ...items.flatMap((item, i) => (i === 0 ? [item] : [Text.of(", "), item])), Text.of(close)]);
}

export function integerText(value: number): string {
  return Math.abs(value) < 1e21 ? String(value) : BigInt(value).toString();
}

/** repr(float): shortest digits, exponent form below 1e-4 and from 1e16. */
export function floatText(value: number): string {
  if (Number.isNaN(value)) return "nan";
  if (!Number.isFinite(value)) return value > 0 ? "inf" : "-inf";
  if (Object.is(value, -0)) return "-0.0";
  if (value === 0) return "0.0";
  const [digits, exponent] = value.toExponential().split("e") as [string, string];
  const power = Number(exponent);
  if (power < -4 || power >= 16) return `${digits}e${power < 0 ? "-" : "+"}${String(Math.abs(power)).padStart(2, "0")}`;
  const mantissa = digits.replace("-", "").replace(".", "");
  const sign = value < 0 ? "-" : "";
  if (power < 0) return `${sign}0.${"0".repeat(-power - 1)}${mantissa}`;
  const whole = mantissa.padEnd(power + 1, "0");
  return `${sign}${whole.slice(0, power + 1)}.${whole.slice(power + 1) || "0"}`;
}

/** repr(str): single quotes unless only those occur inside; unprintable characters escaped. */
function quoted(s: string): string {
  const quote = s.includes("'") && !s.includes('"') ? '"' : "'";
  let out = quote;
  for (const char of s) {
    const code = char.codePointAt(0)!;
    if (char === quote || char === "\\") out += "\\" + char;
    else if (char === "\n") out += "\\n";
    else if (char === "\r") out += "\\r";
    else if (char === "\t") out += "\\t";
    else if (char !== " " && /[\p{C}\p{Z}]/u.test(char)) {
      if (code <= 0xff) out += `\\x${code.toString(16).padStart(2, "0")}`;
      else out += code <= 0xffff ? `\\u${code.toString(16).padStart(4, "0")}` : `\\U${code.toString(16).padStart(8, "0")}`;
    } else out += char;
  }
  return out + quote;
}

/** A JSON-like value → template value. `outside` tells for each string (by its path of keys) whether it came from outside. */
export function fromJs(value: unknown, makeText: (s: string, key: string) => Text, key = ""): Value {
  switch (typeof value) {
    case "string":
      return makeText(value, key);
    case "number":
      return Number.isInteger(value) ? value : new Float(value);
    case "bigint":
      return Number(value);
    case "boolean":
      return value;
    case "undefined":
      return null;
    case "object": {
      if (value === null) return null;
      if (value instanceof Callable) return value;
      if (Array.isArray(value)) return value.map((item) => fromJs(item, makeText, key));
      const dict = new Dict();
      for (const [name, item] of Object.entries(value)) if (item !== undefined) dict.set(makeText(name, ""), fromJs(item, makeText, name));
      return dict;
    }
    default:
      throw new TemplateError(`a ${typeof value} cannot be given to a template`);
  }
}
