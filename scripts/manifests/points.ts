/** What every graph of deploy/ must hold: one point per sentence of the deployment contract, each with the message for whoever broke it. */
import { dynamoConfig } from "../../src/cli/dynamo.ts";
import { at, type Component, textsAt, type Tree, treesAt } from "./documents.ts";

/** The Dynamo release that the worker speaks. */
export const DYNAMO = "1.5.0";
export const LOADER = "/app/layerscale-loader";

/** One graph as the lint sees it. */
export interface Graph {
  file: string;
  tree: Tree;
  components: Component[];
  /** Roles of its workers. */
  roles: readonly string[];
  /** Of the model: a Hugging Face repo id instead of a directory. */
  hub: boolean;
}

export interface Point {
  id: string;
  /** @returns what is wrong, one message at most per component; empty when the point holds */
  check(graph: Graph): string[];
}

const shown = (value: unknown) => (value === undefined ? "nothing" : JSON.stringify(value));
const point = (id: string, check: Point["check"]): Point => ({ id, check });
/** A point about each worker. */
const worker = (id: string, check: (component: Component, graph: Graph) => string | null): Point =>
  point(id, (graph) => graph.components.filter((component) => component.worker).flatMap((component) => {
    const message = check(component, graph);
    return message === null ? [] : [`${component.name}: ${message}`];
  }));
/** A point about the whole graph. */
const whole = (id: string, check: (graph: Graph) => string | null): Point => point(id, (graph) => [check(graph)].filter((message) => message !== null));
const secret = (entry: Tree | undefined, name: string, key: string) => at(entry, "valueFrom", "secretKeyRef", "name") === name && at(entry, "valueFrom", "secretKeyRef", "key") === key && entry?.value === undefined;

/** Variables that a worker's container may set in a manifest. Others are misspelt, or the operator's to set. */
const KNOWN_VARIABLES = /^(LAYERSCALE_LICENSE_KEY|LAYERSCALE_KV_KEY|LAYERSCALE_CPU_ISA|POD_IP|HF_TOKEN|HF_ENDPOINT|HF_HUB_OFFLINE|HTTPS?_PROXY|NO_PROXY|TMPDIR|DYN_LOG|DYN_TOOL_CALL_PARSER|DYN_REASONING_PARSER|DYN_ENDPOINT_TYPES|DYN_CUSTOM_JINJA_TEMPLATE|DYN_EXCLUDE_TOOLS_WHEN_TOOL_CHOICE_NONE|DYN_ENABLE_RL|DYN_HEALTH_CHECK_ENABLED|DYN_CANARY_WAIT_TIME|DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS|DYN_ENGINE_REQUEST_LIMIT|DYN_STABLE_ROUTING_ID)$/;

/** Where frontend and workers meet. */
const OPERATORS_VARIABLES = /^(DYN_DISCOVERY_BACKEND|DYN_NAMESPACE\w*|DYN_COMPONENT|DYN_ENDPOINT|DYN_SYSTEM_PORT|DYN_REQUEST_PLANE|DYN_EVENT_PLANE|DYN_KUBE_\w+|DYN_FILE_KV|ETCD_\w+|NATS_\w+|POD_(NAME|NAMESPACE|UID))$/;

const LICENSE = { id: "lint", tier: "lint", maxSessions: null, maxCtx: null, issued: "2026-01-01", expires: null };

/** Why the worker itself would refuse these arguments and variables; null when it takes them. */
function refusal(args: readonly string[], env: Record<string, string>): string | null {
  try {
    dynamoConfig(args, env, LICENSE, "LSK-lint");
    return null;
  } catch (error) {
    return (error as Error).message;
  }
}

