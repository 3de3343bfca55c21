import { readFileSync } from "node:fs";
import { createSecureContext, type SecureContext } from "node:tls";
import { UsageError } from "../../config/flags.ts";

/** Paths of PEM files, each with the variable that names it. */
export interface TlsPaths {
  ca?: readonly [variable: string, path: string | null];
  cert?: readonly [variable: string, path: string | null];
  key?: readonly [variable: string, path: string | null];
}

export interface TlsMaterial {
  ca?: Buffer;
  cert?: Buffer;
  key?: Buffer;
  /** The same, parsed. */
  context: SecureContext;
}

function read([variable, path]: readonly [string, string | null]): Buffer | undefined {
  if (path === null) return undefined;
  try {
    return readFileSync(path);
  } catch (error) {
    throw new UsageError(`${variable}: cannot read "${path}": ${(error as Error).message}`);
  }
}

/** Certificates are replaced on disk before they expire: the files are looked at again after this time. */
const FRESH_MS = 10_000;

/** Certificates and keys as the files hold them now; what does not load leaves the last good ones in place. */
export class TlsFiles {
  #material: TlsMaterial;
  #readAt = performance.now();

  /** @throws UsageError naming the variable when a file cannot be read, or is not what it should be */
  constructor(
    readonly paths: TlsPaths,
    readonly warn: (error: unknown) => void,
    readonly freshMs = FRESH_MS,
  ) {
    this.#material = load(paths);
  }

  /** Reads the files again when they may have changed. */
  current(): TlsMaterial {
    if (performance.now() - this.#readAt < this.freshMs) return this.#material;
    this.#readAt = performance.now();
    try {
      const now = load(this.paths);
      const same = (["ca", "cert", "key"] as const).every((part) => (now[part] ?? "").toString() === (this.#material[part] ?? "").toString());
      if (!same) this.#material = now;
    } catch (error) {
      this.warn(error);
    }
    return this.#material;
  }
}

function load(paths: TlsPaths): TlsMaterial {
  const out: Omit<TlsMaterial, "context"> = {};
  for (const part of ["ca", "cert", "key"] as const) {
    const bytes = paths[part] && read(paths[part]);
    if (bytes) out[part] = bytes;
  }
  const names = Object.values(paths).flatMap(([variable, path]) => (path === null ? [] : [variable]));
  if (out.ca && !/-----BEGIN [A-Z ]*CERTIFICATE-----/.test(out.ca.toString("latin1"))) throw new UsageError(`${paths.ca![0]}: no PEM certificate in "${paths.ca![1]}"`);
  try {
    return { ...out, context: createSecureContext(out) };
  } catch (error) {
    throw new UsageError(`${names.join(", ")}: ${(error as Error).message}`);
  }
}

/** Both or neither. @throws UsageError */
export function pair(first: readonly [string, string | null], second: readonly [string, string | null]): void {
  if ((first[1] === null) === (second[1] === null)) return;
  const [set, missing] = first[1] === null ? [second, first] : [first, second];
  throw new UsageError(`${missing[0]}: must be set together with ${set[0]}, which is "${set[1]}"`);
}
