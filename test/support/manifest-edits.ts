/** Edits of the graphs in deploy/, each of a kind whose verdict is known beforehand. */
import { Component, type Tree, treesAt } from "../../scripts/manifests/documents.ts";
import type { Random } from "./random.ts";

export interface Edit {
  kind: string;
  /** What must happen: nothing, a finding of this point of the lint, or a refusal by the API server. */
  breaks: null | { point: string } | "schema";
  /** Graphs that the kind applies to; without it all of them. */
  only?: (file: string) => boolean;
  apply(tree: any, random: Random): void;
}

const components = (tree: any) => treesAt(tree, "spec", "components").map((item) => new Component(item));
const workers = (tree: any) => components(tree).filter(({ worker }) => worker);
const frontend = (tree: any): any => components(tree).find(({ worker }) => !worker)!;
const anyWorker = (tree: any, random: Random): any => random.pick(workers(tree));
const pod = (component: any): any => component.tree.podTemplate.spec;
const env = (component: any, name: string): any => component.env(name);
/** One character less, doubled or swapped with its neighbour: never the same text. */
export function misspelt(text: string, random: Random): string {
  const at = 1 + random.below(text.length - 1);
  const swapped = text.slice(0, at - 1) + text[at] + text[at - 1] + text.slice(at + 1);
  return random.pick([text.slice(0, at) + text.slice(at + 1), text.slice(0, at) + text[at] + text.slice(at), ...(swapped === text ? [] : [swapped])]);
}
function renamed(tree: any, key: string, to: string): void {
  tree[to] = tree[key];
  delete tree[key];
}
const replaceArgument = (component: any, flag: string, value: string) => (component.main.args[component.args.indexOf(flag) + 1] = value);
const disagg = (file: string) => file.startsWith("disagg");
const hub = (file: string) => file.endsWith("-hub.yaml");
const local = (file: string) => !hub(file);

const breaking = (point: string, kind: string, apply: Edit["apply"], only?: Edit["only"]): Edit => ({ kind, breaks: { point }, apply, ...(only && { only }) });
const unknown = (kind: string, apply: Edit["apply"], only?: Edit["only"]): Edit => ({ kind, breaks: "schema", apply, ...(only && { only }) });
const harmless = (kind: string, apply: Edit["apply"], only?: Edit["only"]): Edit => ({ kind, breaks: null, apply, ...(only && { only }) });

