/** Log lines of requests: the same objects as serve writes, with request id and trace. */
import { afterEach, describe, expect, test } from "bun:test";
import { setLogFilter, setLogSink } from "../../../src/telemetry/log.ts";
import { DEFAULT_FILTER } from "../../../src/util/log-filter.ts";
import { PlaneCall, requestBody, until } from "./plane-client.ts";
import { start, stopAll } from "./worker-harness.ts";

const lines: Record<string, unknown>[] = [];
afterEach(async () => {
  await stopAll();
  lines.length = 0;
  setLogFilter(DEFAULT_FILTER);
  setLogSink((line) => void process.stderr.write(line + "\n"));
});

describe("with DYN_LOG=debug", () => {
  const TRACE = { traceId: "4bf92f3577b34da6a3ce929d0e0e4736", spanId: "00f067aa0ba902b7" };
  const traced = async () => {
    const worker = await start({ stepMs: 2 });
    setLogFilter({ fallback: "debug", targets: new Map() });
    setLogSink((line) => void lines.push(JSON.parse(line) as Record<string, unknown>));
    return worker;
  };
  const send = (worker: { address: string }, id: string, body: unknown) =>
    PlaneCall.send(worker.address, body, { control: { id }, headers: { traceparent: `00-${TRACE.traceId}-${TRACE.spanId}-01` } });
  const of = (requestId: string) => lines.filter((line) => line.requestId === requestId);

  test("an answer, a refusal and a cancellation each carry request id, trace id and span id", async () => {
    const worker = await traced();
    await (await send(worker, "good", requestBody())).done();
    await (await send(worker, "bad", requestBody({ sampling: { top_k: 5 } }))).done();
    const left = await send(worker, "left", requestBody({ stop: { max_tokens: 2000 } }));
    await until("tokens", () => left.tokens.length > 0);
    left.control("kill");
    await until("all ended", () => ["good", "bad", "left"].every((id) => of(id).some((line) => line.message === "request ended")));
    for (const id of ["good", "bad", "left"]) for (const line of of(id)) expect({ ...line }).toMatchObject({ ...TRACE, time: expect.any(String), level: expect.any(String), target: expect.stringMatching(/^layerscale::dynamo::/), message: expect.any(String) });
    const outcome = (id: string) => of(id).find((line) => line.message === "request ended")!.outcome;
    expect([outcome("good"), outcome("bad"), outcome("left")]).toEqual(["ok", "failed", "cancelled"]);
    expect(of("bad").find((line) => line.message === "request failed")).toMatchObject({ level: "debug", error: expect.stringContaining("top_k = 5") });
  });
  test("an engine's fault is an error line", async () => {
    const worker = await traced();
    const call = await send(worker, "lost", requestBody({ stop: { max_tokens: 2000 } }));
    await until("tokens", () => call.tokens.length > 0);
    worker.engine.fail("device lost");
    await until("told", () => of("lost").some((line) => line.level === "error" && String(line.error).includes("device lost")));
    expect(of("lost").find((line) => line.message === "request ended")!.outcome).toBe("failed");
  });
});
