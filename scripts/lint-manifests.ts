/**
 * `bun scripts/lint-manifests.ts [FOLDER]`: whether the manifests of deploy/ hold every point of the deployment contract.
 * One line per point that does not hold, exit code 1 when there are any.
 */
import { readlinkSync } from "node:fs";
import { join } from "node:path";
import { at, Component, GRAPHS, isTree, MANIFESTS, type ManifestName, parseDocuments, readManifests, textsAt, type Tree, treesAt } from "./manifests/documents.ts";
import { POINTS } from "./manifests/points.ts";

export interface Finding {
  file: string;
  /** Of the point that does not hold. */
  id: string;
  message: string;
}

const shown = (value: unknown) => JSON.stringify(value) ?? "nothing";

/** @param texts the files by name; one that is missing is a finding */
export function lintManifests(texts: ReadonlyMap<ManifestName, string>): Finding[] {
  const findings: Finding[] = [];
  const parsed = new Map<ManifestName, Tree[]>();
  for (const file of MANIFESTS) {
    const add = (id: string, message: string) => findings.push({ file, id, message });
    const text = texts.get(file);
    if (text === undefined) {
      add("file", "the file is missing");
      continue;
    }
    try {
      const documents = parseDocuments(text);
      if (!documents.every(isTree)) add("yaml", "expected objects");
      else parsed.set(file, documents);
    } catch (error) {
      add("yaml", (error as Error).message);
    }
  }
  for (const file of GRAPHS) {
    const documents = parsed.get(file);
    if (documents === undefined) continue;
    const [tree] = documents as [Tree];
    if (documents.length !== 1) findings.push({ file, id: "yaml", message: `expected one document, got ${documents.length}` });
    const graph = {
      file,
      tree,
      components: treesAt(tree, "spec", "components").map((component) => new Component(component)),
      roles: file.startsWith("disagg") ? ["prefill", "decode"] : ["worker"],
      hub: file.endsWith("-hub.yaml"),
    };
    for (const { id, check } of POINTS) for (const message of check(graph)) findings.push({ file, id, message });
  }
  findings.push(...networkFindings(parsed.get("network-policy.yaml")), ...monitorFindings(parsed.get("pod-monitor.yaml")));
  return findings;
}

const GRAPH = "layerscale-disagg";
const onlyKeys = (value: unknown, ...keys: string[]): boolean => isTree(value) && Object.keys(value).every((key) => keys.includes(key));
/** Another label or expression selects fewer pods than the name says, or none. */
const role = (selector: unknown) =>
  at(selector, "matchLabels", "app.kubernetes.io/part-of") === GRAPH && onlyKeys(selector, "matchLabels") && onlyKeys(at(selector, "matchLabels"), "app.kubernetes.io/part-of", "app.kubernetes.io/component")
    ? String(at(selector, "matchLabels", "app.kubernetes.io/component"))
    : shown(selector);

function source(peer: Tree): string {
  if (Object.keys(peer).length === 0) return "anybody";
  if (onlyKeys(peer, "podSelector")) return role(peer.podSelector);
  const space = at(peer, "namespaceSelector", "matchLabels", "kubernetes.io/metadata.name");
  return onlyKeys(peer, "namespaceSelector") && onlyKeys(peer.namespaceSelector, "matchLabels") && onlyKeys(at(peer, "namespaceSelector", "matchLabels"), "kubernetes.io/metadata.name") ? String(space) : shown(peer);
}

