/** A Kubernetes control plane for tests: the real API server over the real etcd, without kubelet and controllers, whose part the test plays. */
import { mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { createServer } from "node:net";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { eventually, Launched, required } from "../../support/launch.ts";

const ADMIN = "admin-token";
export const LIMIT_MS = 120_000;
export const present = ["LAYERSCALE_TEST_KUBE_APISERVER", "LAYERSCALE_TEST_ETCD"].every((name) => process.env[name]);

async function freePorts(count: number): Promise<number[]> {
  const servers = Array.from({ length: count }, () => createServer());
  await Promise.all(servers.map((server) => new Promise<void>((resolve) => server.listen(0, "127.0.0.1", resolve))));
  const ports = servers.map((server) => (server.address() as { port: number }).port);
  await Promise.all(servers.map((server) => new Promise<void>((resolve) => server.close(() => resolve()))));
  return ports;
}

/** The resource as Dynamo's operator defines it: spec.data is free. */
const RESOURCE = {
  apiVersion: "apiextensions.k8s.io/v1",
  kind: "CustomResourceDefinition",
  metadata: { name: "dynamoworkermetadatas.nvidia.com" },
  spec: {
    group: "nvidia.com",
    scope: "Namespaced",
    names: { plural: "dynamoworkermetadatas", singular: "dynamoworkermetadata", kind: "DynamoWorkerMetadata", listKind: "DynamoWorkerMetadataList", shortNames: ["dwm"] },
    versions: [
      {
        name: "v1alpha1",
        served: true,
        storage: true,
        schema: { openAPIV3Schema: { type: "object", properties: { spec: { type: "object", required: ["data"], properties: { data: { type: "object", "x-kubernetes-preserve-unknown-fields": true } } } }, required: ["spec"] } },
      },
    ],
  },
};
/** What the operator grants to workers and frontends. */
const RULES = [
  { apiGroups: ["nvidia.com"], resources: ["dynamoworkermetadatas"], verbs: ["get", "list", "watch", "create", "update", "patch", "delete"] },
  { apiGroups: ["discovery.k8s.io"], resources: ["endpointslices"], verbs: ["get", "list", "watch"] },
  { apiGroups: [""], resources: ["pods"], verbs: ["get", "list", "watch"] },
];

export interface Reply {
  status: number;
  body: any;
}

export class Cluster implements AsyncDisposable {
  readonly namespace = "ns1";
  server = "";
  #port = 0;
  #etcd!: Launched;
  #etcdUrl = "";
  #api: Launched | null = null;

  private constructor(readonly home: string) {}

  static async start(): Promise<Cluster> {
    const self = new Cluster(mkdtempSync(join(tmpdir(), "layerscale-kube-")));
    try {
      self.#certificates();
      const [client, peer, api] = (await freePorts(3)) as [number, number, number];
      self.#port = api;
      self.server = `https://127.0.0.1:${api}`;
      self.#etcdUrl = `http://127.0.0.1:${client}`;
      const peerUrl = `http://127.0.0.1:${peer}`;
      self.#etcd = Launched.command([
        required("LAYERSCALE_TEST_ETCD"), "--data-dir", join(self.home, "etcd"), "--listen-client-urls", self.#etcdUrl, "--advertise-client-urls", self.#etcdUrl,
        "--listen-peer-urls", peerUrl, "--initial-advertise-peer-urls", peerUrl, "--initial-cluster", `default=${peerUrl}`, "--log-level", "error",
      ]);
      await self.startApi();
      await self.#furnish();
    } catch (error) {
      await self[Symbol.asyncDispose]();
      throw error;
    }
    return self;
  }

  /** A folder's certificate authority, the server's certificate for 127.0.0.1 and the key that signs tokens. */
  #certificates(): void {
    const openssl = (...args: string[]) => {
      const { exitCode, stderr } = Bun.spawnSync(["openssl", ...args], { cwd: this.home });
      if (exitCode !== 0) throw new Error(`openssl ${args[0]}: ${stderr.toString()}`);
    };
    for (const name of ["ca", "other-ca"]) openssl("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-keyout", `${name}.key`, "-out", `${name}.crt`, "-subj", `/CN=${name}`);
    const signed = (name: string, subject: string, extension: string) => {
      writeFileSync(join(this.home, `${name}.ext`), extension);
      openssl("req", "-newkey", "rsa:2048", "-nodes", "-keyout", `${name}.key`, "-out", `${name}.csr`, "-subj", subject);
      openssl("x509", "-req", "-in", `${name}.csr`, "-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-out", `${name}.crt`, "-extfile", `${name}.ext`);
    };
    signed("server", "/CN=kube-apiserver", "subjectAltName=IP:127.0.0.1,DNS:kubernetes\nextendedKeyUsage=serverAuth\n");
    signed("client", "/O=workers/CN=worker-by-certificate", "extendedKeyUsage=clientAuth\n");
    openssl("genrsa", "-out", "sa.key", "2048");
    openssl("rsa", "-in", "sa.key", "-pubout", "-out", "sa.pub");
    writeFileSync(join(this.home, "tokens.csv"), `${ADMIN},admin,1,"system:masters"\n`);
  }

  /** Starts the API server on its port, and waits until it is ready. */
  async startApi(): Promise<void> {
    const at = (name: string) => join(this.home, name);
    const api = Launched.command([
      required("LAYERSCALE_TEST_KUBE_APISERVER"), `--etcd-servers=${this.#etcdUrl}`, "--bind-address=127.0.0.1", `--secure-port=${this.#port}`,
      `--tls-cert-file=${at("server.crt")}`, `--tls-private-key-file=${at("server.key")}`, `--client-ca-file=${at("ca.crt")}`, `--cert-dir=${at("made")}`,
      "--service-account-issuer=https://kubernetes.default.svc", `--service-account-key-file=${at("sa.pub")}`, `--service-account-signing-key-file=${at("sa.key")}`,
      "--authorization-mode=RBAC", `--token-auth-file=${at("tokens.csv")}`, "--disable-admission-plugins=ServiceAccount", "--service-cluster-ip-range=10.0.0.0/24",
      "--shutdown-delay-duration=0s", "--v=0",
    ]);
    this.#api = api;
    await eventually(async () => {
      if (!api.running) throw new Error(`kube-apiserver ended: ${api.stderr.slice(-3000)}`);
      return (await this.call("GET", "/readyz").catch(() => null))?.status === 200;
    }, "the API server is ready", LIMIT_MS);
  }

  /** Ends the API server as a crash does. etcd keeps what it had. */
  async killApi(): Promise<void> {
    this.#api!.signal("SIGKILL");
    await this.#api!.exit();
  }

  /** Forgets all earlier versions: a watch that goes on from one of them is refused. */
  async compact(): Promise<void> {
    const ask = async (path: string, body: object) => (await fetch(`${this.#etcdUrl}/v3/kv/${path}`, { method: "POST", body: JSON.stringify(body) })).json() as Promise<any>;
    // A version that nobody has seen, so that the last one seen is too old.
    const { header } = await ask("put", { key: btoa("compacted"), value: btoa("x") });
    await ask("compaction", { revision: header.revision, physical: true });
  }

  /** A request of the administrator. */
  async call(method: string, path: string, body?: unknown, contentType = "application/json", token: string = ADMIN): Promise<Reply> {
    const response = await fetch(`${this.server}${path}`, {
      method,
      headers: { authorization: `Bearer ${token}`, ...(body !== undefined && { "content-type": contentType }) },
      ...(body !== undefined && { body: JSON.stringify(body) }),
      tls: { ca: readFileSync(join(this.home, "ca.crt"), "utf8") },
      signal: AbortSignal.timeout(10_000),
    });
    const text = await response.text();
    let parsed: unknown = text;
    try {
      parsed = JSON.parse(text);
    } catch {
      // Health routes answer in plain text.
    }
    return { status: response.status, body: parsed };
  }

  async must(method: string, path: string, body?: unknown, contentType?: string): Promise<any> {
    const reply = await this.call(method, path, body, contentType);
    if (reply.status >= 300) throw new Error(`${method} ${path}: ${reply.status} ${JSON.stringify(reply.body)}`);
    return reply.body;
  }

  async #furnish(): Promise<void> {
    await this.must("POST", "/api/v1/namespaces", { metadata: { name: this.namespace } });
    await this.must("POST", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", RESOURCE);
    await eventually(async () => (await this.call("GET", this.objects)).status === 200, "the resource is served", LIMIT_MS);
    const rbac = `/apis/rbac.authorization.k8s.io/v1/namespaces/${this.namespace}`;
    await this.must("POST", `${rbac}/roles`, { metadata: { name: "dynamo" }, rules: RULES });
    await this.must("POST", `${rbac}/roles`, { metadata: { name: "reader" }, rules: RULES.map((rule) => ({ ...rule, verbs: ["get", "list", "watch"] })) });
    const bind = (role: string, subjects: object[]) =>
      this.must("POST", `${rbac}/rolebindings`, { metadata: { name: role }, roleRef: { apiGroup: "rbac.authorization.k8s.io", kind: "Role", name: role }, subjects });
    const account = (name: string) => ({ kind: "ServiceAccount", name, namespace: this.namespace });
    await bind("dynamo", [account("worker"), account("worker-next"), { apiGroup: "rbac.authorization.k8s.io", kind: "User", name: "worker-by-certificate" }]);
    await bind("reader", [account("reader")]);
    for (const name of ["worker", "worker-next", "reader", "nobody"]) await this.must("POST", `/api/v1/namespaces/${this.namespace}/serviceaccounts`, { metadata: { name } });
    // The authorizer sees new bindings a moment later.
    const token = await this.token("worker");
    await eventually(async () => (await this.call("GET", this.objects, undefined, undefined, token)).status === 200, "the role is in force", LIMIT_MS);
  }

  /** Path of the collection of records. */
  get objects(): string {
    return `/apis/nvidia.com/v1alpha1/namespaces/${this.namespace}/dynamoworkermetadatas`;
  }

  /** The record of a process; null when there is none. */
  async object(name: string): Promise<any> {
    const { status, body } = await this.call("GET", `${this.objects}/${name}`);
    return status === 404 ? null : body;
  }

  /** A token of a service account, as the kubelet asks for it. */
  async token(account: string): Promise<string> {
    const reply = await this.must("POST", `/api/v1/namespaces/${this.namespace}/serviceaccounts/${account}/token`, { apiVersion: "authentication.k8s.io/v1", kind: "TokenRequest", spec: { expirationSeconds: 3600 } });
    return reply.status.token;
  }

  /** A file that holds a token, and a kubeconfig that names the file. */
  async kubeconfig(name: string, token: string, ca = "ca.crt"): Promise<{ path: string; tokenFile: string }> {
    const tokenFile = join(this.home, `${name}.token`);
    writeFileSync(tokenFile, token);
    return { path: this.writeKubeconfig(name, { tokenFile }, ca), tokenFile };
  }

  writeKubeconfig(name: string, user: Record<string, unknown>, ca = "ca.crt"): string {
    const path = join(this.home, `${name}.kubeconfig`);
    const config = {
      apiVersion: "v1",
      kind: "Config",
      clusters: [{ name: "c", cluster: { server: this.server, "certificate-authority-data": readFileSync(join(this.home, ca)).toString("base64") } }],
      users: [{ name: "u", user }],
      contexts: [{ name: "x", context: { cluster: "c", user: "u", namespace: this.namespace } }],
      "current-context": "x",
    };
    writeFileSync(path, JSON.stringify(config));
    return path;
  }

  /** A pod that takes part in discovery, not ready yet. @returns its uid */
  async pod(name: string, containers: readonly string[] = ["main"]): Promise<string> {
    const labels = { "nvidia.com/dynamo-discovery-enabled": "true", "nvidia.com/dynamo-discovery-backend": "kubernetes" };
    const spec = { containers: containers.map((container) => ({ name: container, image: "layerscale" })) };
    const pod = await this.must("POST", `/api/v1/namespaces/${this.namespace}/pods`, { metadata: { name, labels }, spec });
    await this.must("POST", `/apis/discovery.k8s.io/v1/namespaces/${this.namespace}/endpointslices`, {
      metadata: { name: `slice-${name}`, labels: { ...labels, "kubernetes.io/service-name": "workers" } },
      addressType: "IPv4",
      endpoints: [{ addresses: ["10.1.0.5"], conditions: { ready: false }, targetRef: { kind: "Pod", name, namespace: this.namespace, uid: pod.metadata.uid } }],
      ports: [{ name: "system", port: 9090, protocol: "TCP" }],
    });
    return pod.metadata.uid;
  }

  /** What the endpoint controller does when a pod's readiness changes. */
  async ready(name: string, ready: boolean): Promise<void> {
    const path = `/apis/discovery.k8s.io/v1/namespaces/${this.namespace}/endpointslices/slice-${name}`;
    const slice = await this.must("GET", path);
    slice.endpoints[0].conditions.ready = ready;
    await this.must("PUT", path, slice);
  }

  /** What the kubelet does when a container's readiness changes. */
  async containersReady(name: string, ready: Readonly<Record<string, boolean>>): Promise<void> {
    const statuses = Object.entries(ready).map(([container, value]) => ({ name: container, ready: value, image: "layerscale", imageID: "", restartCount: 0 }));
    await this.must("PATCH", `/api/v1/namespaces/${this.namespace}/pods/${name}/status`, { status: { containerStatuses: statuses } }, "application/merge-patch+json");
  }

  /** The end of a pod without a kubelet: at once. */
  async deletePod(name: string): Promise<void> {
    await this.must("DELETE", `/apis/discovery.k8s.io/v1/namespaces/${this.namespace}/endpointslices/slice-${name}`);
    await this.must("DELETE", `/api/v1/namespaces/${this.namespace}/pods/${name}`, { gracePeriodSeconds: 0 });
  }

  async [Symbol.asyncDispose](): Promise<void> {
    // Nothing needs a tidy end: all of it is thrown away.
    for (const process of [this.#api, this.#etcd]) process?.signal("SIGKILL");
    for (const process of [this.#api, this.#etcd]) await process?.exit();
    rmSync(this.home, { recursive: true, force: true });
  }
}
