import { expect, test } from "bun:test";
import { Launched, program, required } from "../../support/launch.ts";
import { Cluster, LIMIT_MS, present } from "../dynamo/kube-cluster.ts";

interface Finding {
  id: string;
  status: string;
  detail: string;
}

test.skipIf(!present)("a real API server: rights that are there and rights that are not; the record of a running worker stays", async () => {
  await using cluster = await Cluster.start();
  const findings = async (config: string) => {
    await using doctor = Launched.command([...program(), "doctor", "dynamo", "--json"], {
      env: { LAYERSCALE_LICENSE_KEY: required("LAYERSCALE_LICENSE_KEY"), DYN_DISCOVERY_BACKEND: "kubernetes", KUBECONFIG: config, POD_NAME: "worker-0", POD_UID: "u-1", POD_NAMESPACE: cluster.namespace, POD_IP: "127.0.0.1", DYN_SYSTEM_PORT: "0" },
    });
    await doctor.exit();
    const { checks } = JSON.parse(doctor.stdout) as { checks: Finding[] };
    return ["discovery", "discovery-rights", "clock"].map((id) => checks.find((finding) => finding.id === id)!);
  };
  const before = await cluster.must("POST", cluster.objects, { apiVersion: "nvidia.com/v1alpha1", kind: "DynamoWorkerMetadata", metadata: { name: "worker-0" }, spec: { data: {} } });
  const good = await findings((await cluster.kubeconfig("worker", await cluster.token("worker"))).path);
  expect(good.map(({ status }) => status)).toEqual(["ok", "ok", "ok"]);
  const reader = await findings((await cluster.kubeconfig("reader", await cluster.token("reader"))).path);
  expect(reader.map(({ status }) => status)).toEqual(["ok", "failed", "ok"]);
  expect(reader[1]!.detail).toBe(`the service account may not create dynamoworkermetadatas.nvidia.com, patch dynamoworkermetadatas.nvidia.com, delete dynamoworkermetadatas.nvidia.com in ${cluster.namespace}`);
  const stranger = await findings((await cluster.kubeconfig("bad", "not-a-token")).path);
  expect(stranger.map(({ status }) => status)).toEqual(["failed", "skipped", "skipped"]);
  expect(stranger[0]!.detail).toContain("401");
  expect((await cluster.object("worker-0")).metadata.resourceVersion).toBe(before.metadata.resourceVersion);
}, LIMIT_MS);
