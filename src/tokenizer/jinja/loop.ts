import { TemplateError } from "../errors.ts";
import { Callable, equal, Undefined } from "./values.ts";
import type { Value } from "./values.ts";

/** The `loop` variable of each round of one loop. */
export function loopObjects(items: readonly Value[]): (round: number) => Callable {
  let last: Value[] | null = null;
  const changed = new Callable("changed", (args) => {
    const same = last !== null && equal(last, args);
    last = args;
    return !same;
  });
  const neighbour = (at: number) => (at >= 0 && at < items.length ? items[at]! : new Undefined("there is no such item"));
  return (round) => {
    const fields = new Map<string, Value>([
      ["index", round + 1],
      ["index0", round],
      ["revindex", items.length - round],
      ["revindex0", items.length - round - 1],
      ["first", round === 0],
      ["last", round === items.length - 1],
      ["length", items.length],
      ["depth", 1],
      ["depth0", 0],
      ["previtem", neighbour(round - 1)],
      ["nextitem", neighbour(round + 1)],
      ["changed", changed],
      [
        "cycle",
        new Callable("cycle", (args) => {
          if (args.length === 0) throw new TemplateError("no items for cycling given");
          return args[round % args.length]!;
        }),
      ],
    ]);
    return new Callable("loop", recursive, fields);
  };
}

function recursive(): never {
  throw new TemplateError("The loop must have the 'recursive' marker to be called recursively.");
}
