/**
 * The manifests as a cluster runs them: real API server, the image's entrypoint and the real frontend, each in a pod with an address of its own. The test plays
 * operator (variables, pods), kubelet (Secrets, claims, probes, signals) and endpoint controller.
 */
import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { copyFileSync, existsSync, linkSync, mkdirSync, readdirSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { Component, readManifests, treesAt } from "../../../scripts/manifests/documents.ts";
import { Container, containers, ROOTFS } from "../../support/container.ts";
import { eventually, Launched, required } from "../../support/launch.ts";
import { Node, type PodNetwork } from "../../support/pods.ts";
import { smolVariant } from "../../support/smol-variants.ts";
import { Cluster, LIMIT_MS, present } from "../dynamo/kube-cluster.ts";

const texts = readManifests(join(import.meta.dir, "../../../deploy"));
const SERVED = "Qwen/Qwen3-8B";

interface Pod {
  name: string;
  network: PodNetwork;
  component: Component;
  process: Launched;
  container: Container | null;
}

describe.skipIf(!present || !containers || !existsSync(ROOTFS))("the graphs on a cluster", () => {
  let cluster: Cluster;
  let node: Node;
  let model = "";
  let count = 0;

  beforeAll(async () => {
    cluster = await Cluster.start();
    node = await Node.start(cluster.home, Number(new URL(cluster.server).port));
    model = await smolVariant("hf-bf16");
    await cluster.must("POST", `/api/v1/namespaces/${cluster.namespace}/secrets`, { metadata: { name: "layerscale-license" }, stringData: { "license-key": required("LAYERSCALE_LICENSE_KEY") } });
    // What the kubelet mounts into every pod.
    mkdirSync(join(cluster.home, "account"));
    writeFileSync(join(cluster.home, "account", "token"), await cluster.token("worker"));
    copyFileSync(join(cluster.home, "ca.crt"), join(cluster.home, "account", "ca.crt"));
    writeFileSync(join(cluster.home, "account", "namespace"), cluster.namespace);
  }, 2 * LIMIT_MS);
  /** A claim that holds what an earlier download of the repo left. */
  function hubCache(): string {
    const cache = join(cluster.home, "huggingface");
    const repo = join(cache, "hub/models--Qwen--Qwen3-8B");
    const commit = "0123456789abcdef0123456789abcdef01234567";
    if (existsSync(repo)) return cache;
    for (const folder of ["blobs", "refs", `snapshots/${commit}`]) mkdirSync(join(repo, folder), { recursive: true });
    writeFileSync(join(repo, "refs/main"), commit);
    for (const name of readdirSync(model)) {
      const to = join(repo, "snapshots", commit, name);
      try {
        linkSync(join(model, name), to);
      } catch {
        copyFileSync(join(model, name), to);
      }
    }
    return cache;
  }
  afterAll(async () => {
    await node?.[Symbol.asyncDispose]();
    await cluster?.[Symbol.asyncDispose]();
  });

  /** Values of the manifest's own variables. */
  async function declared(component: Component, address: string): Promise<Record<string, string>> {
    const out: Record<string, string> = {};
    for (const entry of treesAt(component.main, "env") as any[]) {
      const { secretKeyRef, fieldRef } = entry.valueFrom ?? {};
      if (secretKeyRef) {
        const { status, body } = await cluster.call("GET", `/api/v1/namespaces/${cluster.namespace}/secrets/${secretKeyRef.name}`);
        if (status !== 200 && !secretKeyRef.optional) throw new Error(`no Secret ${secretKeyRef.name}`);
        if (status === 200) out[entry.name] = atob(body.data[secretKeyRef.key]);
      } else if (fieldRef) {
        expect(fieldRef.fieldPath).toBe("status.podIP");
        out[entry.name] = address;
      } else out[entry.name] = entry.value;
    }
    return out;
  }

  /** What the operator adds to `main`. Workers of one generation share a suffix, frontends find every generation by prefix. */
  function injected(graph: string, component: Component, pod: string, uid: string): Record<string, string> {
    const namespace = `${cluster.namespace}-${graph}`;
    const common = { DYN_DISCOVERY_BACKEND: "kubernetes", DYN_COMPONENT: component.name, POD_NAME: pod, POD_NAMESPACE: cluster.namespace, POD_UID: uid, DYN_PARENT_DGD_K8S_NAME: graph, DYN_PARENT_DGD_K8S_NAMESPACE: cluster.namespace };
    if (!component.worker) return { ...common, DYN_NAMESPACE: namespace, DYN_NAMESPACE_PREFIX: namespace, DYNAMO_PORT: "8000", DYN_HTTP_PORT: "8000" };
    return {
      ...common, DYN_NAMESPACE: namespace, DYN_NAMESPACE_WORKER_SUFFIX: "0a1b2c3d", DYN_SYSTEM_ENABLED: "true", DYN_SYSTEM_USE_ENDPOINT_HEALTH_STATUS: '["generate"]', DYN_SYSTEM_PORT: "9090",
      DYN_HEALTH_CHECK_ENABLED: "false", NIXL_TELEMETRY_ENABLE: "n", NIXL_TELEMETRY_EXPORTER: "prometheus", NIXL_TELEMETRY_PROMETHEUS_PORT: "19090",
    };
  }

  async function start(graph: string, component: Component): Promise<Pod> {
    const name = `${graph}-${component.name}-${count++}`;
    const network = await node.pod();
    const uid = await cluster.pod(name);
    const env = { ...injected(graph, component, name, uid), ...(await declared(component, network.address)) };
    if (!component.worker) {
      const { path } = await cluster.kubeconfig(name, await cluster.token("worker"));
      const process = Launched.command(network.inside([required("LAYERSCALE_TEST_PYTHON"), "-m", "dynamo.frontend"]), { env: { ...env, KUBECONFIG: path, HOME: cluster.home, HF_HUB_OFFLINE: "1", PYTHONUNBUFFERED: "1" } });
      return { name, network, component, process, container: null };
    }
    const [claim] = treesAt(component.main, "volumeMounts") as any[];
    const hub = claim.mountPath === "/root/.cache/huggingface";
    const container = Container.run(component.args, {
      entrypoint: component.main.command as string[],
      network: network.pid,
      // The claim holds the repo already, and there is no hub to ask.
      env: { ...env, ...(hub && { HF_HUB_OFFLINE: "1" }), KUBERNETES_SERVICE_HOST: "127.0.0.1", KUBERNETES_SERVICE_PORT: new URL(cluster.server).port },
      volumes: { ...(hub ? { [hubCache()]: claim.mountPath } : { [model]: `${claim.mountPath}/Qwen3-8B:ro` }), [join(cluster.home, "account")]: "/var/run/secrets/kubernetes.io/serviceaccount:ro" },
    });
    return { name, network, component, process: container.process, container };
  }

  /** The kubelet's probe of the operator's form; readiness goes to the EndpointSlice. */
  async function probed(pod: Pod): Promise<void> {
    const url = pod.component.worker ? "http://127.0.0.1:9090/health" : "http://127.0.0.1:8000/health";
    await eventually(async () => {
      if (!pod.process.running) throw new Error(`${pod.name} ended: ${pod.process.stderr.slice(-3000)}`);
      return (await pod.network.curl(url)).status === 200;
    }, `${pod.name} is ready`, LIMIT_MS);
    await cluster.ready(pod.name, true);
  }

  let asked = 0;
  /** Another prompt each time: none of it but the template is in a worker's own cache. */
  const chat = (frontend: Pod) =>
    frontend.network.curl("http://127.0.0.1:8000/v1/chat/completions", "-H", "Content-Type: application/json", "-d", JSON.stringify({ model: SERVED, messages: [{ role: "user", content: `What is the capital of country ${asked++}, and why?` }], max_tokens: 8, temperature: 0 }));
  const moved = async (pod: Pod, direction: string) => Number(new RegExp(`^layerscale_kv_transfer_bytes_total\\{direction="${direction}"\\} (\\d+)`, "m").exec((await pod.network.curl("http://127.0.0.1:9090/metrics")).text)?.[1] ?? 0);

  for (const [file, workers] of [["agg.yaml", ["worker"]], ["disagg.yaml", ["prefill", "decode"]], ["agg-hub.yaml", ["worker"]], ["disagg-hub.yaml", ["prefill", "decode"]]] as const)
    test(`${file}: pods find each other, answer, and leave`, async () => {
      const tree: any = Bun.YAML.parse(texts.get(file)!);
      const graph: string = tree.metadata.name;
      const components = treesAt(tree, "spec", "components").map((item) => new Component(item));
      const pods: Pod[] = [];
      try {
        for (const component of components) pods.push(await start(graph, component));
        const frontend = pods.find(({ component }) => !component.worker)!;
        const members = pods.filter(({ component }) => component.worker);
        expect(members.map(({ component }) => component.name)).toEqual([...workers]);
        for (const pod of members) await pod.process.log("worker ready", LIMIT_MS);
        // Registered, but nobody's pod is ready yet: not routable.
        for (const pod of members) expect(Object.keys((await cluster.object(pod.name)).spec.data.endpoints)).toContainEqual(expect.stringMatching(new RegExp(`^${cluster.namespace}-${graph}-0a1b2c3d/${pod.component.name}/generate/`)));
        await probed(frontend);
        expect(JSON.parse((await frontend.network.curl("http://127.0.0.1:8000/v1/models")).text).data).toEqual([]);
        for (const pod of members) await probed(pod);
        const answer = await eventually(async () => {
          const reply = await chat(frontend);
          if (!frontend.process.running) throw new Error(`the frontend ended: ${frontend.process.stderr.slice(-3000)}`);
          const body = reply.status === 200 ? JSON.parse(reply.text) : null;
          // A frontend that has found only the decode worker yet lets it run the whole request.
          return body !== null && (workers.length === 1 || (await moved(members[1]!, "received")) > 0) ? body : null;
        }, "the graph answers", LIMIT_MS);
        expect(answer.choices[0].message.content.length).toBeGreaterThan(0);
        // Between two addresses: what the prefill worker gave out is its POD_IP.
        if (workers.length === 2) expect(await moved(members[0]!, "sent")).toBe(await moved(members[1]!, "received"));
        // From the frontend's pod, as Prometheus would.
        for (const pod of members) expect((await frontend.network.curl(`http://${pod.network.address}:9090/metrics`)).text).toContain("layerscale_build_info");
        for (const pod of members) {
          await pod.container!.signal("SIGTERM");
          expect([pod.name, await pod.process.exit(30_000)]).toEqual([pod.name, 0]);
          expect(await cluster.object(pod.name)).toBeNull();
          await cluster.deletePod(pod.name);
        }
        await eventually(async () => JSON.parse((await frontend.network.curl("http://127.0.0.1:8000/v1/models")).text).data.length === 0, "the frontend drops the model", LIMIT_MS);
      } finally {
        for (const { process, container } of pods) await (container ?? process)[Symbol.asyncDispose]();
      }
    }, 4 * LIMIT_MS);
});
