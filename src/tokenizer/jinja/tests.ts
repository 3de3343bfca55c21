import { TemplateError } from "../errors.ts";
import { Text } from "./text.ts";
import { Callable, compare, Dict, equal, firstGiven, Float, itemsOf, Namespace, numberOf, numeric, Tuple, typeName, Undefined } from "./values.ts";
import type { Value } from "./values.ts";

type Test = (value: Value, args: Value[]) => boolean;

function integer(value: Value): number {
  if (numeric(value)) return numberOf(value);
  throw new TemplateError(`expected a number, not '${typeName(value)}'`);
}

/** Python's `item in container`. */
export function contains(container: Value, item: Value): boolean {
  if (container instanceof Text) {
    if (item instanceof Text) return container.s.includes(item.s);
    throw new TemplateError(`'in <string>' requires string as left operand, not ${typeName(item)}`);
  }
  if (container instanceof Dict) return container.get(item) !== undefined;
  return itemsOf(container).some((other) => equal(other, item));
}

const eq: Test = (value, [other = null]) => equal(value, other);
const ne: Test = (value, [other = null]) => !equal(value, other);
const lt: Test = (value, [other = null]) => compare(value, other) < 0;
const le: Test = (value, [other = null]) => compare(value, other) <= 0;
const gt: Test = (value, [other = null]) => compare(value, other) > 0;
const ge: Test = (value, [other = null]) => compare(value, other) >= 0;

const TESTS: Record<string, Test> = {
  defined: (v) => !(v instanceof Undefined),
  undefined: (v) => v instanceof Undefined,
  none: (v) => v === null,
  boolean: (v) => typeof v === "boolean",
  true: (v) => v === true,
  false: (v) => v === false,
  integer: (v) => typeof v === "number",
  float: (v) => v instanceof Float,
  number: numeric,
  string: (v) => v instanceof Text,
  mapping: (v) => v instanceof Dict,
  iterable: (v) => Array.isArray(v) || v instanceof Tuple || v instanceof Dict || v instanceof Text || v instanceof Undefined,
  sequence: (v) => Array.isArray(v) || v instanceof Tuple || v instanceof Dict || v instanceof Text || v instanceof Undefined,
  callable: (v) => v instanceof Callable,
  odd: (v) => Math.abs(integer(v)) % 2 === 1,
  even: (v) => integer(v) % 2 === 0,
  divisibleby: (v, [by = 1]) => integer(v) % integer(by) === 0,
  lower: (v) => v instanceof Text && v.s !== v.s.toUpperCase() && v.s === v.s.toLowerCase(),
  upper: (v) => v instanceof Text && v.s !== v.s.toLowerCase() && v.s === v.s.toUpperCase(),
  sameas: (v, [other = null]) => v === other,
  in: (v, [container = null]) => contains(container, v),
  eq, equalto: eq, "==": eq, ne, "!=": ne,
  lt, lessthan: lt, "<": lt, le, "<=": le,
  gt, greaterthan: gt, ">": gt, ge, ">=": ge,
  escaped: () => false,
};

export function runTest(name: string, value: Value, args: Value[]): boolean {
  const test = Object.hasOwn(TESTS, name) ? TESTS[name] : undefined;
  if (!test) throw new TemplateError(`No test named '${name}'.`);
  return test(value, args);
}

/** An attribute path such as "function.name" or "0", as map(attribute=…), sort and groupby take. */
export function attributeOf(value: Value, path: Value): Value {
  if (typeof path === "number") return firstGiven(itemsOf(value)[path], new Undefined(`no element ${path}`));
  const names = path instanceof Text ? path.s.split(".") : [];
  let at = value;
  for (const name of names) {
    if (/^\d+$/.test(name) && (Array.isArray(at) || at instanceof Tuple)) at = firstGiven(itemsOf(at)[Number(name)], new Undefined(`no element ${name}`));
    else if (at instanceof Dict) at = firstGiven(at.get(Text.of(name)), new Undefined(`'dict object' has no attribute '${name}'`));
    else if (at instanceof Namespace) at = firstGiven(at.attributes.get(name), new Undefined(`'Namespace' has no attribute '${name}'`));
    else at = new Undefined(`'${typeName(at)} object' has no attribute '${name}'`);
  }
  return at;
}
