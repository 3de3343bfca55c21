import { Undefined } from "./values.ts";
import type { Value } from "./values.ts";

/** Variables of one block; names not found here are looked up in the enclosing block. */
export class Scope {
  readonly #variables = new Map<string, Value>();

  constructor(readonly parent: Scope | null = null) {}

  get(name: string): Value {
    const value = this.#variables.get(name);
    if (value !== undefined) return value;
    return this.parent ? this.parent.get(name) : new Undefined(`'${name}' is undefined`);
  }

  set(name: string, value: Value): void {
    this.#variables.set(name, value);
  }
}