export const BREAKING: readonly Edit[] = [
  breaking("api-version", "the older version", (tree) => (tree.apiVersion = "nvidia.com/v1alpha1")),
  breaking("api-version", "another kind", (tree) => (tree.kind = "DynamoComponentDeployment")),
  breaking("no-backend-framework", "a framework", (tree, random) => (tree.spec.backendFramework = random.pick(["vllm", "sglang", "trtllm"]))),
  breaking("graph-name", "another graph name", (tree, random) => (tree.metadata.name = misspelt(tree.metadata.name, random))),
  breaking("components", "a component less", (tree, random) => tree.spec.components.splice(random.below(tree.spec.components.length), 1)),
  breaking("components", "a component renamed", (tree, random) => (random.pick<any>(tree.spec.components).name += "-x")),
  breaking("components", "a role changed", (tree, random) => (anyWorker(tree, random).tree.type = "planner")),
  breaking("replicas", "no replicas", (tree, random) => delete random.pick<any>(tree.spec.components).replicas),
  breaking("replicas", "replicas as text", (tree, random) => (random.pick<any>(tree.spec.components).replicas = "1")),
  breaking("container-main", "another container name", (tree, random) => (random.pick(components(tree)).main.name = "worker")),
  breaking("labels", "a label less", (tree, random) => delete (random.pick(components(tree)).labels as Tree)[random.pick(["app.kubernetes.io/part-of", "app.kubernetes.io/component"])]),
  breaking("frontend-image", "a frontend of another release", (tree, random) => (frontend(tree).main.image = `nvcr.io/nvidia/ai-dynamo/dynamo-frontend:${random.pick(["1.4.0", "1.5.01", "latest"])}`)),
  breaking("kv-router", "another router", (tree, random) => (env(frontend(tree), "DYN_ROUTER_MODE").value = random.pick(["round-robin", "random", "KV-aware"]))),
  breaking("kv-router", "the router's variable misspelt", (tree, random) => (env(frontend(tree), "DYN_ROUTER_MODE").name = misspelt("DYN_ROUTER_MODE", random))),
  breaking("runtime-version", "no runtime version", (tree, random) => delete anyWorker(tree, random).tree.runtimeVersionOverride),
  breaking("runtime-version", "another runtime version", (tree, random) => (anyWorker(tree, random).tree.runtimeVersionOverride = random.pick(["1.4.0", "1.5.1", "0.1.0"]))),
  breaking("runtime-version", "a runtime version of another form", (tree, random) => (anyWorker(tree, random).tree.runtimeVersionOverride = random.pick<unknown>([1.5, "v1.5.0", "1.5"]))),
  breaking("image", "no worker image", (tree, random) => delete anyWorker(tree, random).main.image),
  breaking("image", "an engine image of somebody else", (tree, random) => (anyWorker(tree, random).main.image = "nvcr.io/nvidia/ai-dynamo/vllm-runtime:1.5.0")),
  breaking("command", "no command", (tree, random) => delete anyWorker(tree, random).main.command),
  breaking("command", "the command misspelt", (tree, random) => (anyWorker(tree, random).main.command = [misspelt("/app/layerscale-loader", random)])),
  breaking("command", "a shell", (tree, random) => (anyWorker(tree, random).main.command = ["/bin/sh", "-c"])),
  breaking("args", "dynamo left out", (tree, random) => anyWorker(tree, random).main.args.shift()),
  breaking("args", "dynamo not first", (tree, random) => anyWorker(tree, random).main.args.unshift("serve")),
  breaking("args", "a flag misspelt", (tree, random) => {
    const component = anyWorker(tree, random);
    const index = random.pick([...component.args.keys()].filter((at) => component.args[at].startsWith("--")));
    component.main.args[index] = `--${misspelt(component.args[index].slice(2), random)}`;
  }),
  breaking("args", "a flag with a bad value", (tree, random) => anyWorker(tree, random).main.args.push("--ctx", random.pick(["many", "0", "-1"]))),
  breaking("served-name", "no served name", (tree, random) => {
    const component = anyWorker(tree, random);
    component.main.args.splice(component.args.indexOf("--served-model-name"), 2);
  }),
  breaking("served-name", "two served names", (tree, random) => replaceArgument(anyWorker(tree, random), "--served-model-name", "other"), disagg),
  breaking("role", "a mode that is not the type's", (tree, random) => {
    const component = anyWorker(tree, random);
    replaceArgument(component, "--disaggregation-mode", component.type === "prefill" ? "decode" : "prefill");
  }, disagg),
  breaking("role", "a mode on an aggregated worker", (tree, random) => anyWorker(tree, random).main.args.push("--disaggregation-mode", "prefill"), (file) => !disagg(file)),
  breaking("license", "another Secret", (tree, random) => (env(anyWorker(tree, random), "LAYERSCALE_LICENSE_KEY").valueFrom.secretKeyRef.name = misspelt("layerscale-license", random))),
  breaking("license", "another key of the Secret", (tree, random) => (env(anyWorker(tree, random), "LAYERSCALE_LICENSE_KEY").valueFrom.secretKeyRef.key = misspelt("license-key", random))),
  breaking("license", "the variable misspelt", (tree, random) => (env(anyWorker(tree, random), "LAYERSCALE_LICENSE_KEY").name = misspelt("LAYERSCALE_LICENSE_KEY", random))),
  breaking("license", "the key in clear", (tree, random) => {
    const entry = env(anyWorker(tree, random), "LAYERSCALE_LICENSE_KEY");
    delete entry.valueFrom;
    entry.value = "LSK-x.y";
  }),
  breaking("model-cache", "another claim", (tree, random) => (pod(anyWorker(tree, random)).volumes[0].persistentVolumeClaim.claimName = misspelt("model-cache", random))),
  breaking("model-cache", "another place", (tree, random) => {
    const [mount] = anyWorker(tree, random).main.volumeMounts;
    mount.mountPath = misspelt(mount.mountPath, random);
  }),
  breaking("model-cache", "not mounted", (tree, random) => (anyWorker(tree, random).main.volumeMounts = [])),
  breaking("model", "a model elsewhere", (tree) => workers(tree).forEach((component) => replaceArgument(component, "--model", "/model/Qwen3-8B")), local),
  breaking("model", "a path instead of a repo id", (tree) => workers(tree).forEach((component) => replaceArgument(component, "--model", "/models/Qwen3-8B")), hub),
  breaking("hub-token", "another Secret for the hub", (tree, random) => (env(anyWorker(tree, random), "HF_TOKEN").valueFrom.secretKeyRef.name = misspelt("hf-token", random)), hub),
  breaking("hub-token", "no token", (tree, random) => {
    const component = anyWorker(tree, random);
    component.main.env = component.main.env.filter((entry: any) => entry.name !== "HF_TOKEN");
  }, hub),
  breaking("pod-ip", "no POD_IP", (tree) => {
    const component: any = workers(tree).find(({ type }) => type === "prefill");
    component.main.env = component.main.env.filter((entry: any) => entry.name !== "POD_IP");
  }, disagg),
  breaking("pod-ip", "the address of the node", (tree) => (env(workers(tree).find(({ type }) => type === "prefill"), "POD_IP").valueFrom.fieldRef.fieldPath = "status.hostIP"), disagg),
  breaking("gpu-limit", "no GPU", (tree, random) => delete anyWorker(tree, random).main.resources.limits["nvidia.com/gpu"]),
  breaking("gpu-limit", "zero GPUs", (tree, random) => (anyWorker(tree, random).main.resources.limits["nvidia.com/gpu"] = "0")),
  breaking("gpu-limit", "the resource misspelt", (tree, random) => renamed(anyWorker(tree, random).main.resources.limits, "nvidia.com/gpu", "nvidia.com/gpus")),
  breaking("one-node", "several nodes", (tree, random) => (anyWorker(tree, random).tree.multinode = { nodeCount: 2 })),
  breaking("grace", "no grace period", (tree, random) => delete pod(anyWorker(tree, random)).terminationGracePeriodSeconds),
  breaking("grace", "Docker's ten seconds", (tree, random) => (pod(anyWorker(tree, random)).terminationGracePeriodSeconds = 10)),
  breaking("variables", "a variable misspelt", (tree, random) => anyWorker(tree, random).main.env.push({ name: random.pick(["DYN_LOGG", "DYN_TOOLCALL_PARSER", "LAYERSCALE_PORTS"]), value: "1" })),
  breaking("same-model", "another cache precision", (tree, random) => anyWorker(tree, random).main.args.push("--kv-cache-dtype", "bf16"), disagg),
  breaking("same-model", "another model behind the first on one worker", (tree, random) => anyWorker(tree, random).main.args.push("--model=/models/other"), (file) => file === "disagg.yaml"),
  breaking("model", "another model behind the first", (tree, random) => anyWorker(tree, random).main.args.push("--model", "/elsewhere/x"), local),
  breaking("role", "a mode behind the first, in one word", (tree, random) => {
    const component = anyWorker(tree, random);
    component.main.args.push(`--disaggregation-mode=${component.type === "decode" ? "prefill" : "decode"}`);
  }),
  breaking("args", "a variable with a bad value", (tree, random) => anyWorker(tree, random).main.env.push({ name: "DYN_ENABLE_RL", value: "perhaps" })),
  breaking("operators-flags", "a namespace of its own", (tree, random) => anyWorker(tree, random).main.args.push(random.pick(["--namespace=other", "--component=other", "--endpoint=other"]))),
  breaking("operators-variables", "discovery of its own for one side", (tree, random) => frontend(tree).main.env.push({ name: random.pick(["DYN_DISCOVERY_BACKEND", "DYN_NAMESPACE", "ETCD_ENDPOINTS"]), value: "file" })),
  breaking("operators-variables", "discovery of its own for all", (tree) => (tree.spec.env = [{ name: "DYN_DISCOVERY_BACKEND", value: "etcd" }])),
  breaking("variables-once", "a variable twice", (tree, random) => {
    const { main } = random.pick<any>(components(tree));
    main.env.push({ name: main.env[0].name, value: "x" });
  }),
  breaking("variables", "variables of a map", (tree, random) => (anyWorker(tree, random).main.envFrom = [{ configMapRef: { name: "x" } }])),
  breaking("license", "the key as an argument", (tree, random) => anyWorker(tree, random).main.args.push("--license-key", "LSK-x.y")),
  breaking("license", "an optional key", (tree, random) => (env(anyWorker(tree, random), "LAYERSCALE_LICENSE_KEY").valueFrom.secretKeyRef.optional = true)),
  breaking("pod-ip", "a fixed address beside the pod's", (tree) => (env(workers(tree).find(({ type }) => type === "prefill"), "POD_IP").value = "10.0.0.1"), disagg),
  breaking("model-cache", "a part of the claim", (tree, random) => (anyWorker(tree, random).main.volumeMounts[0].subPath = "part")),
  breaking("model-cache", "two volumes of one name", (tree, random) => pod(anyWorker(tree, random)).volumes.unshift({ name: "model-cache", emptyDir: {} })),
  breaking("model-cache", "a download that cannot be kept", (tree, random) => {
    const component = anyWorker(tree, random);
    random.pick<any>([component.main.volumeMounts[0], pod(component).volumes[0].persistentVolumeClaim]).readOnly = true;
  }, hub),
  breaking("gpu-limit", "more ranks than GPUs", (tree) => workers(tree).forEach((component: any) => component.main.args.push("--tp", "4"))),
  breaking("no-shell", "a variable in an argument", (tree) => workers(tree).forEach((component) => replaceArgument(component, "--model", "/models/$MODEL")), local),
];

