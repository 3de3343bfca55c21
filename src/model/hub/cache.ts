import { accessSync, constants, copyFileSync, existsSync, lstatSync, mkdirSync, readFileSync, readlinkSync, renameSync, rmSync, statfsSync, statSync, symlinkSync, writeFileSync } from "node:fs";
import { dirname, join, relative } from "node:path";

const COMMIT = /^[0-9a-f]{40}$/;
export const isCommit = (text: string): boolean => COMMIT.test(text);

const code = (error: unknown) => (error as NodeJS.ErrnoException).code ?? "";
const TAG = `Signature: 8a477f597d28d172789f06886806bc55
# This file is a cache directory tag created by huggingface_hub and programs that share its cache.
# For information about cache directory tags, see https://bford.info/cachedir/
`;

/**
 * One repo in huggingface_hub's cache: blobs/ holds contents by etag, snapshots/<commit>/ links to them by name, refs/ says which commit a branch
 * was, .locks/ beside the repos keeps processes apart.
 */
export class RepoCache {
  readonly folder: string;
  private readonly locks: string;

  constructor(readonly root: string, repo: string) {
    const name = `models--${repo.replaceAll("/", "--")}`;
    this.folder = join(root, name);
    this.locks = join(root, ".locks", name);
  }

  /** @throws Error of the file system */
  prepare(): void {
    mkdirSync(join(this.folder, "blobs"), { recursive: true });
    mkdirSync(this.locks, { recursive: true });
    const tag = join(this.root, "CACHEDIR.TAG");
    if (!existsSync(tag)) writeFileSync(tag, TAG);
  }

  blob = (etag: string): string => join(this.folder, "blobs", etag);
  incomplete = (etag: string): string => `${this.blob(etag)}.incomplete`;
  lock = (etag: string): string => join(this.locks, `${etag}.lock`);
  snapshot = (commit: string): string => join(this.folder, "snapshots", commit);

  /** The blob is there, whole. A wrong length is a copy that something else cut. */
  hasBlob(etag: string, size: number): boolean {
    return sizeOf(this.blob(etag)) === size;
  }

  /** A file of a snapshot, behind its link, is there, with `size` bytes where that is known. */
  has(commit: string, file: string, size: number | null = null): boolean {
    const found = sizeOf(join(this.snapshot(commit), file));
    return found !== null && (size === null || found === size);
  }

  /** Files that huggingface_hub saw in the repo at a commit; null = it has left no such list. */
  listed(commit: string): ReadonlySet<string> | null {
    try {
      const { files } = JSON.parse(readFileSync(join(this.folder, "trees", `${commit}.json`), "utf8")) as { files?: unknown };
      return typeof files === "object" && files !== null ? new Set(Object.keys(files)) : null;
    } catch {
      return null;
    }
  }

  /** The commit a branch or tag was when it was last asked for; a commit is itself. */
  commitOf(revision: string): string | null {
    if (isCommit(revision)) return revision;
    try {
      const text = readFileSync(join(this.folder, "refs", revision), "utf8").trim();
      return isCommit(text) ? text : null;
    } catch {
      return null;
    }
  }

  /** @throws Error of the file system */
  setRef(revision: string, commit: string): void {
    if (isCommit(revision) || this.commitOf(revision) === commit) return;
    const path = join(this.folder, "refs", revision);
    mkdirSync(dirname(path), { recursive: true });
    writeAside(path, (temporary) => writeFileSync(temporary, commit));
  }

  /** Makes a file of a snapshot from a blob. @throws Error of the file system */
  link(commit: string, file: string, etag: string): void {
    const path = join(this.snapshot(commit), file);
    const target = relative(dirname(path), this.blob(etag));
    if (linksTo(path, target, this.blob(etag))) return;
    mkdirSync(dirname(path), { recursive: true });
    writeAside(path, (temporary) => {
      try {
        symlinkSync(target, temporary);
      } catch (error) {
        if (!["EPERM", "ENOTSUP", "EOPNOTSUPP", "ENOSYS"].includes(code(error))) throw error;
        // A file system without links: a copy, as huggingface_hub makes one.
        copyFileSync(this.blob(etag), temporary);
      }
    });
  }

  /** @throws Error of the file system when this user may not write there, or in the nearest folder that exists. Changes nothing. */
  requireWritable(): void {
    for (let path = this.folder; ; path = dirname(path)) {
      if (!existsSync(path) && path !== dirname(path)) continue;
      if (!statSync(path).isDirectory()) throw Object.assign(new Error(`ENOTDIR: not a directory, '${path}'`), { code: "ENOTDIR" });
      return accessSync(path, constants.W_OK | constants.X_OK);
    }
  }

  /** Bytes that this user may still write where the cache is; null = nobody can tell. */
  freeBytes(): number | null {
    for (let path = this.folder; ; path = dirname(path)) {
      try {
        const { bavail, bsize } = statfsSync(path);
        return bavail * bsize;
      } catch {
        if (path === dirname(path)) return null;
      }
    }
  }
}

/** Of a regular file behind links; null = there is none. */
export function sizeOf(path: string): number | null {
  try {
    const found = statSync(path);
    return found.isFile() ? found.size : null;
  } catch {
    return null;
  }
}

function linksTo(path: string, target: string, blob: string): boolean {
  try {
    return lstatSync(path).isSymbolicLink() ? readlinkSync(path) === target && existsSync(path) : sizeOf(path) !== null && sizeOf(path) === sizeOf(blob);
  } catch {
    return false;
  }
}

/** Readers see the old file or the new one. */
function writeAside(path: string, write: (temporary: string) => void): void {
  const temporary = `${path}.${crypto.randomUUID().slice(0, 8)}.tmp`;
  try {
    write(temporary);
    renameSync(temporary, path);
  } catch (error) {
    rmSync(temporary, { force: true });
    throw error;
  }
}
