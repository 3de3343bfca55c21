import { describe, expect, test } from "bun:test";
import { mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { instanceIdOf, type PodEnvironment, podIdentity } from "../../../src/dynamo/discovery/kubernetes/identity.ts";
import { sipHash13 } from "../../../src/dynamo/discovery/kubernetes/siphash.ts";
import { readyNames, Records, recordsOf } from "../../../src/dynamo/discovery/kubernetes/worker-metadata.ts";
import { eventChannelRecord, eventSourceRecord, instance, instanceRecord, modelRecord } from "../../../src/dynamo/discovery/records.ts";

const pod = { kubeDiscoveryMode: "pod" as const, podName: "worker-0", podUid: "11111111-2222", podNamespace: "ns1", containerName: null };
const container = (name: string) => podIdentity({ ...pod, kubeDiscoveryMode: "container", containerName: name }, "/nonexistent");
const name = { namespace: "dynamo", component: "backend", endpoint: "generate" };

describe("identity", () => {
  test("hash of known inputs", () => {
    expect(sipHash13(new Uint8Array())).toBe(15130871412783076140n);
    // Reference values of a real worker and a real frontend.
    expect(instanceIdOf("worker-0")).toBe(1186445869714687n);
    expect(instanceIdOf("fe-0").toString(16)).toBe("1eb37cc013508b");
  });
  test("every length up to three words has its own hash, of 64 bits", () => {
    const hashes = new Set(Array.from({ length: 25 }, (_, length) => sipHash13(new Uint8Array(length))));
    expect(hashes.size).toBe(25);
    for (const hash of hashes) expect(hash >= 0n && hash < 1n << 64n).toBe(true);
  });
  test("names are hashed as UTF-8 and ids have 53 bits", () => {
    for (const text of ["", "a", "worker-17.pool", "wörker", "x".repeat(253)]) expect(instanceIdOf(text) < 1n << 53n).toBe(true);
    expect(instanceIdOf("ö")).not.toBe(instanceIdOf("o"));
  });
  test("pod mode: one identity per pod", () => {
    expect(podIdentity(pod, "/nonexistent")).toEqual({ mode: "pod", podName: "worker-0", podNamespace: "ns1", podUid: "11111111-2222", objectName: "worker-0", instanceId: 1186445869714687n });
    expect(podIdentity({ ...pod, podNamespace: null }, "/nonexistent").podNamespace).toBe("default");
    // The container's name does not matter then.
    expect(podIdentity({ ...pod, containerName: "engine-0" }, "/nonexistent").objectName).toBe("worker-0");
  });
  test("container mode: main is the pod, others have their own", () => {
    expect(container("main")).toMatchObject({ objectName: "worker-0", instanceId: instanceIdOf("worker-0") });
    expect(container("engine-0")).toMatchObject({ objectName: "worker-0-engine-0", instanceId: instanceIdOf("worker-0-engine-0") });
    expect(container("engine-0").instanceId).not.toBe(container("engine-1").instanceId);
  });
  test("the downward-API volume goes before the variables; an empty file does not", () => {
    const volume = mkdtempSync(join(tmpdir(), "ls-podinfo-"));
    try {
      writeFileSync(join(volume, "pod_name"), "from-volume\n");
      writeFileSync(join(volume, "pod_uid"), "  uid-from-volume \n");
      writeFileSync(join(volume, "pod_namespace"), "\n");
      expect(podIdentity(pod, volume)).toMatchObject({ podName: "from-volume", podUid: "uid-from-volume", podNamespace: "ns1" });
    } finally {
      rmSync(volume, { recursive: true, force: true });
    }
  });
  test("what is missing or cannot be a name is said with its variable", () => {
    const cases: [Partial<PodEnvironment>, RegExp][] = [
      [{ podName: null }, /^POD_NAME is not set/],
      [{ podUid: null }, /^POD_UID is not set/],
      [{ podName: "Worker_0" }, /^POD_NAME: expected .* got "Worker_0"/],
      [{ podName: "a/../../b" }, /^POD_NAME: expected/],
      [{ podNamespace: "a b" }, /^POD_NAMESPACE: expected/],
      [{ podName: "x".repeat(254) }, /^POD_NAME: expected/],
      [{ kubeDiscoveryMode: "container", containerName: null }, /^CONTAINER_NAME is not set/],
      [{ kubeDiscoveryMode: "container", containerName: "A/b" }, /^CONTAINER_NAME: expected/],
    ];
    for (const [change, message] of cases) expect(() => podIdentity({ ...pod, ...change }, "/nonexistent")).toThrow(message);
    expect(() => podIdentity({ ...pod, podName: "x".repeat(250), kubeDiscoveryMode: "container", containerName: "engine" }, "/nonexistent")).toThrow(/^POD_NAME and CONTAINER_NAME/);
  });
});

describe("body of the apply", () => {
  const id = 1186445869714687n;
  const endpoint = instance(name, id, { tcp: "127.0.0.1:4/43710f49c0cff/generate" }, "cpu", "json");

  test("is what a worker of 1.5.0 writes", () => {
    const records = new Records();
    records.set(eventChannelRecord(name, "kv_metrics", 5811506848041838n, { kind: "Zmq", config: { endpoint: "tcp://127.0.0.1:1" } } as never));
    records.set(modelRecord(name, id, { display_name: "m" }));
    records.set(instanceRecord(name, endpoint));
    expect(JSON.parse(records.body(podIdentity(pod, "/nonexistent")))).toEqual({
      apiVersion: "nvidia.com/v1alpha1",
      kind: "DynamoWorkerMetadata",
      metadata: { name: "worker-0", ownerReferences: [{ apiVersion: "v1", kind: "Pod", name: "worker-0", uid: "11111111-2222", controller: true, blockOwnerDeletion: false }] },
      spec: {
        data: {
          endpoints: {
            "dynamo/backend/generate/43710f49c0cff": {
              type: "Endpoint", component: "backend", endpoint: "generate", namespace: "dynamo", instance_id: 1186445869714687, transport: { tcp: "127.0.0.1:4/43710f49c0cff/generate" }, device_type: "cpu", request_plane_codec: "json",
            },
          },
          model_cards: { "dynamo/backend/generate/43710f49c0cff": { type: "Model", namespace: "dynamo", component: "backend", endpoint: "generate", instance_id: 1186445869714687, card_json: { display_name: "m" } } },
          event_channels: {
            "namespace/dynamo/component/backend/endpoint/generate/topic/kv_metrics/14a588e1498b6e": {
              type: "EventChannel", scope: { kind: "endpoint", endpoint: { namespace: "dynamo", component: "backend", name: "generate" } }, topic: "kv_metrics", instance_id: 5811506848041838,
              transport: expect.anything(), namespace: "dynamo", component: "backend",
            },
          },
          event_sources: {},
        },
      },
    });
  });
  test("only the object with the pod's name is controlled by the pod", () => {
    const owner = JSON.parse(new Records().body(container("engine-0"))).metadata.ownerReferences[0];
    expect(owner).toEqual({ apiVersion: "v1", kind: "Pod", name: "worker-0", uid: "11111111-2222", controller: false, blockOwnerDeletion: false });
  });
  test("publisher ids that lose bits on the way are refused", () => {
    const records = new Records();
    const transport = { kind: "Zmq", config: { endpoint: "tcp://127.0.0.1:1" } } as never;
    expect(() => records.set(eventChannelRecord(name, "kv-events", 1n << 53n, transport))).toThrow(/publisher id 9007199254740992/);
    expect(() => records.set(eventSourceRecord(name, "kv-events", 1n << 53n, id, endpoint))).toThrow(/publisher id/);
    records.set(eventChannelRecord(name, "kv-events", (1n << 53n) - 1n, transport));
  });
});

describe("readiness, as frontends judge it", () => {
  const endpoint = (podName: unknown, ready: unknown) => ({ conditions: ready === undefined ? {} : { ready }, targetRef: { name: podName } });
  test("a ready endpoint of a slice that names a pod", () => {
    const slices = [{ endpoints: [endpoint("a", true), endpoint("b", false), endpoint("c", undefined), endpoint("", true), { conditions: { ready: true } }, endpoint(7, true)] }, { endpoints: null }, {}, { endpoints: [endpoint("d", true)] }];
    expect([...readyNames(slices, "pod")]).toEqual(["a", "d"]);
  });
  test("a ready container of a pod", () => {
    const pods = [
      { metadata: { name: "p" }, status: { containerStatuses: [{ name: "main", ready: true }, { name: "engine-0", ready: true }, { name: "engine-1", ready: false }] } },
      { metadata: { name: "q" }, status: {} },
      { metadata: { name: "r" } },
    ];
    expect([...readyNames(pods, "container")]).toEqual(["p", "p-engine-0"]);
  });
  test("records of ready objects below a prefix; odd objects have none", () => {
    const object = (objectName: string, data: unknown) => ({ metadata: { name: objectName }, spec: { data } });
    const objects = [
      object("a", { model_cards: { "x/y/z/1": { n: 1 }, "x/y/zz/2": {} } }),
      object("b", { model_cards: { "x/y/z/3": {} } }),
      object("c", { model_cards: null }),
      object("d", null),
      object("e", { model_cards: [1] }),
      { metadata: { name: "f" } },
    ];
    expect(recordsOf(objects, new Set(["a", "c", "d", "e", "f"]), "v1/mdc", "x/y/z/")).toEqual([{ bucket: "v1/mdc", key: "x/y/z/1", value: { n: 1 } }]);
  });
});