export const UNKNOWN_FIELDS: readonly Edit[] = [
  unknown("names of another version", (tree, random) => renamed(random.pick<any>(tree.spec.components), "type", "componentType")),
  unknown("the pod template misspelt", (tree, random) => renamed(random.pick<any>(tree.spec.components), "podTemplate", "podTemplates")),
  unknown("a field of the component misspelt", (tree, random) => (random.pick<any>(tree.spec.components).sharedMemorysize = "1Gi")),
  unknown("a field of the container misspelt", (tree, random) => (random.pick(components(tree)).main.imagePullPolicyy = "Always")),
  unknown("mounts misspelt", (tree, random) => renamed(anyWorker(tree, random).main, "volumeMounts", "volumeMount")),
  unknown("a switch as text", (tree, random) => (anyWorker(tree, random).main.volumeMounts[0].readOnly = "true")),
  unknown("ports as text", (tree, random) => (random.pick(components(tree)).main.ports = "8000")),
  unknown("a type that does not exist", (tree, random) => (anyWorker(tree, random).tree.type = "wroker")),
  unknown("replicas below zero", (tree, random) => (random.pick<any>(tree.spec.components).replicas = -1)),
  unknown("a component twice", (tree, random) => tree.spec.components.push(structuredClone(random.pick(tree.spec.components)))),
];

