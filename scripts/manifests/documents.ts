/** The manifests of deploy/ as plain values, with careful access: what is missing or of another type reads as undefined. */
import { readFileSync } from "node:fs";
import { join } from "node:path";

export type Tree = Record<string, unknown>;

export const MANIFESTS = ["agg.yaml", "disagg.yaml", "agg-hub.yaml", "disagg-hub.yaml", "network-policy.yaml", "pod-monitor.yaml"] as const;
export const GRAPHS = ["agg.yaml", "disagg.yaml", "agg-hub.yaml", "disagg-hub.yaml"] as const;
export type ManifestName = (typeof MANIFESTS)[number];

/** Documents of one file. @throws Error with the parser's message */
export function parseDocuments(text: string): unknown[] {
  return text.split(/^---$/m).map((part) => Bun.YAML.parse(part));
}

export function readManifests(folder: string): Map<ManifestName, string> {
  return new Map(MANIFESTS.map((name) => [name, readFileSync(join(folder, name), "utf8")]));
}

export const isTree = (value: unknown): value is Tree => typeof value === "object" && value !== null && !Array.isArray(value);

/** `at(value, "spec", "containers", 0)` */
export function at(value: unknown, ...path: (string | number)[]): unknown {
  let here = value;
  for (const step of path) {
    if (typeof step === "number" ? !Array.isArray(here) : !isTree(here)) return undefined;
    here = (here as Record<string | number, unknown>)[step];
  }
  return here;
}

export const treesAt = (value: unknown, ...path: (string | number)[]): Tree[] => {
  const list = at(value, ...path);
  return Array.isArray(list) ? list.filter(isTree) : [];
};

export const textsAt = (value: unknown, ...path: (string | number)[]): string[] => {
  const list = at(value, ...path);
  return Array.isArray(list) ? list.map(String) : [];
};

/** One component of a graph, with its container `main`. */
export class Component {
  readonly name: string;
  readonly type: string;
  readonly containers: Tree[];
  readonly main: Tree;
  constructor(readonly tree: Tree) {
    this.name = String(tree.name);
    this.type = String(tree.type);
    this.containers = treesAt(tree, "podTemplate", "spec", "containers");
    this.main = this.containers.find((container) => container.name === "main") ?? {};
  }
  get worker(): boolean {
    return this.type !== "frontend";
  }
  get args(): string[] {
    return textsAt(this.main, "args");
  }
  get labels(): unknown {
    return at(this.tree, "podTemplate", "metadata", "labels");
  }
  /** Value of an argument, as the worker takes it: `--model X` or `--model=X`, the last one; undefined when it is not given. */
  argument(flag: string): string | undefined {
    const index = this.args.findLastIndex((word) => word === flag || word.startsWith(`${flag}=`));
    return index < 0 ? undefined : this.args[index] === flag ? this.args[index + 1] : this.args[index]!.slice(flag.length + 1);
  }
  /** Names of its variables, in order, with repetitions. */
  get variables(): string[] {
    return treesAt(this.main, "env").map(({ name }) => String(name));
  }
  /** The entry of a variable. */
  env(name: string): Tree | undefined {
    return treesAt(this.main, "env").find((entry) => entry.name === name);
  }
  /** Where all of a claim is mounted, and whether the container may write there; several places are joined. */
  mountOf(claim: string): { path: string; writable: boolean } | null {
    const volumes = treesAt(this.tree, "podTemplate", "spec", "volumes");
    const volume = volumes.find((entry) => at(entry, "persistentVolumeClaim", "claimName") === claim);
    const mounts = volume === undefined ? [] : treesAt(this.main, "volumeMounts").filter((mount) => mount.name === volume.name);
    if (mounts.length === 0 || volumes.filter(({ name }) => name === volume!.name).length > 1) return null;
    const path = mounts.map(({ mountPath, subPath, subPathExpr }) => [mountPath, subPath, subPathExpr].filter((part) => part !== undefined).join(" of ")).join(" and ");
    return { path, writable: at(volume, "persistentVolumeClaim", "readOnly") !== true && !mounts.some(({ readOnly }) => readOnly === true) };
  }
}
