/** The dashboard's queries before what a worker and the frontend really export: by name, and where Prometheus is at hand, by running them. */
import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { eventually, Launched } from "../../support/launch.ts";
import { Deployment, LIMIT_MS, type Worker } from "../dynamo/support.ts";
import { freePort } from "../../support/free-port.ts";

interface Panel {
  title: string;
  targets?: { expr: string }[];
}
const dashboard = JSON.parse(readFileSync(join(import.meta.dir, "../../../deploy/grafana-dashboard.json"), "utf8")) as { panels: Panel[]; templating: { list: { name: string; query: any }[] } };
const queries = dashboard.panels.flatMap(({ title, targets = [] }) => targets.map(({ expr }) => ({ title, expr })));
/** Labels that scraping adds. */
const SCRAPED = ["namespace", "pod"];

/** Sample name → labels that its samples carry. */
function samples(text: string): Map<string, Set<string>> {
  const found = new Map<string, Set<string>>();
  for (const line of text.split("\n")) {
    const match = /^([a-z_]+)(?:\{(.*)\})? \S+$/.exec(line);
    if (!match) continue;
    const labels = found.get(match[1]!) ?? new Set();
    for (const [, label] of (match[2] ?? "").matchAll(/(\w+)="/g)) labels.add(label!);
    found.set(match[1]!, labels);
  }
  return found;
}
const types = (text: string) => new Map([...text.matchAll(/^# TYPE (\w+) (\w+)$/gm)].map((match) => [match[1]!, match[2]!]));

describe("dashboard", () => {
  let deployment: Deployment;
  let worker: Worker;
  let exported = "";

  beforeAll(async () => {
    deployment = await Deployment.start("kv");
    worker = await deployment.worker();
    await deployment.ask("chat", "Say hello.", { max_tokens: 4, stream: true });
    for (const url of [deployment.url, worker.system]) exported += await (await fetch(`${url}/metrics`)).text();
  }, 2 * LIMIT_MS);
  afterAll(async () => deployment?.[Symbol.asyncDispose]());

  test("names only families, and labels of theirs, that are exported; rates only of what counts up", () => {
    const known = samples(exported);
    const kinds = types(exported);
    for (const { title, expr } of queries) {
      const names = [...expr.matchAll(/\b((?:dynamo|layerscale)_[a-z_]+)\{([^}]*)\}(\[)?/g)];
      expect([title, names.length]).not.toEqual([title, 0]);
      for (const [, name, matchers, ranged] of names) {
        expect([title, name, known.has(name!)]).toEqual([title, name, true]);
        const allowed = [...known.get(name!)!, ...SCRAPED];
        const grouped = [...expr.matchAll(/\bby \(([^)]*)\)/g)].flatMap((match) => match[1]!.split(",").map((label) => label.trim()));
        const used = [...[...matchers!.matchAll(/(\w+)=~?"/g)].map((match) => match[1]!), ...grouped];
        expect([title, name, used.filter((label) => !allowed.includes(label))]).toEqual([title, name, []]);
        const kind = kinds.get(name!.replace(/_(bucket|sum|count)$/, "")) ?? kinds.get(name!);
        expect([title, name, kind]).toEqual([title, name, ranged === undefined ? "gauge" : name!.endsWith("_bucket") ? "histogram" : "counter"]);
      }
    }
    expect(queries.length).toBeGreaterThan(20);
  });

  test.skipIf(!process.env.LAYERSCALE_TEST_PROMETHEUS)("every query gives something when Prometheus runs it", async () => {
    const home = mkdtempSync(join(tmpdir(), "layerscale-prometheus-"));
    const target = (url: string, pod: string) => ({ targets: [new URL(url).host], labels: { namespace: "ns1", pod } });
    const config = { global: { scrape_interval: "1s", scrape_timeout: "1s" }, scrape_configs: [{ job_name: "layerscale", static_configs: [target(worker.system, "worker-0"), target(deployment.url, "frontend-0")] }] };
    writeFileSync(join(home, "prometheus.yml"), JSON.stringify(config));
    const port = await freePort();
    try {
      await using prometheus = Launched.command([process.env.LAYERSCALE_TEST_PROMETHEUS!, `--config.file=${home}/prometheus.yml`, `--storage.tsdb.path=${home}/data`, `--web.listen-address=127.0.0.1:${port}`, "--log.level=error"]);
      const ask = async (expr: string): Promise<{ value: [number, string] }[]> => {
        if (!prometheus.running) throw new Error(`prometheus ended: ${prometheus.stderr.slice(-2000)}`);
        const response = await fetch(`http://127.0.0.1:${port}/api/v1/query?${new URLSearchParams({ query: expr.replaceAll("$__rate_interval", "60s").replaceAll("$namespace", ".*") })}`).catch(() => null);
        if (response === null || response.status === 503) return [];
        const body = (await response.json()) as { status: string; error?: string; data?: { result: { value: [number, string] }[] } };
        // Not ready yet is 503, above; a query that does not parse is 400 for ever.
        if (response.status === 400) throw new Error(`${expr}: ${body.error}`);
        return body.data?.result ?? [];
      };
      const silent = new Set(queries);
      await eventually(async () => {
        await deployment.ask("chat", "Say hello.", { max_tokens: 4, stream: true });
        for (const query of silent) {
          const result = await ask(query.expr);
          // Nothing is transferred here, so the quantile of a pull's time is not a number; the others must be one.
          if (result.length > 0 && (query.expr.includes("kv_transfer_seconds") || result.every(({ value }) => value[1] !== "NaN"))) silent.delete(query);
        }
        return silent.size === 0;
      }, "every query answers", LIMIT_MS).catch((error) => {
        throw new Error(`${(error as Error).message}; without an answer: ${[...silent].map(({ title, expr }) => `${title}: ${expr}`).join("; ")}`);
      });
    } finally {
      rmSync(home, { recursive: true, force: true });
    }
  }, 2 * LIMIT_MS);
});