export const HARMLESS: readonly Edit[] = [
  harmless("more replicas", (tree, random) => (random.pick<any>(tree.spec.components).replicas = 2 + random.below(8))),
  harmless("scaled to nothing", (tree, random) => (random.pick<any>(tree.spec.components).replicas = 0)),
  harmless("an image of one's own", (tree, random) => workers(tree).forEach((component) => (component.main.image = random.pick(["registry.example:5000/ml/layerscale:0.1.0", `ghcr.io/acme/layerscale@sha256:${"a".repeat(64)}`])))),
  harmless("more GPUs", (tree, random) => (anyWorker(tree, random).main.resources.limits["nvidia.com/gpu"] = String(2 ** random.below(4)))),
  harmless("a GPU count as number", (tree, random) => (anyWorker(tree, random).main.resources.limits["nvidia.com/gpu"] = 1)),
  harmless("annotations", (tree) => (tree.metadata.annotations = { "example.com/owner": "ml" })),
  harmless("a node selector and a toleration", (tree, random) => Object.assign(pod(anyWorker(tree, random)), { nodeSelector: { gpu: "h200" }, tolerations: [{ key: "nvidia.com/gpu", operator: "Exists", effect: "NoSchedule" }] })),
  harmless("engine options", (tree) => workers(tree).forEach((component: any) => component.main.args.push("--ctx", "8192", "--max-num-seqs", "64"))),
  harmless("a parser", (tree, random) => anyWorker(tree, random).main.env.push({ name: "DYN_TOOL_CALL_PARSER", value: "hermes" })),
  harmless("log level", (tree, random) => anyWorker(tree, random).main.env.push({ name: "DYN_LOG", value: "debug" })),
  harmless("a longer grace period", (tree, random) => (pod(anyWorker(tree, random)).terminationGracePeriodSeconds = 60 + random.below(600))),
  harmless("a startup probe", (tree, random) => (anyWorker(tree, random).main.startupProbe = { httpGet: { path: "/live", port: "system" }, periodSeconds: 10, failureThreshold: 30 })),
  harmless("another directory", (tree) => workers(tree).forEach((component) => replaceArgument(component, "--model", "/models/acme/Tiny-1")), local),
  harmless("a revision", (tree) => workers(tree).forEach((component) => replaceArgument(component, "--model", "Qwen/Qwen3-8B@main")), hub),
  harmless("another served name", (tree) => workers(tree).forEach((component) => replaceArgument(component, "--served-model-name", "acme/tiny"))),
  harmless("variables in another order", (tree, random) => anyWorker(tree, random).main.env.reverse()),
  harmless("components in another order", (tree) => tree.spec.components.reverse()),
  harmless("a sidecar", (tree, random) => pod(anyWorker(tree, random)).containers.push({ name: "log", image: "example.com/log:1" })),
  harmless("memory limits", (tree, random) => (anyWorker(tree, random).main.resources.limits.memory = "64Gi")),
  harmless("flags and values in one word", (tree) => workers(tree).forEach((component: any) => {
    const at = component.args.indexOf("--served-model-name");
    component.main.args.splice(at, 2, `--served-model-name=${component.args[at + 1]}`);
  })),
  harmless("the same precision on both workers", (tree) => workers(tree).forEach((component: any) => component.main.args.push("--kv-cache-dtype", "bf16"))),
];
