import { existsSync, lstatSync, readdirSync, statSync, unlinkSync, writeFileSync } from "node:fs";
import { dirname, join } from "node:path";
import type { DynamoEnvironment } from "../config/engine-config.ts";
import { BUCKETS } from "../dynamo/discovery/discovery.ts";
import { EtcdGateway } from "../dynamo/discovery/etcd/gateway.ts";
import { etcdOptions } from "../dynamo/discovery/etcd/options.ts";
import { TTL_MS } from "../dynamo/discovery/file.ts";
import { clockCheck, DIRECTORY, type Reading, readingOf, SERVER } from "./clock.ts";
import { fail, type Findings } from "./findings.ts";
import { kubernetesChecks } from "./kubernetes.ts";

/** For one question to a store. */
const ASK_MS = 4_000;
/** Nobody watches this key, and its lease ends soon after a doctor that was killed. */
const PROBE_KEY = "v1/layerscale-doctor/";
const PROBE_SECONDS = 10;
const NO_STORE = "the store cannot be asked";

/** Reads and writes as a worker will, under names that no other process reads; leaves nothing behind. */
export async function discoveryChecks(findings: Findings, environment: DynamoEnvironment): Promise<void> {
  switch (environment.discoveryBackend) {
    case "mem":
      await findings.check("discovery", () => "mem: records stay in the process, no frontend of another process will find this worker");
      return findings.skip("mem", "discovery-rights", "clock");
    case "file":
      return fileChecks(findings, environment.fileKv);
    case "etcd":
      return etcdChecks(findings, environment);
    case "kubernetes":
      return kubernetesChecks(findings, environment);
  }
}

async function fileChecks(findings: Findings, root: string): Promise<void> {
  let reading: Reading | null = null;
  const advice = `make a directory that all processes may write: mkdir -p ${root} && chmod a+rwX ${root}`;
  const there = await findings.check("discovery", () => {
    if (!existsSync(root)) {
      if (lstatSync(root, { throwIfNoEntry: false })?.isSymbolicLink()) throw fail(`DYN_FILE_KV: "${root}" is a link that leads nowhere`);
      const parent = nearest(root);
      if (!statSync(parent).isDirectory()) throw fail(`DYN_FILE_KV: "${root}" cannot be made: ${parent} is no directory`);
      return `${root} does not exist yet; the worker makes it in ${parent}`;
    }
    if (!statSync(root).isDirectory()) throw fail(`DYN_FILE_KV: "${root}" is no directory`);
    return `${root}: ${live(root)} live records`;
  }, advice);
  const writable = there && (await findings.check("discovery-rights", () => {
    const places = existsSync(root) ? [root, ...BUCKETS.map((bucket) => join(root, bucket)).filter((folder) => existsSync(folder))] : [nearest(root)];
    for (const place of places) {
      // Readers of the store pass over names with this beginning.
      const probe = join(place, `.tmp_doctor-${process.pid}`);
      readdirSync(place);
      writeFileSync(probe, "");
      reading = { source: place, theirs: statSync(probe).mtimeMs, ours: Date.now(), exactMs: 0 };
      unlinkSync(probe);
    }
    return `files can be written in ${places.join(", ")}`;
  }, advice));
  if (!there) findings.skip(NO_STORE, "discovery-rights");
  await clockCheck(findings, writable ? reading : null, DIRECTORY, NO_STORE);
}

function nearest(path: string): string {
  while (!existsSync(path) && path !== dirname(path)) path = dirname(path);
  return path;
}

/** Records that their processes have renewed lately. */
function live(root: string): number {
  let count = 0;
  for (const bucket of BUCKETS) {
    const folder = join(root, bucket);
    if (!existsSync(folder)) continue;
    count += readdirSync(folder).filter((name) => !name.startsWith(".") && Date.now() - (statSync(join(folder, name), { throwIfNoEntry: false })?.mtimeMs ?? 0) < TTL_MS).length;
  }
  return count;
}

const base64 = (text: string): string => Buffer.from(text).toString("base64");

async function etcdChecks(findings: Findings, environment: DynamoEnvironment): Promise<void> {
  let gateway: EtcdGateway | null = null;
  const reached = await findings.check("discovery", async () => {
    const options = etcdOptions(environment);
    gateway = new EtcdGateway(options);
    const { version } = (await gateway.call("/v3/maintenance/status", {}, ASK_MS).catch((error: unknown) => {
      // Only the root user may ask for this once rights are on; that etcd refuses shows that it answers.
      if ((error as { code?: unknown }).code === PERMISSION_DENIED || /permission denied/.test((error as Error).message)) return { version: null };
      throw error;
    })) as { version?: unknown };
    return `${options.endpoints.join(", ")}: etcd${typeof version === "string" ? ` ${version}` : ""} answers`;
  }, "start etcd, and set ETCD_ENDPOINTS (and ETCD_AUTH_* where it asks for a login or certificates) to where it is");
  if (!reached) return findings.skip(NO_STORE, "discovery-rights", "clock");
  const etcd = gateway as unknown as EtcdGateway;
  await findings.check("discovery-rights", async () => {
    const { ID } = await etcd.call("/v3/lease/grant", { TTL: PROBE_SECONDS }, ASK_MS);
    const key = base64(`${PROBE_KEY}${crypto.randomUUID()}`);
    try {
      await etcd.call("/v3/kv/put", { key, value: base64("{}"), lease: ID }, ASK_MS);
      await etcd.call("/v3/kv/range", { key: base64("v1/"), range_end: base64("v10"), count_only: true }, ASK_MS);
      await etcd.call("/v3/kv/deleterange", { key }, ASK_MS);
    } finally {
      await etcd.call("/v3/lease/revoke", { ID }, ASK_MS).catch(() => {});
    }
    return "leases are granted, and keys below v1/ can be read and written";
  }, "give the user of ETCD_AUTH_USERNAME the right to read and write keys that begin with v1/");
  await clockCheck(findings, await dateOf(etcd.options), SERVER, "etcd does not tell its time");
  await etcd.close(null);
}
const PERMISSION_DENIED = 7;

async function dateOf({ endpoints, tls }: EtcdGateway["options"]): Promise<Reading | null> {
  for (const endpoint of endpoints) {
    try {
      const response = await fetch(`${endpoint}/version`, { signal: AbortSignal.timeout(ASK_MS), redirect: "manual", ...(tls !== null && { tls }) });
      await response.body?.cancel();
      const reading = readingOf(response, endpoint);
      if (reading !== null) return reading;
    } catch {
      // The next one may answer.
    }
  }
  return null;
}
