import { readFileSync } from "node:fs";
import { dirname, isAbsolute, join } from "node:path";
import { z } from "zod";
import { DiscoveryError } from "../discovery.ts";
import { type ApiAccess, type Credentials, watchedFile } from "./access.ts";

const text = z.string().nullish();
const named = <T extends z.ZodType>(key: string, value: T) => z.array(z.looseObject({ name: z.string(), [key]: value.nullish() })).nullish();
const Cluster = z.looseObject({
  server: text,
  "certificate-authority": text,
  "certificate-authority-data": text,
  "insecure-skip-tls-verify": z.boolean().nullish(),
  "tls-server-name": text,
  "proxy-url": text,
});
const User = z.looseObject({
  token: text,
  tokenFile: text,
  "client-certificate": text,
  "client-certificate-data": text,
  "client-key": text,
  "client-key-data": text,
  username: text,
  password: text,
});
const Context = z.looseObject({ cluster: z.string(), user: text });
const Kubeconfig = z.looseObject({
  "current-context": text,
  clusters: named("cluster", Cluster),
  users: named("user", User),
  contexts: named("context", Context),
});
type Cluster = z.infer<typeof Cluster>;
type User = z.infer<typeof User>;

/** Ways to log in that need another program or change who asks: said, not ignored. */
const REFUSED = ["exec", "auth-provider", "as", "as-uid", "as-groups", "as-user-extra"];

/** Entries with the folder of their file, since paths in it are relative to it. */
interface Merged {
  currentContext: string | null;
  find<T>(list: "clusters" | "users" | "contexts", name: string): { value: T; folder: string } | null;
}

/** Several files count as one; of equal names the first holds. */
function merge(paths: readonly string[], source: string): Merged {
  const parts = paths.flatMap((path) => {
    let documents: unknown;
    try {
      documents = Bun.YAML.parse(readFileSync(path, "utf8"));
    } catch (error) {
      throw new DiscoveryError(`${source}: cannot read "${path}": ${(error as Error).message}`);
    }
    return (Array.isArray(documents) ? documents : [documents]).map((document) => {
      const parsed = Kubeconfig.safeParse(document ?? {});
      if (!parsed.success) throw new DiscoveryError(`${source}: "${path}" is not a kubeconfig: ${parsed.error.issues[0]!.path.join(".") || "file"}: ${parsed.error.issues[0]!.message}`);
      return { folder: dirname(path), config: parsed.data };
    });
  });
  return {
    currentContext: parts.map(({ config }) => config["current-context"]).find(Boolean) ?? null,
    find: (list, name) => {
      for (const { folder, config } of parts)
        for (const entry of config[list] ?? []) if (entry.name === name) return { value: (entry[list.slice(0, -1)] ?? {}) as never, folder };
      return null;
    },
  };
}

/**
 * Reads the current context of kubeconfig files.
 * @throws DiscoveryError naming the file's field
 */
export function readKubeconfig(paths: readonly string[], source: string): ApiAccess {
  const merged = merge(paths, source);
  const name = merged.currentContext;
  if (name === null) throw new DiscoveryError(`${source}: current-context is not set`);
  const context = merged.find<z.infer<typeof Context>>("contexts", name)?.value;
  if (!context?.cluster) throw new DiscoveryError(`${source}: current-context "${name}" is not among contexts`);
  const cluster = merged.find<Cluster>("clusters", context.cluster);
  if (!cluster) throw new DiscoveryError(`${source}: cluster "${context.cluster}" of context "${name}" is not among clusters`);
  // A missing user is nobody, as for other clients.
  const user = (context.user ? merged.find<User>("users", context.user) : null) ?? { value: {} as User, folder: cluster.folder };

  const server = cluster.value.server ?? "";
  if (!URL.canParse(server) || !/^https?:$/.test(new URL(server).protocol)) throw new DiscoveryError(`${source}: cluster "${context.cluster}": expected an http or https URL as server, got "${server}"`);
  const proxy = cluster.value["proxy-url"] || null;
  if (proxy !== null && !(URL.canParse(proxy) && /^https?:$/.test(new URL(proxy).protocol))) throw new DiscoveryError(`${source}: cluster "${context.cluster}": expected an http or https URL as proxy-url, got "${proxy}"`);
  const refused = REFUSED.find((field) => user.value[field] !== undefined && user.value[field] !== null);
  if (refused) throw new DiscoveryError(`${source}: user "${context.user}": ${refused} is not supported; use token, tokenFile, a client certificate, or a pod's service account`);
  return { server: server.replace(/\/+$/, ""), source, proxy, credentials: credentials(cluster, user, source) };
}

function credentials(cluster: { value: Cluster; folder: string }, user: { value: User; folder: string }, source: string): () => Credentials {
  const at = (folder: string, path: string) => (isAbsolute(path) ? path : join(folder, path));
  /** Inline data, base64, goes before a file. */
  const pem = ({ value, folder }: { value: Record<string, unknown>; folder: string }, field: string): (() => string) | null => {
    const data = value[`${field}-data`] as string | null | undefined;
    const path = value[field] as string | null | undefined;
    if (data) {
      const decoded = Buffer.from(data, "base64").toString();
      if (!decoded.includes("-----BEGIN")) throw new DiscoveryError(`${source}: ${field}-data: expected PEM in base64`);
      return () => decoded;
    }
    return path ? watchedFile(at(folder, path), `${source}: ${field}`) : null;
  };
  const ca = pem(cluster, "certificate-authority");
  const cert = pem(user, "client-certificate");
  const key = pem(user, "client-key");
  if ((cert === null) !== (key === null)) throw new DiscoveryError(`${source}: client-certificate and client-key belong together, only one is set`);
  const { token, tokenFile, username, password } = user.value;
  const fromFile = !token && tokenFile ? watchedFile(at(user.folder, tokenFile), `${source}: tokenFile`) : null;
  const authorization = (): string | null => {
    if (token) return `Bearer ${token}`;
    if (fromFile) return `Bearer ${fromFile()}`;
    return username ? `Basic ${Buffer.from(`${username}:${password ?? ""}`).toString("base64")}` : null;
  };
  return () => ({
    authorization: authorization(),
    tls: {
      ...(ca && { ca: ca() }),
      ...(cert && key && { cert: cert(), key: key() }),
      ...(cluster.value["tls-server-name"] && { serverName: cluster.value["tls-server-name"] }),
      ...(cluster.value["insecure-skip-tls-verify"] && { rejectUnauthorized: false }),
    },
  });
}
