import { TemplateError } from "../errors.ts";
import { Text, joinTexts } from "./text.ts";
import { compareStrings, Dict, Float, floatText, integerText, itemsOf, str, Tuple, typeName } from "./values.ts";
import type { Kwargs, Value } from "./values.ts";

interface Style {
  ensureAscii: boolean;
  /** null = one line. */
  indent: string | null;
  item: string;
  key: string;
  sortKeys: boolean;
}

/** The `tojson` that chat templates get: json.dumps(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False). */
export function toJson(value: Value, args: Value[], kwargs: Kwargs): Text {
  const names = ["ensure_ascii", "indent", "separators", "sort_keys"];
  for (const name of kwargs.keys()) if (!names.includes(name)) throw new TemplateError(`tojson() got an unexpected keyword argument '${name}'`);
  const [ensureAscii = false, indent = null, separators = null, sortKeys = false] = names.map((name, i) => (kwargs.has(name) ? kwargs.get(name) : args[i]));
  let indentText: string | null = null;
  if (typeof indent === "number") indentText = " ".repeat(Math.max(0, indent));
  else if (indent instanceof Text) indentText = indent.s;
  else if (indent !== null) throw new TemplateError(`tojson() indent is ${typeName(indent)}, expected an integer, a string or none`);
  let [item, key] = indentText === null ? [", ", ": "] : [",", ": "];
  if (separators !== null) {
    const pair = itemsOf(separators);
    if (pair.length !== 2) throw new TemplateError("tojson() separators are not two strings");
    [item, key] = [str(pair[0]!).s, str(pair[1]!).s];
  }
  return write(value, { ensureAscii: ensureAscii === true, indent: indentText, item: item!, key: key!, sortKeys: sortKeys === true }, 0);
}

function write(value: Value, style: Style, depth: number): Text {
  if (value === null || typeof value === "boolean") return Text.of(String(value));
  if (typeof value === "number") return Text.of(integerText(value));
  if (value instanceof Float) {
    const special: Record<string, string> = { nan: "NaN", inf: "Infinity", "-inf": "-Infinity" };
    const shown = floatText(value.value);
    return Text.of(special[shown] ?? shown);
  }
  if (value instanceof Text) return literal(value, style);
  if (Array.isArray(value) || value instanceof Tuple) return group("[", itemsOf(value).map((item) => write(item, style, depth + 1)), "]", style, depth);
  if (value instanceof Dict) {
    const rows = [...value.entries.values()].map(([key, item]) => ({ key: keyText(key), item }));
    if (style.sortKeys) rows.sort((a, b) => compareStrings(a.key.s, b.key.s));
    const items = rows.map(({ key, item }) => Text.join([literal(key, style), Text.of(style.key), write(item, style, depth + 1)]));
    return group("{", items, "}", style, depth);
  }
  throw new TemplateError(`Object of type ${typeName(value)} is not JSON serializable`);
}

function keyText(key: Value): Text {
  if (key === null || typeof key === "boolean") return Text.of(String(key));
  return str(key);
}

function group(open: string, items: Text[], close: string, style: Style, depth: number): Text {
  if (items.length === 0) return Text.of(open + close);
  if (style.indent === null) return Text.join([Text.of(open), joinTexts(items, Text.of(style.item)), Text.of(close)]);
  const line = "\n" + style.indent.repeat(depth + 1);
  return Text.join([Text.of(open + line), joinTexts(items, Text.of(style.item + line)), Text.of("\n" + style.indent.repeat(depth) + close)]);
}

function literal(value: Text, style: Style): Text {
  const inner = JSON.stringify(value.s).slice(1, -1);
  const escaped = style.ensureAscii ? inner.replace(/[\u007f-\uffff]/g, (c) => "\\u" + c.charCodeAt(0).toString(16).padStart(4, "0")) : inner;
  const body = escaped === value.s ? value : value.rewritten(escaped);
  return Text.join([Text.of('"'), body, Text.of('"')]);
}
