import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { join } from "node:path";
import { lintManifests } from "../../../scripts/lint-manifests.ts";
import { GRAPHS, MANIFESTS, type ManifestName, parseDocuments, readManifests } from "../../../scripts/manifests/documents.ts";
import { graphDeployment, podMonitor } from "../../support/deployment-resources.ts";
import { eventually } from "../../support/launch.ts";
import { BREAKING, type Edit, HARMLESS, UNKNOWN_FIELDS } from "../../support/manifest-edits.ts";
import { Random } from "../../support/random.ts";
import { Cluster, LIMIT_MS, present } from "../dynamo/kube-cluster.ts";

const root = join(import.meta.dir, "../../..");
const texts = readManifests(join(root, "deploy"));
const COLLECTIONS: Record<string, string> = { DynamoGraphDeployment: "nvidia.com/v1beta1:dynamographdeployments", NetworkPolicy: "networking.k8s.io/v1:networkpolicies", PodMonitor: "monitoring.coreos.com/v1:podmonitors" };

describe.skipIf(!present)("manifests before a real API server", () => {
  let cluster: Cluster;

  beforeAll(async () => {
    cluster = await Cluster.start();
    const { components } = await cluster.must("GET", "/openapi/v3/api/v1");
    for (const definition of [graphDeployment(components.schemas), podMonitor()]) await cluster.must("POST", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", definition);
    for (const kind of ["DynamoGraphDeployment", "PodMonitor"]) await eventually(async () => (await cluster.call("GET", collection(kind))).status === 200, `${kind} is served`, LIMIT_MS);
  }, LIMIT_MS);
  afterAll(async () => cluster?.[Symbol.asyncDispose]());

  function collection(kind: string): string {
    const [group, plural] = COLLECTIONS[kind]!.split(":");
    return `/apis/${group}/namespaces/${cluster.namespace}/${plural}`;
  }

  /** Server-side apply of one document, which nothing is kept of. @returns null, or why it is refused */
  async function refusal(document: any): Promise<string | null> {
    const path = `${collection(document.kind in COLLECTIONS ? document.kind : "DynamoGraphDeployment")}/${document.metadata.name}?dryRun=All&fieldManager=test&fieldValidation=Strict&force=true`;
    const { status, body } = await cluster.call("PATCH", path, document, "application/apply-patch+yaml");
    // How the server reports a field that its schema does not know, or of another type.
    if (/^failed to create typed patch object/.test(String(body.message))) return String(body.message);
    if (status >= 500) throw new Error(`${path}: ${status} ${JSON.stringify(body)}`);
    return status < 300 ? null : String(body.message);
  }

  for (const file of MANIFESTS)
    test(`${file} is accepted as it is`, async () => {
      for (const document of parseDocuments(texts.get(file)!)) expect(await refusal(document)).toBeNull();
    });

  for (const edit of UNKNOWN_FIELDS)
    test(`refuses ${edit.kind}`, async () => {
      for (const file of GRAPHS) {
        const tree: any = Bun.YAML.parse(texts.get(file)!);
        edit.apply(tree, new Random(1));
        expect(await refusal(tree)).not.toBeNull();
      }
    });

  test("50 random edits are judged rightly by lint and schema together", async () => {
    const random = new Random(20_261_129);
    const kinds = [BREAKING, UNKNOWN_FIELDS, HARMLESS] as const;
    const verdicts: [string, string][] = [];
    const expected: [string, string][] = [];
    for (let i = 0; i < 50; i++) {
      const file = random.pick(GRAPHS) as ManifestName;
      const edit: Edit = random.pick(random.pick(kinds).filter((candidate) => candidate.only?.(file) ?? true));
      const tree: any = Bun.YAML.parse(texts.get(file)!);
      edit.apply(tree, random);
      const findings = lintManifests(new Map([...texts, [file, JSON.stringify(tree)]])).map(({ id }) => id);
      const refused = await refusal(tree);
      const name = `${i}: ${file}, ${edit.kind}`;
      verdicts.push([name, findings.length === 0 && refused === null ? "holds" : "broken"]);
      expected.push([name, edit.breaks === null ? "holds" : "broken"]);
      if (edit.breaks === "schema") expect([name, refused]).not.toEqual([name, null]);
      else if (edit.breaks !== null) expect([name, findings]).toEqual([name, expect.arrayContaining([edit.breaks.point])]);
    }
    expect(verdicts).toEqual(expected);
    expect(new Set(verdicts.map(([, verdict]) => verdict)).size).toBe(2);
  }, LIMIT_MS);

  test.skipIf(Bun.which("kubectl") === null)("the page's kubectl commands", async () => {
    const kubectl = (...args: string[]) => {
      const { exitCode, stdout, stderr } = Bun.spawnSync(["kubectl", ...args], { cwd: root, env: { ...process.env, KUBECONFIG: cluster.writeKubeconfig("kubectl", { token: "admin-token" }), HOME: cluster.home } });
      if (exitCode !== 0) throw new Error(`kubectl ${args.join(" ")}: ${stderr.toString()}`);
      return stdout.toString();
    };
    expect(kubectl("create", "secret", "generic", "layerscale-license", "--from-literal=license-key=LSK-x.y")).toContain("secret/layerscale-license created");
    for (const graph of ["agg", "disagg"]) {
      expect(kubectl("apply", "-f", `dynamo/deploy/${graph}.yaml`)).toContain(`dynamographdeployment.nvidia.com/layerscale-${graph} created`);
      expect(kubectl("apply", "--server-side", "--force-conflicts", "--validate=strict", "-f", `deploy/${graph}-hub.yaml`)).toContain("serverside-applied");
    }
    kubectl("apply", "-f", "deploy/network-policy.yaml", "-f", "deploy/pod-monitor.yaml");
    expect(kubectl("get", "networkpolicies", "-o", "name").trim().split("\n")).toEqual(["networkpolicy.networking.k8s.io/layerscale-disagg-decode", "networkpolicy.networking.k8s.io/layerscale-disagg-prefill"]);
  }, LIMIT_MS);
});
