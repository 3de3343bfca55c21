/**
 * Definitions of the resources in deploy/ for a real API server: DynamoGraphDeployment, written from the fields that Dynamo 1.5 documents
 * for nvidia.com/v1beta1, and the part of Prometheus' PodMonitor that is used here. The pod template is Kubernetes' own schema, as the
 * server publishes it, so that every field of a container is checked as in a cluster.
 */
type Schema = Record<string, any>;

const QUANTITY = "io.k8s.apimachinery.pkg.api.resource.Quantity";
const INT_OR_STRING = "io.k8s.apimachinery.pkg.util.intstr.IntOrString";

/** Inlines the references of an OpenAPI v3 schema and drops what a resource definition may not hold. */
export function inlined(schemas: Readonly<Record<string, Schema>>, name: string): Schema {
  const visit = (schema: Schema): Schema => {
    const reference: string | undefined = schema.$ref ?? schema.allOf?.[0]?.$ref;
    if (reference !== undefined) {
      const target = reference.slice(reference.lastIndexOf("/") + 1);
      if (target === QUANTITY || target === INT_OR_STRING) return { "x-kubernetes-int-or-string": true };
      return visit(schemas[target]!);
    }
    const out: Schema = {};
    for (const key of ["type", "format", "enum", "required"]) if (schema[key] !== undefined) out[key] = schema[key];
    if (schema.properties) out.properties = Object.fromEntries(Object.entries<Schema>(schema.properties).map(([key, value]) => [key, visit(value)]));
    if (schema.items) out.items = visit(schema.items);
    if (schema.additionalProperties) out.additionalProperties = visit(schema.additionalProperties);
    // Free-form objects of the API, such as managed fields.
    if (out.type === "object" && !out.properties && !out.additionalProperties) out["x-kubernetes-preserve-unknown-fields"] = true;
    return out;
  };
  return visit(schemas[name]!);
}

const free: Schema = { type: "object", "x-kubernetes-preserve-unknown-fields": true };
const texts: Schema = { type: "object", additionalProperties: { type: "string" } };
const NAME = "^[A-Za-z0-9]([-A-Za-z0-9]*[A-Za-z0-9])?$";
const RELEASE = "^(0|[1-9][0-9]{0,3})\\.(0|[1-9][0-9]{0,3})\\.(0|[1-9][0-9]{0,3})$";

function component(podTemplate: Schema): Schema {
  return {
    type: "object",
    required: ["name"],
    properties: {
      name: { type: "string", minLength: 1, maxLength: 63, pattern: NAME },
      type: { type: "string", enum: ["frontend", "worker", "prefill", "decode", "planner", "epp"] },
      runtimeVersionOverride: { type: "string", pattern: RELEASE },
      globalDynamoNamespace: { type: "boolean" },
      podTemplate,
      replicas: { type: "integer", format: "int32", minimum: 0 },
      minAvailable: { type: "integer", format: "int32", minimum: 1 },
      multinode: { type: "object", properties: { nodeCount: { type: "integer", format: "int32", minimum: 2 } } },
      sharedMemorySize: { "x-kubernetes-int-or-string": true },
      modelRef: { type: "object", required: ["name"], properties: { name: { type: "string" }, revision: { type: "string" } } },
      scalingAdapter: free,
      eppConfig: free,
      frontendSidecar: { type: "string" },
      compilationCache: { type: "object", required: ["pvcName"], properties: { pvcName: { type: "string", minLength: 1 }, mountPath: { type: "string" } } },
      topologyConstraint: free,
      experimental: free,
    },
    "x-kubernetes-validations": [{ rule: "!has(self.eppConfig) || (has(self.type) && self.type == 'epp')", message: "eppConfig may only be set when type is epp" }],
  };
}

function definition(group: string, version: string, names: { kind: string; plural: string; singular: string }, spec: Schema): Schema {
  const schema = { openAPIV3Schema: { type: "object", required: ["spec"], properties: { spec, status: free } } };
  return {
    apiVersion: "apiextensions.k8s.io/v1",
    kind: "CustomResourceDefinition",
    metadata: { name: `${names.plural}.${group}` },
    spec: { group, scope: "Namespaced", names: { ...names, listKind: `${names.kind}List` }, versions: [{ name: version, served: true, storage: true, schema }] },
  };
}

/** @param schemas components of the server's /openapi/v3/api/v1 */
export function graphDeployment(schemas: Readonly<Record<string, Schema>>): Schema {
  return definition("nvidia.com", "v1beta1", { kind: "DynamoGraphDeployment", plural: "dynamographdeployments", singular: "dynamographdeployment" }, {
    type: "object",
    properties: {
      annotations: texts,
      labels: texts,
      priorityClassName: { type: "string" },
      components: { type: "array", maxItems: 25, items: component(inlined(schemas, "io.k8s.api.core.v1.PodTemplateSpec")), "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"] },
      env: { type: "array", items: inlined(schemas, "io.k8s.api.core.v1.EnvVar") },
      backendFramework: { type: "string", enum: ["sglang", "vllm", "trtllm"] },
      restart: free,
      topologyConstraint: free,
      experimental: free,
    },
  });
}

export function podMonitor(): Schema {
  const selector: Schema = {
    type: "object",
    properties: {
      matchLabels: texts,
      matchExpressions: { type: "array", items: { type: "object", required: ["key", "operator"], properties: { key: { type: "string" }, operator: { type: "string" }, values: { type: "array", items: { type: "string" } } } } },
    },
  };
  return definition("monitoring.coreos.com", "v1", { kind: "PodMonitor", plural: "podmonitors", singular: "podmonitor" }, {
    type: "object",
    required: ["selector"],
    properties: {
      selector,
      namespaceSelector: free,
      jobLabel: { type: "string" },
      podMetricsEndpoints: { type: "array", items: { type: "object", properties: { port: { type: "string" }, path: { type: "string" }, interval: { type: "string", pattern: "^\\d+(s|m|h)$" }, scrapeTimeout: { type: "string" }, honorLabels: { type: "boolean" } } } },
    },
  });
}
