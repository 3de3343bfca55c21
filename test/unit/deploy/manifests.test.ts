import { describe, expect, test } from "bun:test";
import { join } from "node:path";
import { lintManifests, linkFinding } from "../../../scripts/lint-manifests.ts";
import { GRAPHS, type ManifestName, readManifests } from "../../../scripts/manifests/documents.ts";
import { POINTS } from "../../../scripts/manifests/points.ts";
import { BREAKING, type Edit, HARMLESS } from "../../support/manifest-edits.ts";
import { Random } from "../../support/random.ts";

const root = join(import.meta.dir, "../../..");
const texts = readManifests(join(root, "deploy"));

/** The manifests with one of them edited. */
function edited(file: ManifestName, edit: Edit, random: Random): Map<ManifestName, string> {
  const tree = Bun.YAML.parse(texts.get(file)!);
  edit.apply(tree, random);
  return new Map([...texts, [file, JSON.stringify(tree)]]);
}
const applicable = (edit: Edit) => GRAPHS.filter((file) => edit.only?.(file) ?? true);

describe("the lint of the manifests", () => {
  test("accepts those in deploy/, which dynamo/deploy/ leads to", () => {
    expect([...lintManifests(texts), ...linkFinding(root)]).toEqual([]);
  });

  for (const edit of BREAKING)
    test(`names what is wrong: ${(edit.breaks as { point: string }).point}, ${edit.kind}`, () => {
      for (const file of applicable(edit))
        for (let seed = 1; seed <= 3; seed++) {
          const findings = lintManifests(edited(file, edit, new Random(seed)));
          expect(findings.map((finding) => `${finding.file} ${finding.id}`)).toContain(`${file} ${(edit.breaks as { point: string }).point}`);
          // Nobody else's file, and one message per point and component.
          expect(findings.every((finding) => finding.file === file)).toBe(true);
          expect(new Set(findings.map((finding) => finding.message)).size).toBe(findings.length);
        }
    });

  test("every point has an edit that breaks it", () => {
    const broken = new Set(BREAKING.map((edit) => (edit.breaks as { point: string }).point));
    expect(POINTS.map(({ id }) => id).filter((id) => !broken.has(id))).toEqual([]);
  });

  for (const edit of HARMLESS)
    test(`accepts ${edit.kind}`, () => {
      for (const file of applicable(edit)) for (let seed = 1; seed <= 2; seed++) expect(lintManifests(edited(file, edit, new Random(seed)))).toEqual([]);
    });

  test("network policy and pod monitor: who may reach whom, what is scraped", () => {
    const changed = (file: ManifestName, from: string | RegExp, to: string) => {
      expect(texts.get(file)!.search(from)).toBeGreaterThanOrEqual(0);
      return lintManifests(new Map([...texts, [file, texts.get(file)!.replace(from, to)]])).map(({ id }) => id);
    };
    expect(changed("network-policy.yaml", "component: decode", "component: decoder")).toEqual(["kv-transfer"]);
    expect(changed("network-policy.yaml", "protocol: TCP", "protocol: UDP")).toEqual(["kv-transfer"]);
    expect(changed("network-policy.yaml", "endPort: 65535", "endPort: 1024")).toEqual(["kv-transfer"]);
    expect(changed("network-policy.yaml", /^ {6}ports:\n {8}- protocol: TCP\n {10}port: 1\n {10}endPort: 65535\n/m, "")).toEqual(["kv-transfer"]);
    expect(changed("network-policy.yaml", /^---[\s\S]*/m, "")).toEqual(["kv-transfer"]);
    expect(changed("network-policy.yaml", "kubernetes.io/metadata.name: monitoring", "kubernetes.io/metadata.name: default")).toEqual(["kv-transfer"]);
    expect(changed("network-policy.yaml", "name: layerscale-disagg-decode", "name: layerscale-disagg-prefill")).toEqual(["kv-transfer"]);
    expect(changed("network-policy.yaml", "name: layerscale-disagg-decode", "name: layerscale-disagg-decode\n  namespace: other")).toEqual(["kv-transfer"]);
    for (const more of ["team: x\n", "kubernetes.io/metadata.name: y\n"]) expect(changed("network-policy.yaml", "app.kubernetes.io/component: prefill\n", `app.kubernetes.io/component: prefill\n      ${more}`)).toEqual(["kv-transfer"]);
    expect(changed("network-policy.yaml", "  podSelector:\n", "  podSelector:\n    matchExpressions:\n      - {key: x, operator: Exists}\n")).toEqual(["kv-transfer"]);
    expect(changed("network-policy.yaml", "        - namespaceSelector:\n", "        - podSelector: {}\n          namespaceSelector:\n")).toEqual(["kv-transfer"]);
    expect(changed("network-policy.yaml", "        - namespaceSelector:\n", "        - ipBlock: {cidr: 0.0.0.0/0}\n        - namespaceSelector:\n")).toEqual(["kv-transfer"]);
    expect(changed("network-policy.yaml", "  policyTypes:\n", "  egress: []\n  policyTypes:\n")).toEqual(["kv-transfer"]);
    expect(changed("pod-monitor.yaml", "  selector:\n", "  selector:\n    matchLabels: {a: b}\n")).toEqual(["pod-monitor"]);
    expect(changed("pod-monitor.yaml", "  podMetricsEndpoints:\n", "  namespaceSelector: {matchNames: [other]}\n  podMetricsEndpoints:\n")).toEqual(["pod-monitor"]);
    expect(changed("pod-monitor.yaml", "interval: 15s", "interval: 15")).toEqual(["pod-monitor"]);
    expect(changed("pod-monitor.yaml", "path: /metrics\n", "path: /metrics\n      scheme: https\n")).toEqual(["pod-monitor"]);
    expect(changed("pod-monitor.yaml", "layerscale-disagg", "layerscale-disag")).toEqual(["pod-monitor"]);
    expect(changed("pod-monitor.yaml", "port: system", "port: metrics")).toEqual(["pod-monitor"]);
    expect(changed("pod-monitor.yaml", "path: /metrics", "path: /metric")).toEqual(["pod-monitor"]);
  });

  test("a file that is missing, or no YAML", () => {
    const without = new Map(texts);
    without.delete("agg.yaml");
    expect(lintManifests(without)).toEqual([{ file: "agg.yaml", id: "file", message: "the file is missing" }]);
    expect(lintManifests(new Map([...texts, ["agg.yaml", "a: [b"]])).map(({ id }) => id)).toEqual(["yaml"]);
  });
});
