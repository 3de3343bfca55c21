import { readFileSync } from "node:fs";
import type { DynamoEnvironment } from "../../../config/engine-config.ts";
import { UsageError } from "../../../config/flags.ts";

export interface EtcdOptions {
  /** Origins: "https://etcd-0:2379". */
  endpoints: readonly string[];
  leaseTtlSeconds: number;
  user: { name: string; password: string } | null;
  /** PEM texts. */
  tls: { ca?: string; cert?: string; key?: string } | null;
}

export type EtcdEnvironment = Pick<
  DynamoEnvironment,
  "etcdEndpoints" | "etcdLeaseTtlSeconds" | "etcdUsername" | "etcdPassword" | "etcdCa" | "etcdClientCert" | "etcdClientKey"
>;

/** A variable that holds the name of a PEM file. Dynamo 1.5.0 reads the text itself from it, so that is taken too. */
function pem(variable: string, value: string | null): string | null {
  if (value === null || value.includes("-----BEGIN ")) return value;
  let text: string;
  try {
    text = readFileSync(value, "utf8");
  } catch (error) {
    throw new UsageError(`${variable}: cannot read "${value}": ${(error as Error).message}`);
  }
  if (!text.includes("-----BEGIN ")) throw new UsageError(`${variable}: expected a PEM file, got "${value}"`);
  return text;
}

/** "host:2379" as etcd's own tools take it, or a URL. */
function origin(endpoint: string, tls: boolean): string {
  const url = endpoint.includes("://") ? endpoint : `${tls ? "https" : "http"}://${endpoint}`;
  const parsed = URL.canParse(url) ? new URL(url) : null;
  // What stands there may be a password.
  if (parsed !== null && (parsed.username !== "" || parsed.password !== "")) throw new UsageError("ETCD_ENDPOINTS: expected addresses without a user name and password, which ETCD_AUTH_USERNAME and ETCD_AUTH_PASSWORD are for");
  if (parsed === null || !["http:", "https:"].includes(parsed.protocol) || (parsed.pathname !== "/" && parsed.pathname !== "") || parsed.search !== "")
    throw new UsageError(`ETCD_ENDPOINTS: expected http://host:port or https://host:port, got "${endpoint}"`);
  return parsed.origin;
}

/**
 * How etcd is reached. Unlike Dynamo's runtime, which lets a user name switch certificates off, both may be given.
 * @throws UsageError naming the variable
 */
export function etcdOptions(environment: EtcdEnvironment): EtcdOptions {
  const { etcdUsername: name, etcdPassword: password } = environment;
  if ((name === null) !== (password === null)) throw new UsageError(`ETCD_AUTH_USERNAME and ETCD_AUTH_PASSWORD: expected both or neither, got only ${name === null ? "the password" : `the name "${name}"`}`);
  const ca = pem("ETCD_AUTH_CA", environment.etcdCa);
  const cert = pem("ETCD_AUTH_CLIENT_CERT", environment.etcdClientCert);
  const key = pem("ETCD_AUTH_CLIENT_KEY", environment.etcdClientKey);
  if ((cert === null) !== (key === null)) throw new UsageError(`ETCD_AUTH_CLIENT_CERT and ETCD_AUTH_CLIENT_KEY: expected both or neither, got only the ${cert === null ? "key" : "certificate"}`);
  const secured = ca !== null || cert !== null;
  const endpoints = environment.etcdEndpoints.map((endpoint) => origin(endpoint, secured));
  const plain = endpoints.find((endpoint) => endpoint.startsWith("http://"));
  if (secured && plain !== undefined) throw new UsageError(`ETCD_ENDPOINTS: ${plain} is not encrypted, but ETCD_AUTH_CA or ETCD_AUTH_CLIENT_CERT is set; expected https://`);
  return {
    endpoints,
    leaseTtlSeconds: environment.etcdLeaseTtlSeconds,
    user: name === null || password === null ? null : { name, password },
    tls: secured ? { ...(ca !== null && { ca }), ...(cert !== null && { cert }), ...(key !== null && { key }) } : null,
  };
}