export const POINTS: readonly Point[] = [
  whole("api-version", ({ tree }) => (tree.apiVersion === "nvidia.com/v1beta1" && tree.kind === "DynamoGraphDeployment" ? null : `expected kind DynamoGraphDeployment of nvidia.com/v1beta1, got ${shown(tree.kind)} of ${shown(tree.apiVersion)}`)),
  whole("no-backend-framework", ({ tree }) => (/"backendFramework"/i.test(JSON.stringify(tree)) ? "backendFramework must not be set: the operator then changes the command for an engine that this is not" : null)),
  whole("graph-name", ({ tree, file }) => {
    const expected = `layerscale-${file.replace(/(-hub)?\.yaml$/, "")}`;
    return at(tree, "metadata", "name") === expected ? null : `metadata.name: expected ${expected}, which with the component frontend names the service ${expected}-frontend; got ${shown(at(tree, "metadata", "name"))}`;
  }),
  whole("components", ({ components, roles }) => {
    const found = components.map(({ name, type }) => `${name}/${type}`).sort().join(", ");
    const expected = ["frontend", ...roles].map((role) => `${role}/${role}`).sort().join(", ");
    return found === expected ? null : `spec.components (name/type): expected ${expected}; got ${found || "none"}`;
  }),
  point("replicas", ({ components }) => components.filter(({ tree }) => !Number.isInteger(tree.replicas) || (tree.replicas as number) < 0).map(({ name, tree }) => `${name}: replicas: expected a count, got ${shown(tree.replicas)}`)),
  point("container-main", ({ components }) =>
    components.filter(({ containers }) => containers.filter(({ name }) => name === "main").length !== 1).map(({ name, containers }) => `${name}: expected one container named main, got ${containers.map((container) => shown(container.name)).join(", ") || "none"}`),
  ),
  point("labels", ({ components, tree }) =>
    components
      .filter(({ labels, name }) => at(labels, "app.kubernetes.io/part-of") !== at(tree, "metadata", "name") || at(labels, "app.kubernetes.io/component") !== name)
      .map(({ name, labels }) => `${name}: pod labels: expected app.kubernetes.io/part-of with the graph's and app.kubernetes.io/component with the component's name, which network-policy.yaml and pod-monitor.yaml select; got ${shown(labels)}`),
  ),
  whole("frontend-image", ({ components }) => {
    const image = components.find(({ worker: is }) => !is)?.main.image;
    return typeof image === "string" && new RegExp(`/dynamo-frontend:${DYNAMO.replaceAll(".", "\\.")}(-|@|$)`).test(image) ? null : `frontend: image: expected a dynamo-frontend of release ${DYNAMO}, got ${shown(image)}`;
  }),
  whole("kv-router", ({ components }) => {
    const frontend = components.find(({ worker: is }) => !is);
    const args = frontend?.args ?? [];
    const mode = args.includes("--router-mode") ? frontend?.argument("--router-mode") : frontend?.env("DYN_ROUTER_MODE")?.value;
    return mode === "kv" ? null : `frontend: DYN_ROUTER_MODE: expected kv, got ${shown(mode)}`;
  }),
  worker("runtime-version", ({ tree }) => (tree.runtimeVersionOverride === DYNAMO ? null : `runtimeVersionOverride: expected the text "${DYNAMO}", got ${shown(tree.runtimeVersionOverride)}; the operator cannot read the release from this image's tag`)),
  worker("image", ({ main }) => (typeof main.image === "string" && /(^|\/)layerscale(:[\w.-]+|@sha256:[0-9a-f]{64})$/.test(main.image) ? null : `image: expected an image named layerscale with a tag or digest, got ${shown(main.image)}`)),
  worker("command", ({ main }) => (JSON.stringify(main.command) === JSON.stringify([LOADER]) ? null : `command: expected [${LOADER}], got ${shown(main.command)}; without one the operator starts a shell`)),
  worker("args", ({ args, main }) => {
    if (args[0] !== "dynamo") return `args: expected dynamo first, which selects the worker, got ${shown(args[0])}`;
    const texts = treesAt(main, "env").filter(({ value }) => typeof value === "string");
    const why = refusal(args.slice(1), Object.fromEntries(texts.map(({ name, value }) => [String(name), value as string])));
    return why === null ? null : `args: the worker refuses them: ${why}`;
  }),
  worker("operators-flags", (component) => {
    const set = ["--namespace", "--component", "--endpoint"].filter((flag) => component.argument(flag) !== undefined);
    return set.length === 0 ? null : `args: ${set.join(", ")}: the operator's to set; the frontend would look for the worker elsewhere`;
  }),
  worker("served-name", (component, { components }) => {
    const name = component.argument("--served-model-name");
    const others = new Set(components.filter(({ worker: is }) => is).map((other) => other.argument("--served-model-name")));
    return name !== undefined && others.size === 1 ? null : `--served-model-name: expected one name for all workers, got ${[...others].map(shown).join(" and ")}`;
  }),
  worker("role", (component) => {
    const expected = component.type === "worker" ? undefined : component.type;
    const mode = component.argument("--disaggregation-mode");
    return mode === expected ? null : `--disaggregation-mode: expected ${expected ?? "none, an aggregated worker needs no role"}, got ${shown(mode)}`;
  }),
  worker("license", (component) => {
    if (component.argument("--license-key") !== undefined) return "args: --license-key: expected the key in the Secret layerscale-license alone";
    const entry = component.env("LAYERSCALE_LICENSE_KEY");
    return secret(entry, "layerscale-license", "license-key") && at(entry, "valueFrom", "secretKeyRef", "optional") !== true ? null : `LAYERSCALE_LICENSE_KEY: expected key license-key of the Secret layerscale-license, not optional, got ${shown(entry)}`;
  }),
  worker("model-cache", (component, { hub }) => {
    const expected = hub ? "/root/.cache/huggingface" : "/models";
    const mount = component.mountOf("model-cache");
    if (mount?.path !== expected) return `expected all of the claim model-cache to be mounted at ${expected}, got ${shown(mount?.path)}`;
    return hub && !mount.writable ? `expected the claim model-cache to be writable: it keeps the download` : null;
  }),
  worker("model", (component, { hub }) => {
    const model = component.argument("--model") ?? "";
    if (hub) return /^[\w.-]+\/[\w.-]+(@[\w.-]+)?$/.test(model) ? null : `--model: expected a repo id OWNER/NAME[@REVISION], got "${model}"`;
    return /^\/models\/[^\s]+$/.test(model) && !model.includes("..") ? null : `--model: expected a path below /models, where the claim is mounted, got "${model}"`;
  }),
  worker("hub-token", (component, { hub }) => {
    const entry = component.env("HF_TOKEN");
    if (!hub) return entry === undefined ? null : "HF_TOKEN: a directory needs no token";
    return secret(entry, "hf-token", "token") ? null : `HF_TOKEN: expected key token of the Secret hf-token, got ${shown(entry)}`;
  }),
  worker("pod-ip", (component) => {
    const path = at(component.env("POD_IP"), "valueFrom", "fieldRef", "fieldPath");
    return (path === "status.podIP" && component.env("POD_IP")?.value === undefined) || (component.type !== "prefill" && component.env("POD_IP") === undefined) ? null : `POD_IP: expected fieldRef status.podIP, the address that decode workers pull KV from, got ${shown(component.env("POD_IP"))}`;
  }),
  worker("gpu-limit", (component) => {
    const limit = at(component.main, "resources", "limits", "nvidia.com/gpu");
    const wanted = component.argument("--tp");
    if (wanted !== undefined && Number(wanted) > Number(limit)) return `--tp ${wanted}: the limit nvidia.com/gpu gives the worker only ${shown(limit)}`;
    return /^[1-9]\d*$/.test(String(limit)) ? null : `resources.limits: expected nvidia.com/gpu with the number of GPUs that the worker sees, got ${shown(limit)}`;
  }),
  worker("one-node", ({ tree }) => (tree.multinode === undefined ? null : "multinode: one worker is one pod, tensor parallelism stays within it")),
  worker("grace", ({ tree }) => {
    const seconds = at(tree, "podTemplate", "spec", "terminationGracePeriodSeconds");
    return Number.isInteger(seconds) && (seconds as number) >= 30 ? null : `terminationGracePeriodSeconds: expected 30 or more: the worker leaves discovery, waits out 5 s and frees its GPUs; got ${shown(seconds)}`;
  }),
  point("variables-once", ({ components }) => components.filter(({ variables }) => new Set(variables).size < variables.length).map(({ name, variables }) => `${name}: env: expected each variable once, got ${variables.join(", ")}`)),
  whole("operators-variables", ({ tree, components }) => {
    const frontend = components.filter(({ worker: is }) => !is).flatMap(({ variables }) => variables);
    const shared = treesAt(tree, "spec", "env").map(({ name }) => String(name));
    const found = [...new Set([...frontend, ...shared])].filter((name) => OPERATORS_VARIABLES.test(name));
    return found.length === 0 ? null : `env: ${found.join(", ")}: the operator's to set, alike for frontend and workers`;
  }),
  worker("variables", ({ main, variables }) => {
    if (main.envFrom !== undefined) return "envFrom: expected each variable by its name, in env";
    const unknown = variables.filter((name) => !KNOWN_VARIABLES.test(name));
    return unknown.length === 0 ? null : `env: ${unknown.join(", ")}: not a variable to set here (misspelt, or the operator's to set)`;
  }),
  whole("same-model", ({ components }) => {
    for (const flag of ["--model", "--tp", "--kv-cache-dtype"]) {
      const values = new Set(components.filter(({ worker: is }) => is).map((component) => component.argument(flag)));
      if (values.size > 1) return `${flag}: expected the same on all workers, got ${[...values].map(shown).join(" and ")}`;
    }
    return null;
  }),
  worker("no-shell", ({ main }) => (textsAt(main, "args").some((word) => /[$`;&|]/.test(word)) ? "args: there is no shell that would read $, `, ;, & or |" : null)),
];
