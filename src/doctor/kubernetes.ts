import type { DynamoEnvironment } from "../config/engine-config.ts";
import { type ApiAccess, inferAccess } from "../dynamo/discovery/kubernetes/access.ts";
import { refusal, unreachable } from "../dynamo/discovery/kubernetes/errors.ts";
import { type Identity, podIdentity } from "../dynamo/discovery/kubernetes/identity.ts";
import { clockCheck, type Reading, readingOf, SERVER } from "./clock.ts";
import { fail, type Findings } from "./findings.ts";

const ASK_MS = 5_000;
const GROUP_VERSION = "/apis/nvidia.com/v1alpha1";
const RESOURCE = "dynamoworkermetadatas";
const VERBS = ["get", "list", "watch", "create", "patch", "delete"];

interface Answer {
  body: Record<string, unknown>;
  reading: Reading | null;
}

/**
 * Identity of the pod, the API server, the resource, and each right that discovery needs. Writes nothing: the object of this pod's name may be
 * that of a worker that runs.
 */
export async function kubernetesChecks(findings: Findings, environment: DynamoEnvironment): Promise<void> {
  let asked: { access: ApiAccess; identity: Identity; reading: Reading | null } | null = null;
  const reached = await findings.check("discovery", async () => {
    const identity = podIdentity(environment);
    const access = inferAccess(environment);
    const { body, reading } = await ask(access, "GET", GROUP_VERSION);
    const resources = Array.isArray(body.resources) ? (body.resources as { name?: unknown }[]) : [];
    if (!resources.some(({ name }) => name === RESOURCE)) throw fail(`${access.server} has no ${RESOURCE} in nvidia.com/v1alpha1`, "install Dynamo's custom resource definitions");
    asked = { access, identity, reading };
    return `${access.server} (${access.source}) answers; this is ${identity.objectName} in ${identity.podNamespace}`;
  }, "run with the pod's service account, POD_NAME, POD_UID and POD_NAMESPACE by the downward API, and Dynamo's custom resource definitions installed");
  const found = asked as { access: ApiAccess; identity: Identity; reading: Reading | null } | null;
  if (!reached || found === null) return findings.skip("the API server cannot be asked", "discovery-rights", "clock");
  await findings.check("discovery-rights", () => rights(found.access, found.identity));
  await clockCheck(findings, found.reading, SERVER, "the API server does not tell its time");
}

async function rights(access: ApiAccess, { podNamespace: namespace, mode }: Identity): Promise<string> {
  const readiness = mode === "pod" ? { group: "discovery.k8s.io", resource: "endpointslices" } : { group: "", resource: "pods" };
  const needed = [
    ...VERBS.map((verb) => ({ group: "nvidia.com", resource: RESOURCE, verb })),
    ...["get", "list", "watch"].map((verb) => ({ ...readiness, verb })),
  ];
  const denied: string[] = [];
  for (const right of needed) {
    const review = { apiVersion: "authorization.k8s.io/v1", kind: "SelfSubjectAccessReview", spec: { resourceAttributes: { namespace, ...right } } };
    const { body } = await ask(access, "POST", "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", review);
    if ((body.status as { allowed?: unknown } | undefined)?.allowed !== true) denied.push(`${right.verb} ${right.resource}${right.group === "" ? "" : `.${right.group}`}`);
  }
  if (denied.length > 0) throw fail(`the service account may not ${denied.join(", ")} in ${namespace}`, "bind a role with these rights to it, see docs/discovery-kubernetes.md");
  return `the service account may read and write ${RESOURCE} and read ${readiness.resource} in ${namespace}`;
}

/** @throws ApiError in the words of discovery */
async function ask(access: ApiAccess, method: string, path: string, body?: unknown): Promise<Answer> {
  const what = `Kubernetes API server ${access.server} (${access.source}), ${method} ${path}`;
  const { authorization, tls } = access.credentials();
  let response: Response;
  let text: string;
  try {
    response = await fetch(access.server + path, {
      method, tls, redirect: "manual", signal: AbortSignal.timeout(ASK_MS),
      headers: { accept: "application/json", "content-type": "application/json", ...(authorization !== null && { authorization }) },
      ...(body !== undefined && { body: JSON.stringify(body) }),
      ...(access.proxy !== null && { proxy: access.proxy }),
    });
    text = await response.text();
  } catch (error) {
    throw unreachable(what, error);
  }
  if (!response.ok) throw refusal(what, response.status, text, null);
  return { body: JSON.parse(text) as Record<string, unknown>, reading: readingOf(response, access.server) };
}