/** Decode and frontend reach every port of prefill, the frontend every port of decode, Prometheus the metrics of both, nobody else anything. */
function networkFindings(policies: Tree[] | undefined): Finding[] {
  const expected = ["decode <- frontend 1-65535", "decode <- monitoring 9090", "prefill <- decode 1-65535", "prefill <- frontend 1-65535", "prefill <- monitoring 9090"];
  const allowed: string[] = [];
  for (const policy of policies ?? []) {
    if (policy.kind !== "NetworkPolicy" || policy.apiVersion !== "networking.k8s.io/v1" || textsAt(policy, "spec", "policyTypes").join() !== "Ingress") allowed.push(`a ${shown(policy.kind)} of ${shown(policy.apiVersion)} for ${shown(at(policy, "spec", "policyTypes"))}`);
    const to = role(at(policy, "spec", "podSelector"));
    for (const rule of treesAt(policy, "spec", "ingress"))
      for (const peer of treesAt(rule, "from").length > 0 ? treesAt(rule, "from") : [{}])
        for (const port of treesAt(rule, "ports").length > 0 ? treesAt(rule, "ports") : [{}]) {
          const range = "endPort" in port ? `${String(port.port)}-${String(port.endPort)}` : String("port" in port ? port.port : "any port");
          allowed.push(`${to} <- ${source(peer)} ${range}${"protocol" in port && port.protocol !== "TCP" ? ` ${String(port.protocol)}` : ""}`);
        }
  }
  const names = new Set((policies ?? []).map((policy) => at(policy, "metadata", "name")));
  if (names.size < (policies ?? []).length) allowed.push("two policies of one name, of which the second replaces the first");
  for (const policy of policies ?? []) {
    if (at(policy, "metadata", "namespace") !== undefined) allowed.push(`a policy for the namespace ${shown(at(policy, "metadata", "namespace"))}`);
    if (!onlyKeys(policy.spec, "podSelector", "policyTypes", "ingress")) allowed.push(`a policy with ${Object.keys(isTree(policy.spec) ? policy.spec : {}).join(", ")}`);
  }
  const same = allowed.toSorted().join("\n") === expected.join("\n");
  return policies === undefined || same ? [] : [{ file: "network-policy.yaml", id: "kv-transfer", message: `expected ${expected.join(", ")}; got ${allowed.toSorted().join(", ") || "nothing"}` }];
}

function monitorFindings(documents: Tree[] | undefined): Finding[] {
  if (documents === undefined) return [];
  const [monitor] = documents;
  const [expression, another] = treesAt(monitor, "spec", "selector", "matchExpressions");
  const selects = another === undefined && onlyKeys(at(monitor, "spec", "selector"), "matchExpressions") && onlyKeys(monitor?.spec, "selector", "podMetricsEndpoints") && expression?.key === "app.kubernetes.io/part-of" && expression.operator === "In" && textsAt(expression, "values").toSorted().join() === "layerscale-agg,layerscale-disagg";
  const endpoints = treesAt(monitor, "spec", "podMetricsEndpoints");
  const plain = endpoints.every((endpoint) => onlyKeys(endpoint, "port", "path", "interval") && /^\d+(ms|s|m|h)$/.test(String(endpoint.interval ?? "1m")));
  const scraped = endpoints.map(({ port, path }) => `${String(port)}${String(path)}`).toSorted().join();
  const well = documents.length === 1 && monitor?.kind === "PodMonitor" && monitor.apiVersion === "monitoring.coreos.com/v1" && selects && plain && scraped === "http/metrics,system/metrics";
  return well ? [] : [{ file: "pod-monitor.yaml", id: "pod-monitor", message: `expected a PodMonitor of both graphs' pods with /metrics on the ports system and http, and nothing that leaves some out; got ${shown(monitor?.spec)}` }];
}

/** The same files answer under dynamo/deploy/. */
export function linkFinding(root: string): Finding[] {
  let target: string;
  try {
    target = readlinkSync(join(root, "dynamo/deploy"));
  } catch (error) {
    target = (error as Error).message;
  }
  return target === "../deploy" ? [] : [{ file: "dynamo/deploy", id: "link", message: `expected a link to ../deploy, got ${target}` }];
}

if (import.meta.main) {
  const root = join(import.meta.dir, "..");
  const folder = process.argv[2] ?? join(root, "deploy");
  const findings = [...lintManifests(readManifests(folder)), ...(process.argv[2] ? [] : linkFinding(root))];
  for (const { file, id, message } of findings) console.error(`${file}: ${message} [${id}]`);
  if (findings.length === 0) console.log(`${MANIFESTS.length} manifests hold ${POINTS.length + 2} points`);
  process.exit(findings.length === 0 ? 0 : 1);
}
