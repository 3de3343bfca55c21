/** What an operator and an API server do to running workers: a new generation beside the old one, history thrown away, writers that quarrel. */
import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { eventually } from "../../support/launch.ts";
import { Cluster, LIMIT_MS, present } from "./kube-cluster.ts";
import { Deployment, type Worker } from "./support.ts";

const BACKEND = { DYN_DISCOVERY_BACKEND: "kubernetes" };

describe.skipIf(!present)("kubernetes discovery, updates", () => {
  let cluster: Cluster;
  let config: { path: string };
  let pods = 0;

  beforeAll(async () => {
    cluster = await Cluster.start();
    config = await cluster.kubeconfig("worker", await cluster.token("worker"));
  }, LIMIT_MS);
  afterAll(async () => cluster?.[Symbol.asyncDispose]());

  const inPod = (name: string, uid: string) => ({ ...BACKEND, POD_NAME: name, POD_UID: uid, POD_NAMESPACE: cluster.namespace, KUBECONFIG: config.path });
  async function frontend(env: Record<string, string>): Promise<Deployment> {
    const name = `fe-${pods++}`;
    return Deployment.start("round-robin", [], undefined, { all: BACKEND, frontend: { ...inPod(name, await cluster.pod(name)), ...env } });
  }
  async function worker(deployment: Deployment, env: Record<string, string>): Promise<{ worker: Worker; pod: string }> {
    const pod = `worker-${pods++}`;
    return { worker: await deployment.worker([], { served: false, env: { ...inPod(pod, await cluster.pod(pod)), DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS: "1", ...env } }), pod };
  }

  test("a new generation takes over while requests go on; none fails", async () => {
    await using deployment = await frontend({ DYN_NAMESPACE_PREFIX: "ns1-graph" });
    const { worker: old, pod: oldPod } = await worker(deployment, { DYN_NAMESPACE: "ns1-graph", DYN_NAMESPACE_WORKER_SUFFIX: "aaaa1111" });
    await cluster.ready(oldPod, true);
    await deployment.served();
    const statuses: number[] = [];
    const done = new AbortController();
    const asking = (async () => {
      while (!done.signal.aborted) statuses.push((await deployment.ask("completions", "Once upon a time", { max_tokens: 8 })).status);
    })();
    try {
      const { worker: fresh, pod } = await worker(deployment, { DYN_NAMESPACE: "ns1-graph", DYN_NAMESPACE_WORKER_SUFFIX: "bbbb2222" });
      expect(Object.keys((await cluster.object(pod)).spec.data.endpoints)).toContain(`ns1-graph-bbbb2222/backend/generate/${fresh.instance}`);
      await cluster.ready(pod, true);
      await eventually(async () => ((await fresh.metric("layerscale_requests_total")) ?? 0) > 0, "the new generation is asked", LIMIT_MS);
      // The old pod is deleted: not ready, SIGTERM, gone.
      await cluster.ready(oldPod, false);
      old.process.signal("SIGTERM");
      expect(await old.process.exit()).toBe(0);
      await cluster.deletePod(oldPod);
      const before = (await fresh.metric("layerscale_requests_total")) ?? 0;
      await eventually(async () => ((await fresh.metric("layerscale_requests_total")) ?? 0) >= before + 3, "the new generation has all of them", LIMIT_MS);
    } finally {
      done.abort();
      await asking;
    }
    expect(statuses.length).toBeGreaterThan(3);
    expect(statuses.filter((status) => status !== 200)).toEqual([]);
  }, 3 * LIMIT_MS);

  test("history is thrown away while the API server is gone: the record is followed anew", async () => {
    await using deployment = await frontend({ DYN_NAMESPACE: "compacted" });
    const { worker: own, pod } = await worker(deployment, { DYN_NAMESPACE: "compacted" });
    await cluster.ready(pod, true);
    await deployment.served();
    await cluster.killApi();
    try {
      await own.process.log("API server cannot be followed; requests are served on", LIMIT_MS);
      await cluster.compact();
    } finally {
      await cluster.startApi();
    }
    await own.process.log("API server answers again", LIMIT_MS);
    await cluster.must("DELETE", `${cluster.objects}/${pod}`);
    await eventually(async () => (await cluster.object(pod))?.spec.data.endpoints[`compacted/backend/generate/${own.instance}`], "the record is written again", LIMIT_MS);
    await deployment.served();
  }, 3 * LIMIT_MS);

  test("another writer that insists does not win, and nobody is kept from the model", async () => {
    await using deployment = await frontend({ DYN_NAMESPACE: "quarrel" });
    const { worker: own, pod } = await worker(deployment, { DYN_NAMESPACE: "quarrel" });
    await cluster.ready(pod, true);
    await deployment.served();
    const key = `quarrel/backend/generate/${own.instance}`;
    const address = async () => (await cluster.object(pod))?.spec.data.endpoints[key]?.transport.tcp;
    const right = await address();
    for (let round = 0; round < 5; round++) {
      // By turns: a forced apply of another manager, a merge patch, a deletion. Each is undone.
      const path = `${cluster.objects}/${pod}`;
      const wrong = { spec: { data: { endpoints: { [key]: { transport: { tcp: "192.0.2.1:1/x/y" } } } } } };
      const applied = { apiVersion: "nvidia.com/v1alpha1", kind: "DynamoWorkerMetadata", metadata: { name: pod }, ...wrong };
      if (round % 3 === 0) await cluster.must("PATCH", `${path}?fieldManager=somebody&force=true`, applied, "application/apply-patch+yaml");
      else if (round % 3 === 1) await cluster.must("PATCH", path, wrong, "application/merge-patch+json");
      else await cluster.must("DELETE", path);
      await eventually(async () => (await address()) === right, `the record is right again after round ${round}`, LIMIT_MS);
    }
    await deployment.served();
  }, 3 * LIMIT_MS);
});
