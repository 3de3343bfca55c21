import { describe, expect, test } from "bun:test";
import { parseJson, stringifyJson } from "../../../src/dynamo/protocol/bigint-json.ts";
import { decodeMsgpack, encodeMsgpack } from "../../../src/dynamo/protocol/msgpack.ts";

describe("JSON with 64-bit integers", () => {
  test("integers beyond 2^53 are exact, others stay numbers", () => {
    const value = parseJson('{"id":1311768467294899695,"neg":-9223372036854775808,"max":18446744073709551615,"n":9007199254740991,"f":1234567890123456.75,"e":1e300}') as Record<string, unknown>;
    expect(value.id).toBe(1311768467294899695n);
    expect(value.neg).toBe(-9223372036854775808n);
    expect(value.max).toBe(18446744073709551615n);
    expect(value.n).toBe(9007199254740991);
    expect(value.f).toBe(1234567890123456.75);
    expect(value.e).toBe(1e300);
  });
  test("digits inside strings are text", () => {
    expect(parseJson('{"a":"99999999999999999999","b":[99999999999999999999]}')).toEqual({ a: "99999999999999999999", b: [99999999999999999999n] });
  });
  test("bigint is written as a bare number and read back", () => {
    const text = stringifyJson({ instance_id: 16168851458736696141n, list: [0n] });
    expect(text).toBe('{"instance_id":16168851458736696141,"list":[0]}');
    expect(parseJson(text)).toEqual({ instance_id: 16168851458736696141n, list: [0] });
  });
  test("__proto__ is an ordinary key", () => {
    const value = parseJson('{"__proto__":{"polluted":12345678901234567890}}') as object;
    expect(({} as Record<string, unknown>).polluted).toBeUndefined();
    expect(Object.keys(value)).toEqual(["__proto__"]);
  });
});

describe("MessagePack", () => {
  const values: [string, unknown, string][] = [
    ["nil", null, "c0"], ["true", true, "c3"], ["false", false, "c2"], ["0", 0, "00"], ["127", 127, "7f"], ["128", 128, "cc80"], ["65535", 65535, "cdffff"],
    ["65536", 65536, "ce00010000"], ["2^32", 2 ** 32, "cf0000000100000000"], ["u64 max", 2n ** 64n - 1n, "cfffffffffffffffff"], ["-1", -1, "ff"], ["-32", -32, "e0"],
    ["-33", -33, "d0df"], ["-129", -129, "d1ff7f"], ["-32769", -32769, "d2ffff7fff"], ["i64 min", -(2n ** 63n), "d38000000000000000"], ["0.5", 0.5, "cb3fe0000000000000"],
    ["text", "risk", "a47269736b"], ["bin", Uint8Array.of(1, 2), "c4020102"], ["list", [1, "a"], "9201a161"], ["map", { a: 1 }, "81a16101"],
  ];
  test.each(values)("%s", (_name, value, hex) => {
    expect(encodeMsgpack(value).toString("hex")).toBe(hex);
    const back = decodeMsgpack(Buffer.from(hex, "hex"));
    expect(back instanceof Uint8Array ? new Uint8Array(back) : back).toEqual(value);
  });
  test("the final marker has the bytes of the reference", () => {
    expect(encodeMsgpack({ complete_final: true }).toString("hex")).toBe("81ae636f6d706c6574655f66696e616cc3");
  });
  test("lengths of every width come back", () => {
    for (const n of [31, 32, 255, 256, 65535, 65536]) {
      const value = { text: "x".repeat(n), list: Array.from({ length: n }, (_, i) => i), bytes: new Uint8Array(n), map: Object.fromEntries(Array.from({ length: Math.min(n, 70_000) }, (_, i) => [`k${i}`, i])) };
      const back = decodeMsgpack(encodeMsgpack(value)) as typeof value;
      expect(back.text).toBe(value.text);
      expect(back.list).toEqual(value.list);
      expect(back.bytes.length).toBe(n);
      expect(Object.keys(back.map).length).toBe(Object.keys(value.map).length);
    }
  });
  test("hostile bytes are refused without an allocation from their claims", () => {
    const nested = Buffer.concat([Buffer.alloc(100_000, 0x91), Buffer.from([0])]);
    for (const bytes of ["ddffffffff", "dfffffffff01", "c6ffffffff00", "dbffffffff00", "c1", "8101", "81c0c0", "a3ff", "", "0000"].map((hex) => Buffer.from(hex, "hex")).concat(nested))
      expect(() => decodeMsgpack(bytes)).toThrow();
  });
  test("any cut of a value is refused", () => {
    const bytes = encodeMsgpack({ token_ids: [1, 70000, 2 ** 40], text: "é", id: 2n ** 63n, f: 0.1 });
    for (let n = 0; n < bytes.length; n++) expect(() => decodeMsgpack(bytes.subarray(0, n))).toThrow();
  });
});
