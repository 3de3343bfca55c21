import { expect, setDefaultTimeout, test } from "bun:test";
import { HttpError } from "../../../src/serve/http-errors.ts";
import { exactInteger, parseJsonObject } from "../../../src/serve/json.ts";

setDefaultTimeout(60_000);

const parse = (text: string) => parseJsonObject(new TextEncoder().encode(text));
function refusal(input: string | Uint8Array): string {
  try {
    parseJsonObject(typeof input === "string" ? new TextEncoder().encode(input) : input);
  } catch (error) {
    expect(error).toBeInstanceOf(HttpError);
    expect((error as HttpError).status).toBe(400);
    return (error as HttpError).message;
  }
  throw new Error(`accepted: ${String(input).slice(0, 60)}`);
}

test("objects are parsed, with strings of every kind", () => {
  const value = { a: "q\"uo\\te", "b\\": ["{[", "]}", ""], "": { "\u2028": null }, n: [1, [2, [{}]]] };
  expect(parse(JSON.stringify(value)).fields).toEqual(value);
  expect(parse(` {"a" : "\\\\" , "b": {"a":1}, "c":[{"a":1},{"a":2}] } `).fields).toEqual({ a: "\\", b: { a: 1 }, c: [{ a: 1 }, { a: 2 }] });
});

test("what is no object is refused", () => {
  expect(refusal("")).toContain("no body");
  for (const [text, word] of [["[]", "an array"], ["null", "null"], ["1", "number"], ['"x"', "string"], ["true", "boolean"]] as const) expect(refusal(text)).toContain(word);
  for (const text of ['{"messages":', "{", "not json", '{"messages": [}', '{"a":1}x', '{"a":"', '{"a', "{a:1}", '{"a":01}', '{"a":"\n"}']) expect(refusal(text)).toContain("not valid JSON");
  expect(refusal(new Uint8Array([0x22, 0xff, 0xfe, 0x22]))).toContain("UTF-8");
  expect(refusal(new Uint8Array([0xff, 0xfe]))).toContain("UTF-8");
});

test("deep nesting is refused before the parser, brackets in strings do not count", () => {
  expect(refusal("[".repeat(100_000))).toContain("128 levels");
  expect(refusal('{"a":'.repeat(100_000))).toContain("128 levels");
  expect(refusal(`{"a":${"[".repeat(128)}${"]".repeat(128)}}`)).toContain("128 levels");
  expect(parse(`{"a":${"[".repeat(127)}${"]".repeat(127)}}`).fields).toHaveProperty("a");
  expect(parse(JSON.stringify({ a: "[{".repeat(1000) })).fields.a).toHaveLength(2000);
});

test("the same key twice in one object is refused, escaped or not", () => {
  expect(refusal('{"a":1,"b":2,"a":3}')).toContain('"a"');
  expect(refusal('{"a":1,"\\u0061":3}')).toContain('"a"');
  expect(refusal('{"m":[{"role":"user","x":1,"role":"system"}]}')).toContain('"role"');
  expect(refusal('{"__proto__":1,"__proto__":2}')).toContain("__proto__");
});

test("__proto__ is a key like any other and reaches no prototype", () => {
  const { fields } = parse('{"__proto__":{"x":1},"constructor":{"prototype":{"y":1}}}');
  expect(Object.keys(fields)).toEqual(["__proto__", "constructor"]);
  expect(({} as Record<string, unknown>).x).toBeUndefined();
  expect(({} as Record<string, unknown>).y).toBeUndefined();
});

test("exactInteger reads the digits of the top-level field only", () => {
  expect(exactInteger(parse('{"a":{"seed":1},"seed":18446744073709551615,"b":[{"seed":2}]}'), "seed")).toBe(18446744073709551615n);
  expect(exactInteger(parse('{"seed":1e30}'), "seed")).toBeNull();
  expect(exactInteger(parse('{"seed":"5"}'), "seed")).toBeNull();
  expect(exactInteger(parse('{"b":{"seed":2}}'), "seed")).toBeNull();
});
