/** /metrics against the families that Dynamo 1.5.0's own workers print: names, types, help, labels, buckets. */
import { afterEach, describe, expect, test } from "bun:test";
import { createServer } from "node:net";
import golden from "../../golden/dynamo-1.5.0-metrics.json";
import { EngineMetrics } from "../../../src/telemetry/metrics.ts";
import { PlaneCall, requestBody, until } from "./plane-client.ts";
import { start, stopAll } from "./worker-harness.ts";

afterEach(stopAll);

interface Family {
  type: string;
  help: string;
  labels: string[];
  buckets?: number[];
}

/** Families of a Prometheus text, in order; label names of their samples, bucket limits apart. */
function families(text: string): Map<string, Family> {
  const found = new Map<string, Family>();
  for (const line of text.split("\n")) {
    const header = /^# (HELP|TYPE) (\S+) (.*)$/.exec(line);
    if (header) {
      const [, kind, name, value] = header as unknown as [string, string, string, string];
      const family = found.get(name) ?? { type: "", help: "", labels: [] };
      if (kind === "HELP") family.help = value;
      else family.type = value;
      found.set(name, family);
      continue;
    }
    const sample = /^([a-z_]+)(?:\{(.*)\})? \S+$/.exec(line);
    if (!sample) continue;
    const base = sample[1]!.replace(/_(bucket|sum|count)$/, "");
    const family = found.get(found.get(base)?.type === "histogram" ? base : sample[1]!)!;
    const labels = [...(sample[2] ?? "").matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)].map((label) => [label[1]!, label[2]!] as const);
    const limit = labels.find(([name]) => name === "le")?.[1];
    if (limit !== undefined && limit !== "+Inf" && !family.buckets?.includes(Number(limit))) (family.buckets ??= []).push(Number(limit));
    family.labels = labels.map(([name]) => name).filter((name) => name !== "le").sort();
  }
  return found;
}

describe("/metrics", () => {
  test("Dynamo's families are those of 1.5.0, and every layerscale_* family of serve follows them", async () => {
    const worker = await start({ prefixCache: true });
    await (await PlaneCall.send(worker.address, requestBody())).done();
    // The errors family appears with its first error: a frontend that does not listen.
    const closed = createServer();
    await new Promise<void>((resolve) => closed.listen(0, "127.0.0.1", resolve));
    const { port } = closed.address() as { port: number };
    closed.close();
    await PlaneCall.send(worker.address, requestBody(), { control: { connection_info: { transport: "tcp_server", info: JSON.stringify({ address: `127.0.0.1:${port}`, subject: "s" }) } } });
    const text = await until("errors family", async () => {
      const body = await (await fetch(`${worker.system}/metrics`)).text();
      return body.includes("dynamo_component_errors_total{") ? body : null;
    });
    const shown = families(text);
    const names = [...shown.keys()];
    const firstOwn = names.findIndex((name) => name.startsWith("layerscale_"));
    const dynamo = Object.fromEntries(names.slice(0, firstOwn).sort().map((name) => [name, shown.get(name)!]));
    expect(dynamo).toEqual(golden as unknown as Record<string, Family>);
    const own = new EngineMetrics({ version: "0" });
    own.declareRoute("chat");
    const serve = families(await own.render());
    expect(names.slice(firstOwn)).toEqual([...serve.keys()]);
    for (const [name, { type, help, labels, buckets }] of serve) expect(shown.get(name)).toMatchObject({ type, help, labels, ...(buckets && { buckets }) });
  });

  test("requests beyond DYN_ENGINE_REQUEST_LIMIT and its queue are turned away and counted; the rest are served", async () => {
    const worker = await start({ stepMs: 2 }, { DYN_ENGINE_REQUEST_LIMIT: "2", DYN_DYNAMO_REQUEST_QUEUE_LIMIT: "1" });
    const long = await Promise.all([1, 2, 3].map(() => PlaneCall.send(worker.address, requestBody({ stop: { max_tokens: 2000 } }))));
    expect(long.map((call) => call.ack)).toEqual(["", "", ""]);
    const turned = await PlaneCall.send(worker.address, requestBody());
    expect(turned.ack).toContain("at capacity");
    const text = await (await fetch(`${worker.system}/metrics`)).text();
    expect(text).toContain("dynamo_rejection_request_total 1\n");
    expect(text).toContain("dynamo_work_handler_enqueue_rejected_total 0\n");
    for (const call of [...long, turned]) call.close();
  });
});
