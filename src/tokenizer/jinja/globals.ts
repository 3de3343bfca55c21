import { TemplateError } from "../errors.ts";
import { TUPLE } from "./program.ts";
import { strftime } from "./strftime.ts";
import { Text } from "./text.ts";
import { Callable, Dict, itemsOf, Namespace, str, Tuple, typeName } from "./values.ts";
import type { Kwargs, Value } from "./values.ts";
import type { Scope } from "./scope.ts";

/** Python's sandbox refuses longer ranges. */
const MAX_RANGE = 100_000;

function range(args: Value[]): Value {
  const numbers = args.map((arg) => {
    if (typeof arg === "number") return arg;
    throw new TemplateError(`'${typeName(arg)}' object cannot be interpreted as an integer`);
  });
  const [start, stop, step = 1] = numbers.length === 1 ? [0, numbers[0]!] : [numbers[0] ?? 0, numbers[1] ?? 0, numbers[2]];
  if (step === 0) throw new TemplateError("range() arg 3 must not be zero");
  const length = Math.max(0, Math.ceil((stop - start) / step));
  if (length > MAX_RANGE) throw new TemplateError(`Range too big. The sandbox blocks ranges larger than MAX_RANGE (${MAX_RANGE}).`);
  return Array.from({ length }, (_, i) => start + i * step);
}

/** Entries of a dict or of an iterable of pairs, then keyword arguments. */
function pairs(args: Value[], kwargs: Kwargs): [Value, Value][] {
  const [source] = args;
  const given: [Value, Value][] = source instanceof Dict ? [...source.entries.values()] : source === undefined ? [] : itemsOf(source).map((item) => itemsOf(item) as [Value, Value]);
  return [...given, ...[...kwargs].map(([key, value]): [Value, Value] => [Text.of(key), value])];
}

export function declareGlobals(scope: Scope, now: () => Date): void {
  const declare = (name: string, call: (args: Value[], kwargs: Kwargs) => Value) => scope.set(name, new Callable(name, call));
  declare("raise_exception", ([message = null]) => {
    throw new TemplateError(str(message).s);
  });
  declare("strftime_now", ([format = Text.EMPTY]) => Text.of(strftime(now(), str(format).s)));
  declare("range", range);
  declare(TUPLE, (items) => new Tuple(items));
  declare("dict", (args, kwargs) => {
    const dict = new Dict();
    for (const [key, value] of pairs(args, kwargs)) dict.set(key, value);
    return dict;
  });
  declare("namespace", (args, kwargs) => {
    const namespace = new Namespace();
    for (const [key, value] of pairs(args, kwargs)) namespace.attributes.set(str(key).s, value);
    return namespace;
  });
  declare("joiner", ([separator = Text.of(", ")]) => {
    let used = false;
    return new Callable("joiner", () => {
      const out = used ? separator : Text.EMPTY;
      used = true;
      return out;
    });
  });
  declare("cycler", (items) => {
    if (items.length === 0) throw new TemplateError("at least one item has to be provided");
    let at = 0;
    const next = new Callable("next", () => items[at++ % items.length]!);
    const reset = new Callable("reset", () => ((at = 0), null));
    return new Callable("cycler", next.call, new Map([["next", next], ["reset", reset]]));
  });
  for (const [name, value] of [["true", true], ["True", true], ["false", false], ["False", false], ["none", null], ["None", null]] as const) scope.set(name, value);
}
