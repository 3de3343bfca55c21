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
  /** Value of an argument: `--model X`; undefined when it is not given. */
  argument(flag: string): string | undefined {
    const index = this.args.indexOf(flag);
    return index < 0 ? undefined : this.args[index + 1];
  }
  /** The entry of a variable. */
  env(name: string): Tree | undefined {
    return treesAt(this.main, "env").find((entry) => entry.name === name);
  }
  /** Where the claim is mounted. */
  mountOf(claim: string): unknown {
    const volume = treesAt(this.tree, "podTemplate", "spec", "volumes").find((entry) => at(entry, "persistentVolumeClaim", "claimName") === claim);
    return volume === undefined ? undefined : treesAt(this.main, "volumeMounts").find((mount) => mount.name === volume.name)?.mountPath;
  }
}
