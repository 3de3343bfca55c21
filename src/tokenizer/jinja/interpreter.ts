import { TemplateError } from "../errors.ts";
import { runFilter } from "./filters.ts";
import { loopObjects } from "./loop.ts";
import { methodOf } from "./methods.ts";
import { binary, slice } from "./operators.ts";
import { NOT_TEST_FILTER, TEST_FILTER } from "./program.ts";
import type { Node } from "./program.ts";
import { Scope } from "./scope.ts";
import { runTest } from "./tests.ts";
import { Text } from "./text.ts";
import { Callable, Dict, Float, itemsOf, Namespace, numberOf, numeric, str, truthy, Tuple, typeName, Undefined } from "./values.ts";
import type { Kwargs, Value } from "./values.ts";

class LoopControl extends Error {
  constructor(readonly kind: "break" | "continue") {
    super(`${kind} outside of a loop`);
  }
}

type Sink = Text[];
const NO_KWARGS: Kwargs = new Map();
const node = (value: unknown) => value as Node;
const nodes = (value: unknown) => value as Node[];

/**
 * Runs a parsed template with Python's semantics (Jinja2 in the sandbox that chat templates get). The library's own
 * interpreter is not used: it prints None and lists the JavaScript way, ignores arguments of strip(), lets a loop body's
 * variables leak into the next round, gives macros the caller's variables, and drops what a round printed before `break`.
 */
export class Interpreter {
  /** @returns what the program prints. @throws TemplateError */
  run(program: Node, scope: Scope): Text {
    const sink: Sink = [];
    this.#block(nodes(program["body"]), scope, sink);
    return Text.join(sink);
  }

