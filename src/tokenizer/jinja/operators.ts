import { TemplateError } from "../errors.ts";
import { Text } from "./text.ts";
import { contains } from "./tests.ts";
import { compare, equal, Float, itemsOf, numberOf, numeric, repr, str, Tuple, typeName, Undefined } from "./values.ts";
import type { Value } from "./values.ts";

/** Long results of `*` are refused: a template must not be able to fill the memory. */
const MAX_REPEATED = 1 << 24;

function unsupported(operator: string, a: Value, b: Value): never {
  for (const side of [a, b]) if (side instanceof Undefined) throw new TemplateError(side.reason);
  if (operator === "+" && a instanceof Text) throw new TemplateError(`can only concatenate str (not "${typeName(b)}") to str`);
  throw new TemplateError(`unsupported operand type(s) for ${operator}: '${typeName(a)}' and '${typeName(b)}'`);
}

/** Python's binary operators, apart from `and` and `or`. */
export function binary(operator: string, a: Value, b: Value): Value {
  switch (operator) {
    case "==":
      return equal(a, b);
    case "!=":
      return !equal(a, b);
    case "in":
      return contains(b, a);
    case "not in":
      return !contains(b, a);
    case "~":
      return str(a).plus(str(b));
  }
  if (a instanceof Undefined || b instanceof Undefined) return unsupported(operator, a, b);
  switch (operator) {
    case "<":
      return compare(a, b) < 0;
    case ">":
      return compare(a, b) > 0;
    case "<=":
      return compare(a, b) <= 0;
    case ">=":
      return compare(a, b) >= 0;
  }
  if (numeric(a) && numeric(b)) return arithmetic(operator, a, b);
  if (operator === "+") {
    if (a instanceof Text && b instanceof Text) return sum(a, b);
    if (Array.isArray(a) && Array.isArray(b)) return [...a, ...b];
    if (a instanceof Tuple && b instanceof Tuple) return new Tuple([...a.items, ...b.items]);
  }
  if (operator === "*") {
    if (typeof b === "number") return repeated(a, b) ?? unsupported(operator, a, b);
    if (typeof a === "number") return repeated(b, a) ?? unsupported(operator, a, b);
  }
  if (operator === "%" && a instanceof Text) return percent(a, b);
  return unsupported(operator, a, b);
}

/** `+` with a string marked safe escapes the other side, as markupsafe does. */
function sum(a: Text, b: Text): Text {
  if (!a.markup && !b.markup) return a.plus(b);
  return Text.join([a.escaped(), b.escaped()]).asMarkup();
}

function repeated(value: Value, times: number): Value | null {
  const count = Math.max(0, times);
  const items = value instanceof Text ? value.length : Array.isArray(value) ? value.length : 0;
  if (items * count > MAX_REPEATED) throw new TemplateError(`a repetition of ${items * count} items is too long, the limit is ${MAX_REPEATED}`);
  if (value instanceof Text) return Text.join(Array.from({ length: count }, () => value));
  return Array.isArray(value) ? Array.from({ length: count }, () => value).flat() : null;
}

function arithmetic(operator: string, left: number | Float | boolean, right: number | Float | boolean): Value {
  const a = numberOf(left);
  const b = numberOf(right);
  const result = (value: number): Value => {
    if (left instanceof Float || right instanceof Float) return new Float(value);
    return value;
  };
  if ((operator === "/" || operator === "//" || operator === "%") && b === 0) throw new TemplateError("division by zero");
  switch (operator) {
    case "+":
      return result(a + b);
    case "-":
      return result(a - b);
    case "*":
      return result(a * b);
    case "/":
      return new Float(a / b);
    case "//":
      return result(Math.floor(a / b));
    case "%":
      return result(a - b * Math.floor(a / b));
    case "**":
      return b < 0 ? new Float(a ** b) : result(a ** b);
    default:
      return unsupported(operator, left, right);
  }
}

/** "%s …" % value: the plain conversions. */
function percent(format: Text, value: Value): Text {
  const args = value instanceof Tuple ? [...value.items] : [value];
  const parts: Text[] = [];
  let from = 0;
  let next = 0;
  for (const match of format.s.matchAll(/%(?:\.(\d+))?([a-zA-Z%])/g)) {
    parts.push(format.slice(from, match.index));
    from = match.index + match[0].length;
    const kind = match[2]!;
    if (kind === "%") {
      parts.push(Text.of("%"));
      continue;
    }
    const arg = args[next++];
    if (arg === undefined) throw new TemplateError("not enough arguments for format string");
    if (kind === "s") parts.push(str(arg));
    else if (kind === "r") parts.push(repr(arg));
    else if (!numeric(arg)) throw new TemplateError(`%${kind} format: a number is required, not ${typeName(arg)}`);
    else if (kind === "d" || kind === "i") parts.push(Text.of(String(Math.trunc(numberOf(arg)))));
    else if (kind === "f") parts.push(Text.of(numberOf(arg).toFixed(Number(match[1] ?? 6))));
    else if (kind === "x") parts.push(Text.of(numberOf(arg).toString(16)));
    else throw new TemplateError(`unsupported format character '${kind}'`);
  }
  if (next < args.length) throw new TemplateError("not all arguments converted during string formatting");
  return Text.join([...parts, format.slice(from)]);
}

/** value[start:stop:step] of a string (by characters), list or tuple. */
export function slice(value: Value, bounds: [Value, Value, Value]): Value {
  const [start, stop, step] = bounds.map((bound) => {
    if (bound === null || typeof bound === "number") return bound;
    throw new TemplateError("slice indices must be integers or None");
  }) as [number | null, number | null, number | null];
  const items = itemsOf(value);
  const by = step ?? 1;
  if (by === 0) throw new TemplateError("slice step cannot be zero");
  const clamp = (bound: number | null, fallback: number) => {
    if (bound === null) return fallback;
    const at = bound < 0 ? bound + items.length : bound;
    return by > 0 ? Math.min(Math.max(at, 0), items.length) : Math.min(Math.max(at, -1), items.length - 1);
  };
  const from = clamp(start, by > 0 ? 0 : items.length - 1);
  const to = clamp(stop, by > 0 ? items.length : -1);
  const picked: Value[] = [];
  for (let i = from; by > 0 ? i < to : i > to; i += by) picked.push(items[i]!);
  if (value instanceof Text) return Text.join(picked as Text[]);
  return value instanceof Tuple ? new Tuple(picked) : picked;
}
