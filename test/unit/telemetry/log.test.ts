import { afterEach, describe, expect, test } from "bun:test";
import { logger, setLogFilter, setLogSink } from "../../../src/telemetry/log.ts";
import { parseTraceparent, requestFields } from "../../../src/telemetry/trace.ts";
import { DEFAULT_FILTER, parseLogFilter, thresholdOf } from "../../../src/util/log-filter.ts";

const lines: Record<string, unknown>[] = [];
afterEach(() => {
  lines.length = 0;
  setLogFilter(DEFAULT_FILTER);
  setLogSink((line) => void process.stderr.write(line + "\n"));
});
const listen = () => setLogSink((line) => void lines.push(JSON.parse(line) as Record<string, unknown>));
const filter = (text: string) => {
  const parsed = parseLogFilter(text);
  if ("bad" in parsed) throw new Error(`bad: ${parsed.bad}`);
  return parsed.filter;
};

describe("DYN_LOG", () => {
  test.each([
    ["", "info"], ["debug", "debug"], ["WARN", "warn"], ["off", "off"], ["5", "trace"], ["1", "error"], [" info , ", "info"],
    ["layerscale=debug", "debug"], ["layerscale::dynamo=trace,warn", "trace"], ["layerscale::dynamo::health=error", "off"], ["info,dynamo_runtime=debug", "info"],
    ["layerscale::dynamo", "trace"], ["layerscale=error,layerscale::dynamo::worker=debug", "debug"], ["layerscale::dynamo::work=debug,info", "info"], ["h2=off", "off"],
  ] as const)("%p: layerscale::dynamo::worker is at %p", (text, level) => expect(thresholdOf(filter(text), "layerscale::dynamo::worker")).toBe(level));
  test.each([["loud"], ["a=loud"], ["info,a=b=c=d"], ["é"], ["a b"]])("%p is refused", (text) => {
    expect(parseLogFilter(text)).toHaveProperty("bad");
  });
  test("selectors of spans are left out and named", () => {
    expect(parseLogFilter("info,a[span{id=1}]=debug")).toEqual({ filter: { fallback: "info", targets: new Map() }, ignored: ["a[span{id=1}]=debug"] });
  });
  test("decides what is written, for loggers made before as well", () => {
    listen();
    const log = logger("layerscale::part");
    log.debug("one");
    setLogFilter(filter("layerscale::part=debug"));
    log.debug("two");
    logger("layerscale::other").error("three");
    setLogFilter(filter("off"));
    log.error("four");
    expect(lines.map((line) => line.message)).toEqual(["two"]);
  });
});

describe("a line", () => {
  test("is one JSON object: time, level, target, message, fields; 64-bit ids exact, errors as text", () => {
    listen();
    logger("layerscale::part").warn("something", { id: 2n ** 64n - 1n, error: new Error("why\nnot"), text: 'a"b' });
    expect(lines).toEqual([{ time: expect.stringMatching(/^\d{4}-\d\d-\d\dT[\d:.]+Z$/), level: "warn", target: "layerscale::part", message: "something", id: "18446744073709551615", error: "why\nnot", text: 'a"b' }]);
  });
});

describe("traceparent", () => {
  const trace = "4bf92f3577b34da6a3ce929d0e0e4736";
  test("is read from any version", () => {
    for (const header of [`00-${trace}-00f067aa0ba902b7-01`, `cc-${trace}-00f067aa0ba902b7-00-more`]) expect(parseTraceparent(header)).toEqual({ traceId: trace, spanId: "00f067aa0ba902b7" });
  });
  test.each([[undefined], [""], ["00-x-y-01"], [`ff-${trace}-00f067aa0ba902b7-01`], [`00-${"0".repeat(32)}-00f067aa0ba902b7-01`], [`00-${trace}-${"0".repeat(16)}-01`], [`00-${trace.toUpperCase()}-00f067aa0ba902b7-01`], [`00-${trace}-00f067aa0ba902b7-01x`]])("%p is none", (header) => {
    expect(parseTraceparent(header)).toBeNull();
    expect(requestFields("r", header)).toEqual({ requestId: "r" });
  });
});