  #block(body: Node[], scope: Scope, sink: Sink): void {
    for (const statement of body) this.#statement(statement, scope, sink);
  }

  #capture(body: Node[], scope: Scope): Text {
    const sink: Sink = [];
    this.#block(body, scope, sink);
    return Text.join(sink);
  }

  #statement(statement: Node, scope: Scope, sink: Sink): void {
    switch (statement.type) {
      case "Comment":
        return;
      case "If":
        return this.#block(nodes(truthy(this.#value(node(statement["test"]), scope)) ? statement["body"] : statement["alternate"]), scope, sink);
      case "For":
        return this.#for(statement, scope, sink);
      case "Set":
        return this.#set(statement, scope);
      case "Macro":
        return this.#macro(statement, scope);
      case "CallStatement": {
        const call = node(statement["call"]);
        const callee = this.#value(node(call["callee"]), scope);
        const [args, kwargs] = this.#arguments(nodes(call["args"]), scope);
        const caller = this.#function("caller", nodes(statement["callerArgs"] ?? []), nodes(statement["body"]), scope);
        sink.push(str(this.#call(callee, args, new Map([...kwargs, ["caller", caller]]))));
        return;
      }
      case "FilterStatement":
        sink.push(str(this.#filter(this.#capture(nodes(statement["body"]), scope), node(statement["filter"]), scope)));
        return;
      case "Break":
        throw new LoopControl("break");
      case "Continue":
        throw new LoopControl("continue");
      default:
        sink.push(str(this.#value(statement, scope)));
    }
  }

  #for(statement: Node, outer: Scope, sink: Sink): void {
    const iterable = node(statement["iterable"]);
    const filtered = iterable.type === "SelectExpression";
    let items = itemsOf(this.#value(filtered ? node(iterable["lhs"]) : iterable, outer));
    const target = node(statement["loopvar"]);
    if (filtered)
      items = items.filter((item) => {
        const scope = new Scope(outer);
        this.#assign(target, item, scope);
        return truthy(this.#value(node(iterable["test"]), scope));
      });
    if (items.length === 0) return this.#block(nodes(statement["defaultBlock"]), outer, sink);
    const loop = loopObjects(items);
    for (let i = 0; i < items.length; i++) {
      // A fresh scope per round: what a round sets is gone in the next.
      const scope = new Scope(outer);
      this.#assign(target, items[i]!, scope);
      scope.set("loop", loop(i));
      try {
        this.#block(nodes(statement["body"]), scope, sink);
      } catch (error) {
        if (!(error instanceof LoopControl)) throw error;
        if (error.kind === "break") break;
      }
    }
  }

  #assign(target: Node, value: Value, scope: Scope): void {
    if (target.type === "Identifier") return scope.set(target["value"] as string, value);
    if (target.type === "TupleLiteral") {
      const targets = nodes(target["value"]);
      const items = itemsOf(value);
      if (items.length < targets.length) raise(`not enough values to unpack (expected ${targets.length}, got ${items.length})`);
      if (items.length > targets.length) raise(`too many values to unpack (expected ${targets.length})`);
      return targets.forEach((inner, i) => this.#assign(inner, items[i]!, scope));
    }
    if (target.type === "MemberExpression") {
      const object = this.#value(node(target["object"]), scope);
      const property = node(target["property"]);
      if (!(object instanceof Namespace) || property.type !== "Identifier") return raise("cannot assign attribute on non-namespace object");
      object.attributes.set(property["value"] as string, value);
      return;
    }
    raise(`cannot assign to ${target.type}`);
  }

  #set(statement: Node, scope: Scope): void {
    let value: Value;
    if (statement["value"]) value = this.#value(node(statement["value"]), scope);
    else value = this.#capture(nodes(statement["body"]), new Scope(scope));
    this.#assign(node(statement["assignee"]), value, scope);
  }

  #macro(statement: Node, scope: Scope): void {
    const name = node(statement["name"])["value"] as string;
    scope.set(name, this.#function(name, nodes(statement["args"]), nodes(statement["body"]), scope));
  }

  /** A macro or a caller block: sees the variables of where it stands, not of where it is called. */
  #function(name: string, parameters: Node[], body: Node[], definition: Scope): Callable {
    return new Callable(name, (args, kwargs) => {
      const scope = new Scope(definition);
      const rest = new Map(kwargs);
      parameters.forEach((parameter, i) => {
        const plain = parameter.type === "Identifier";
        const key = (plain ? parameter["value"] : node(parameter["key"])["value"]) as string;
        let value = i < args.length ? args[i] : rest.get(key);
        rest.delete(key);
        if (value === undefined) value = plain ? new Undefined(`parameter '${key}' was not provided`) : this.#value(node(parameter["value"]), scope);
        scope.set(key, value);
      });
      if (rest.has("caller")) scope.set("caller", rest.get("caller")!);
      rest.delete("caller");
      const extra = new Dict();
      for (const [key, value] of rest) extra.set(Text.of(key), value);
      scope.set("varargs", new Tuple(args.slice(parameters.length)));
      scope.set("kwargs", extra);
      const takesMore = (what: string) => JSON.stringify(body, (_k, v) => (v instanceof Map ? [...v] : v)).includes(`"value":"${what}"`);
      if (args.length > parameters.length && !takesMore("varargs")) raise(`macro '${name}' takes not more than ${parameters.length} argument(s)`);
      const [unknown] = rest.keys();
      if (unknown !== undefined && !takesMore("kwargs")) raise(`macro '${name}' takes no keyword argument '${unknown}'`);
      return this.#capture(body, scope);
    });
  }

  #value(expression: Node, scope: Scope): Value {
    switch (expression.type) {
      case "StringLiteral":
        return Text.of(expression["value"] as string);
      case "IntegerLiteral":
        return expression["value"] as number;
      case "FloatLiteral":
        return new Float(expression["value"] as number);
      case "Identifier":
        return scope.get(expression["value"] as string);
      case "ArrayLiteral":
        return nodes(expression["value"]).map((item) => this.#value(item, scope));
      case "TupleLiteral":
        return new Tuple(nodes(expression["value"]).map((item) => this.#value(item, scope)));
      case "ObjectLiteral": {
        const dict = new Dict();
        for (const [key, value] of expression["value"] as Map<Node, Node>) dict.set(this.#value(key, scope), this.#value(value, scope));
        return dict;
      }
      case "BinaryExpression":
        return this.#binary(expression, scope);
      case "UnaryExpression":
        return this.#unary(expression, scope);
      case "FilterExpression":
        return this.#filter(this.#value(node(expression["operand"]), scope), node(expression["filter"]), scope);
      case "TestExpression":
        return runTest(node(expression["test"])["value"] as string, this.#value(node(expression["operand"]), scope), []) !== expression["negate"];
      case "Ternary":
        return this.#value(node(truthy(this.#value(node(expression["condition"]), scope)) ? expression["trueExpr"] : expression["falseExpr"]), scope);
      case "SelectExpression":
        if (truthy(this.#value(node(expression["test"]), scope))) return this.#value(node(expression["lhs"]), scope);
        return new Undefined("the inline if-expression evaluated to false and no else section was defined.");
      case "MemberExpression":
        return this.#member(expression, scope);
      case "CallExpression": {
        const callee = this.#value(node(expression["callee"]), scope);
        return this.#call(callee, ...this.#arguments(nodes(expression["args"]), scope));
      }
      default:
        return raise(`${expression.type} is not an expression`);
    }
  }

  #binary(expression: Node, scope: Scope): Value {
    const operator = node(expression["operator"])["value"] as string;
    const left = this.#value(node(expression["left"]), scope);
    if (operator === "and") return truthy(left) ? this.#value(node(expression["right"]), scope) : left;
    if (operator === "or") return truthy(left) ? left : this.#value(node(expression["right"]), scope);
    return binary(operator, left, this.#value(node(expression["right"]), scope));
  }

  #unary(expression: Node, scope: Scope): Value {
    const value = this.#value(node(expression["argument"]), scope);
    const operator = node(expression["operator"])["value"];
    if (operator === "not") return !truthy(value);
    if (!numeric(value)) return raise(`bad operand type for unary ${String(operator)}: '${typeName(value)}'`);
    const sign = operator === "-" ? -1 : 1;
    return value instanceof Float ? new Float(sign * value.value) : sign * numberOf(value);
  }

  #filter(value: Value, filter: Node, scope: Scope): Value {
    if (filter.type === "Identifier") return runFilter(filter["value"] as string, value, [], NO_KWARGS);
    const name = node(filter["callee"])["value"] as string;
    const [args, kwargs] = this.#arguments(nodes(filter["args"]), scope);
    if (name === TEST_FILTER || name === NOT_TEST_FILTER) return runTest(str(args[0]!).s, value, args.slice(1)) === (name === TEST_FILTER);
    return runFilter(name, value, args, kwargs);
  }

  #arguments(args: Node[], scope: Scope): [Value[], Map<string, Value>] {
    const positional: Value[] = [];
    const named = new Map<string, Value>();
    for (const argument of args) {
      if (argument.type === "KeywordArgumentExpression") named.set(node(argument["key"])["value"] as string, this.#value(node(argument["value"]), scope));
      else if (argument.type === "SpreadExpression") positional.push(...itemsOf(this.#value(node(argument["argument"]), scope)));
      else if (argument.type === "KeywordSpreadExpression") {
        const dict = this.#value(node(argument["argument"]), scope);
        if (!(dict instanceof Dict)) return raise(`argument after ** must be a mapping, not ${typeName(dict)}`);
        for (const [key, value] of dict.entries.values()) named.set(str(key).s, value);
      } else positional.push(this.#value(argument, scope));
    }
    return [positional, named];
  }

  #call(callee: Value, args: Value[], kwargs: Kwargs): Value {
    if (callee instanceof Undefined) return raise(callee.reason);
    return callee instanceof Callable ? callee.call(args, kwargs) : raise(`'${typeName(callee)}' object is not callable`);
  }

  /** a.b looks for a method or attribute first and for an entry second, a["b"] for the entry first. */
  #member(expression: Node, scope: Scope): Value {
    const object = this.#value(node(expression["object"]), scope);
    const property = node(expression["property"]);
    if (object instanceof Undefined) return raise(object.reason);
    if (property.type === "SliceExpression") {
      const bound = (key: string) => (property[key] ? this.#value(node(property[key]), scope) : null);
      return slice(object, [bound("start"), bound("stop"), bound("step")]);
    }
    const computed = expression["computed"] === true;
    const key = computed || property.type === "IntegerLiteral" ? this.#value(property, scope) : Text.of(property["value"] as string);
    const name = key instanceof Text ? key.s : null;
    const field = name === null ? undefined : fieldOf(object, name);
    const attribute = field !== undefined || name === null ? field : methodOf(object, name);
    const item = itemAt(object, key);
    const [first, second] = computed ? [item, attribute] : [attribute, item];
    const found = first !== undefined ? first : second;
    if (found !== undefined) return found;
    if (object instanceof Dict || name !== null) return new Undefined(`'${typeName(object)} object' has no attribute '${str(key).s}'`);
    return new Undefined(`${typeName(object)} object has no element ${str(key).s}`);
  }
}

function fieldOf(object: Value, name: string): Value | undefined {
  if (object instanceof Namespace) return object.attributes.get(name);
  return object instanceof Callable ? object.attributes.get(name) : undefined;
}

function itemAt(object: Value, key: Value): Value | undefined {
  if (object instanceof Dict) return object.get(key);
  if (typeof key !== "number" || !(Array.isArray(object) || object instanceof Tuple || object instanceof Text)) return undefined;
  return itemsOf(object).at(key);
}

function raise(message: string): never {
  throw new TemplateError(message);
}
