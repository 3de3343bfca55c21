import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { writeFileSync } from "node:fs";
import { eventually, launch, Launched, program, required } from "../../support/launch.ts";
import { Cluster, LIMIT_MS, present } from "./kube-cluster.ts";
import { Deployment, NAME, readEvents, type Worker } from "./support.ts";

const BACKEND = { DYN_DISCOVERY_BACKEND: "kubernetes" };

/** Variables of a process in a pod. */
function inPod(cluster: Cluster, name: string, uid: string, kubeconfig: string): Record<string, string> {
  return { ...BACKEND, POD_NAME: name, POD_UID: uid, POD_NAMESPACE: cluster.namespace, KUBECONFIG: kubeconfig };
}

describe.skipIf(!present)("kubernetes discovery against a real API server", () => {
  let cluster: Cluster;
  let config: { path: string; tokenFile: string };
  let pods = 0;

  beforeAll(async () => {
    cluster = await Cluster.start();
    config = await cluster.kubeconfig("worker", await cluster.token("worker"));
  }, LIMIT_MS);
  afterAll(async () => cluster?.[Symbol.asyncDispose]());

  /** A frontend in a pod of its own. */
  async function frontend(args: readonly string[] = [], env: Record<string, string> = {}, router: "round-robin" | "kv" = "round-robin"): Promise<Deployment> {
    const name = `fe-${pods++}`;
    const uid = await cluster.pod(name);
    return Deployment.start(router, args, undefined, { all: BACKEND, frontend: { ...inPod(cluster, name, uid, config.path), ...env } });
  }
  /** A worker in a pod of its own, not ready yet; the namespace keeps tests apart. */
  async function worker(deployment: Deployment, args: readonly string[] = [], env: Record<string, string> = {}): Promise<{ worker: Worker; pod: string; uid: string }> {
    const pod = env.POD_NAME ?? `worker-${pods++}`;
    const uid = env.POD_UID ?? (await cluster.pod(pod));
    return { worker: await deployment.worker(args, { served: false, env: { ...inPod(cluster, pod, uid, config.path), DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS: "1", ...env } }), pod, uid };
  }
  const listed = async (deployment: Deployment): Promise<string[]> => ((await (await fetch(`${deployment.url}/v1/models`)).json()) as { data: { id: string }[] }).data.map((model) => model.id);
  const served = async (deployment: Deployment) => {
    await deployment.served();
    const answer = await deployment.ask("chat", "Say hello.", { max_tokens: 4, stream: true });
    expect(answer).toMatchObject({ status: 200, done: true, finish: "length" });
    expect(answer.text.length).toBeGreaterThan(0);
  };
  const gone = (deployment: Deployment) => eventually(async () => (await listed(deployment)).length === 0, "the frontend drops the model", LIMIT_MS);

  test("registration, readiness gating, clean stop", async () => {
    await using deployment = await frontend();
    const { worker: own, pod, uid } = await worker(deployment);
    const object = await cluster.object(pod);
    expect(object.metadata.ownerReferences).toEqual([{ apiVersion: "v1", kind: "Pod", name: pod, uid, controller: true, blockOwnerDeletion: false }]);
    expect(object.metadata.managedFields.map((field: any) => [field.manager, field.operation])).toEqual([["dynamo-worker", "Apply"]]);
    const { endpoints, model_cards: cards, event_channels: channels, event_sources: sources } = object.spec.data;
    const key = `dynamo/backend/generate/${own.instance}`;
    expect(endpoints[key]).toMatchObject({ type: "Endpoint", namespace: "dynamo", component: "backend", endpoint: "generate", instance_id: parseInt(own.instance, 16) });
    expect(Object.keys(endpoints).filter((name) => name !== key)).toEqual([expect.stringContaining("worker_kv_query_source_")]);
    expect(cards[key]).toMatchObject({ type: "Model", card_json: { display_name: NAME } });
    expect(Object.values<any>(channels).map((channel) => [channel.topic, channel.namespace, channel.component]).sort()).toEqual([["kv-events", "dynamo", "backend"], ["kv_metrics", "dynamo", "backend"]]);
    expect(Object.values<any>(sources).map((source) => source.topic)).toEqual(["kv-events"]);
    const metadata = (await (await fetch(`${own.system}/metadata`)).json()) as Record<string, object>;
    expect(Object.entries(metadata).map(([field, records]) => [field, Object.keys(records).sort()])).toEqual(Object.entries<object>({ endpoints, model_cards: cards, event_channels: channels, event_sources: sources }).map(([field, records]) => [field, Object.keys(records).sort()]));
    // The worker is healthy, and hidden: only the pod's readiness makes it routable.
    expect((await fetch(`${own.system}/health`)).status).toBe(200);
    expect(await listed(deployment)).toEqual([]);
    await cluster.ready(pod, true);
    await served(deployment);
    await cluster.ready(pod, false);
    await gone(deployment);
    await cluster.ready(pod, true);
    await served(deployment);
    own.process.signal("SIGTERM");
    await eventually(async () => (await cluster.object(pod)) === null, "the record is deleted", LIMIT_MS);
    expect(own.process.running).toBe(true);
    expect(await own.process.exit()).toBe(0);
    await gone(deployment);
  }, 3 * LIMIT_MS);

  test("the namespace with its suffix, and a frontend that filters by it", async () => {
    await using deployment = await frontend(["--namespace", "team-blue"]);
    const { pod: other } = await worker(deployment, ["--namespace", "team"]);
    await cluster.ready(other, true);
    const { worker: own, pod } = await worker(deployment, ["--namespace", "team"], { DYN_NAMESPACE_WORKER_SUFFIX: "blue" });
    expect(Object.keys((await cluster.object(pod)).spec.data.endpoints)).toContain(`team-blue/backend/generate/${own.instance}`);
    expect(await listed(deployment)).toEqual([]);
    await cluster.ready(pod, true);
    await served(deployment);
    // The one without the suffix was ready all the time.
    expect(await deployment.workers[0]!.metric("layerscale_requests_total")).toBeFalsy();
  }, 3 * LIMIT_MS);

  test("container mode: several workers in one pod, each with its own readiness; a stale record goes at the start", async () => {
    await using deployment = await frontend(["--namespace", "containers"], { DYN_KUBE_DISCOVERY_MODE: "container", CONTAINER_NAME: "main" });
    const pod = `worker-${pods++}`;
    const uid = await cluster.pod(pod, ["main", "engine-0"]);
    await cluster.must("POST", cluster.objects, { apiVersion: "nvidia.com/v1alpha1", kind: "DynamoWorkerMetadata", metadata: { name: `${pod}-engine-0` }, spec: { data: { endpoints: { "stale/x/y/1": {} } } } });
    const start = (container: string) => worker(deployment, ["--namespace", "containers"], { POD_NAME: pod, POD_UID: uid, DYN_KUBE_DISCOVERY_MODE: "container", CONTAINER_NAME: container });
    const { worker: engine } = await start("engine-0");
    const { worker: main } = await start("main");
    expect(engine.instance).not.toBe(main.instance);
    const object = await cluster.object(`${pod}-engine-0`);
    expect(object.metadata.ownerReferences).toMatchObject([{ name: pod, uid, controller: false }]);
    expect(Object.keys(object.spec.data.endpoints).some((key) => key.startsWith("stale"))).toBe(false);
    expect((await cluster.object(pod)).metadata.ownerReferences).toMatchObject([{ name: pod, uid, controller: true }]);
    expect(await listed(deployment)).toEqual([]);
    await cluster.containersReady(pod, { main: false, "engine-0": true });
    await served(deployment);
    expect(await main.metric("dynamo_component_requests_total")).toBe(0);
    await cluster.containersReady(pod, { main: true, "engine-0": false });
    await eventually(async () => {
      await deployment.ask("completions", "a", { max_tokens: 1 });
      return ((await main.metric("dynamo_component_requests_total")) ?? 0) > 0;
    }, "requests go to the other container", LIMIT_MS);
    await cluster.containersReady(pod, { main: false, "engine-0": false });
    await gone(deployment);
  }, 3 * LIMIT_MS);

  test("the API server is killed and comes back while a stream runs", async () => {
    await using deployment = await frontend(["--namespace", "restart"]);
    const { worker: own, pod } = await worker(deployment, ["--namespace", "restart"]);
    await cluster.ready(pod, true);
    await served(deployment);
    const response = await deployment.request("completions", "Once upon a time", { max_tokens: 400, stream: true, ignore_eos: true });
    const stream = await readEvents(response, 3);
    await cluster.killApi();
    try {
      await own.process.log("API server cannot be followed; requests are served on", LIMIT_MS);
      // New requests as well: frontends keep what they know.
      expect((await deployment.ask("completions", "a", { max_tokens: 2 })).status).toBe(200);
    } finally {
      await cluster.startApi();
    }
    const text = await stream.rest();
    expect(text).toContain("data: [DONE]");
    expect(text).toContain('"completion_tokens":400');
    await own.process.log("API server answers again", LIMIT_MS);
    // It follows its record as before.
    await cluster.must("DELETE", `${cluster.objects}/${pod}`);
    await eventually(async () => (await cluster.object(pod))?.spec.data.endpoints[`restart/backend/generate/${own.instance}`], "the record is written again", LIMIT_MS);
    await served(deployment);
    own.process.signal("SIGTERM");
    expect(await own.process.exit()).toBe(0);
    expect(await cluster.object(pod)).toBeNull();
  }, 3 * LIMIT_MS);

  test("a worker that stops while the API server is away leaves in time", async () => {
    await using deployment = await frontend(["--namespace", "away"]);
    const { worker: own, pod } = await worker(deployment, ["--namespace", "away"]);
    await cluster.killApi();
    try {
      own.process.signal("SIGTERM");
      expect(await own.process.exit(30_000)).toBe(0);
    } finally {
      await cluster.startApi();
    }
    // What is left goes with the pod; until then the next worker of this name replaces it.
    expect(await cluster.object(pod)).not.toBeNull();
  }, 2 * LIMIT_MS);

  test("somebody else's change of the record is undone", async () => {
    await using deployment = await frontend(["--namespace", "conflict"]);
    const { worker: own, pod } = await worker(deployment, ["--namespace", "conflict"]);
    const key = `conflict/backend/generate/${own.instance}`;
    const path = `${cluster.objects}/${pod}?fieldManager=somebody&force=true`;
    const before = (await cluster.object(pod)).spec.data.endpoints[key];
    await cluster.must("PATCH", path, { apiVersion: "nvidia.com/v1alpha1", kind: "DynamoWorkerMetadata", metadata: { name: pod }, spec: { data: { endpoints: { [key]: { ...before, transport: { tcp: "192.0.2.1:1/x/y" } } } } } }, "application/apply-patch+yaml");
    await eventually(async () => (await cluster.object(pod)).spec.data.endpoints[key].transport.tcp === before.transport.tcp, "the record is right again", LIMIT_MS);
    await cluster.ready(pod, true);
    await served(deployment);
  }, 2 * LIMIT_MS);

  test("a renewed token is used: the account of the old one is gone", async () => {
    await using deployment = await frontend(["--namespace", "tokens"]);
    const account = "short-lived";
    const rbac = `/apis/rbac.authorization.k8s.io/v1/namespaces/${cluster.namespace}/rolebindings`;
    await cluster.must("POST", `/api/v1/namespaces/${cluster.namespace}/serviceaccounts`, { metadata: { name: account } });
    await cluster.must("POST", rbac, { metadata: { name: account }, roleRef: { apiGroup: "rbac.authorization.k8s.io", kind: "Role", name: "dynamo" }, subjects: [{ kind: "ServiceAccount", name: account, namespace: cluster.namespace }] });
    const old = await cluster.token(account);
    await eventually(async () => (await cluster.call("GET", cluster.objects, undefined, undefined, old)).status === 200, "the first account may read", LIMIT_MS);
    const own = await cluster.kubeconfig("rotated", old);
    const { worker: process, pod } = await worker(deployment, ["--namespace", "tokens"], { KUBECONFIG: own.path });
    writeFileSync(own.tokenFile, await cluster.token("worker-next"));
    await cluster.must("DELETE", `/api/v1/namespaces/${cluster.namespace}/serviceaccounts/${account}`);
    await eventually(async () => (await cluster.call("GET", cluster.objects, undefined, undefined, old)).status === 401, "the old token is refused", LIMIT_MS);
    await cluster.must("DELETE", `${cluster.objects}/${pod}`);
    await eventually(() => cluster.object(pod), "the record is written with the new token", LIMIT_MS);
    await cluster.ready(pod, true);
    await served(deployment);
    process.process.signal("SIGTERM");
    expect(await process.process.exit()).toBe(0);
    expect(await cluster.object(pod)).toBeNull();
  }, 3 * LIMIT_MS);

  test("the pod is deleted: frontends drop it at once, the worker stops, its record goes", async () => {
    await using deployment = await frontend(["--namespace", "deleted"]);
    const { worker: own, pod } = await worker(deployment, ["--namespace", "deleted"]);
    await cluster.ready(pod, true);
    await served(deployment);
    await cluster.deletePod(pod);
    await gone(deployment);
    own.process.signal("SIGTERM");
    expect(await own.process.exit()).toBe(0);
    expect(await cluster.object(pod)).toBeNull();
  }, 2 * LIMIT_MS);

  test("a replacement pod of the same name keeps its record when the old worker ends late", async () => {
    await using deployment = await frontend(["--namespace", "replaced"]);
    const { worker: old, pod } = await worker(deployment, ["--namespace", "replaced"]);
    await cluster.deletePod(pod);
    const uid = await cluster.pod(pod);
    const { worker: fresh } = await worker(deployment, ["--namespace", "replaced"], { POD_NAME: pod, POD_UID: uid });
    expect(fresh.instance).toBe(old.instance);
    await old.process.log("another pod of the same name has taken the record over; this one is no longer found", LIMIT_MS);
    old.process.signal("SIGTERM");
    expect(await old.process.exit()).toBe(0);
    expect((await cluster.object(pod)).metadata.ownerReferences).toMatchObject([{ uid }]);
    await cluster.ready(pod, true);
    await served(deployment);
  }, 3 * LIMIT_MS);

  test("killed: the pod's readiness takes it out; the next process of the pod replaces what was left", async () => {
    await using deployment = await frontend(["--namespace", "killed"]);
    const { worker: own, pod, uid } = await worker(deployment, ["--namespace", "killed"]);
    await cluster.ready(pod, true);
    await served(deployment);
    await own.kill();
    expect(await cluster.object(pod)).not.toBeNull();
    await cluster.ready(pod, false);
    await gone(deployment);
    await worker(deployment, ["--namespace", "killed"], { POD_NAME: pod, POD_UID: uid });
    await cluster.ready(pod, true);
    await served(deployment);
  }, 3 * LIMIT_MS);

  test("KV-aware routing: events arrive over the channel that the record names", async () => {
    await using deployment = await frontend(["--namespace", "kv"], {}, "kv");
    const all = [await worker(deployment, ["--namespace", "kv"]), await worker(deployment, ["--namespace", "kv"])];
    for (const { pod } of all) await cluster.ready(pod, true);
    await served(deployment);
    const prompt = (n: number) => Array.from({ length: 24 }, (_, i) => `word${1000 + n * 100 + i}`).join(" ");
    const cached = async (n: number) => (await deployment.ask("completions", prompt(n), { max_tokens: 1 })).usage?.prompt_tokens_details?.cached_tokens ?? 0;
    await cached(0);
    await eventually(async () => (await cached(0)) >= 64, "a repeat finds its pages", LIMIT_MS);
    // Heard of now: every prompt that one worker has computed goes to that worker.
    for (let n = 1; n <= 12; n++) await cached(n);
    for (let n = 1; n <= 12; n++) expect(await cached(n)).toBeGreaterThanOrEqual(64);
    for (const { worker: each } of all) expect(await each.metric("dynamo_component_requests_total")).toBeGreaterThan(0);
  }, 3 * LIMIT_MS);

  describe("a start that cannot work ends with one line", () => {
    const ends = async (env: Record<string, string>, message: RegExp) => {
      const process = launch(["dynamo", "--model", required("LAYERSCALE_TEST_GGUF")], { env: { ...inPod(cluster, "worker-x", "u", config.path), ...env } });
      expect(await process.exit()).toBe(1);
      const lines = process.stderr.split("\n").filter((line) => line && !line.startsWith("{"));
      expect(lines).toHaveLength(1);
      expect(lines[0]).toMatch(message);
      expect(process.stderr).not.toContain("Bearer");
    };
    test("a token that is not one", async () => ends({ KUBECONFIG: (await cluster.kubeconfig("bad", "not-a-token")).path }, /^error: Kubernetes API server https:.*\/worker-x: 401 .*token or client certificate is not accepted/));
    test("a certificate of another authority", async () => ends({ KUBECONFIG: (await cluster.kubeconfig("other", await cluster.token("worker"), "other-ca.crt")).path }, /^error: Kubernetes API server https:.*the server's certificate is not accepted/));
    test("no rights at all, or only to read", async () => {
      for (const account of ["nobody", "reader"])
        await ends({ KUBECONFIG: (await cluster.kubeconfig(account, await cluster.token(account))).path }, new RegExp(`^error: .*worker-x: 403 .*${account}.*the pod's service account needs get, list, watch, create, patch and delete on dynamoworkermetadatas`));
    });
    test("a namespace that does not exist", async () => ends({ POD_NAMESPACE: "elsewhere", KUBECONFIG: cluster.writeKubeconfig("admin", { token: "admin-token" }) }, /^error: .*404 .*elsewhere/));
    test("no POD_UID", () => ends({ POD_UID: "" }, /^error: POD_UID is not set/));
    test("no cluster", () => ends({ KUBECONFIG: "", HOME: cluster.home }, /^error: DYN_DISCOVERY_BACKEND=kubernetes finds no cluster/));
  });

  test("a stop is heeded while the API server is sought", async () => {
    const path = cluster.writeKubeconfig("nobody-there", { token: "t" });
    writeFileSync(path, (await Bun.file(path).text()).replace(cluster.server, "https://127.0.0.1:9"));
    await using process = launch(["dynamo", "--model", required("LAYERSCALE_TEST_GGUF")], { env: inPod(cluster, "worker-x", "u", path) });
    const line = await process.log("API server does not take the request yet", LIMIT_MS);
    expect(line.error).toMatch(/^Kubernetes API server https:\/\/127\.0\.0\.1:9 /);
    process.signal("SIGTERM");
    expect(await process.exit(10_000)).toBe(0);
  }, LIMIT_MS);

  test("a client certificate instead of a token, a server that goes by another name", async () => {
    const path = cluster.writeKubeconfig("certificate", { "client-certificate": "client.crt", "client-key": "client.key" });
    const text = JSON.parse(await Bun.file(path).text());
    Object.assign(text.clusters[0].cluster, { server: cluster.server.replace("127.0.0.1", "localhost"), "tls-server-name": "kubernetes" });
    writeFileSync(path, JSON.stringify(text));
    await using deployment = await frontend(["--namespace", "certificate"]);
    const { pod } = await worker(deployment, ["--namespace", "certificate"], { KUBECONFIG: path });
    expect(await cluster.object(pod)).not.toBeNull();
  }, 2 * LIMIT_MS);

  // A mount namespace stands for the pod: the kubelet's files are where they are in every pod.
  const mounts = Bun.which("unshare") !== null && Bun.spawnSync(["unshare", "-m", "sh", "-c", "mount -t tmpfs none /run && readlink -f /var/run"], { stderr: "ignore" }).stdout.toString().trim() === "/run";
  test.skipIf(!mounts)("in-cluster configuration: the service account's files", async () => {
    const pod = `worker-${pods++}`;
    const uid = await cluster.pod(pod);
    writeFileSync(`${cluster.home}/in-cluster.token`, await cluster.token("worker"));
    const script = `mount -t tmpfs none /run && mkdir -p /run/secrets/kubernetes.io/serviceaccount && cd /run/secrets/kubernetes.io/serviceaccount && cp "$CLUSTER/in-cluster.token" token && cp "$CLUSTER/ca.crt" ca.crt && cd / && exec "$@"`;
    await using process = Launched.command(["unshare", "-m", "sh", "-c", script, "sh", ...program(), "dynamo", "--model", required("LAYERSCALE_TEST_GGUF"), "--max-total-tokens", "4096"], {
      env: {
        ...BACKEND, POD_NAME: pod, POD_UID: uid, POD_NAMESPACE: cluster.namespace, KUBERNETES_SERVICE_HOST: "127.0.0.1", KUBERNETES_SERVICE_PORT: new URL(cluster.server).port, HOME: cluster.home, CLUSTER: cluster.home,
        LAYERSCALE_LICENSE_KEY: required("LAYERSCALE_LICENSE_KEY"), DYN_TCP_RPC_HOST: "127.0.0.1",
      },
    });
    await process.log("worker ready", LIMIT_MS);
    expect(await cluster.object(pod)).not.toBeNull();
  }, 2 * LIMIT_MS);
});
