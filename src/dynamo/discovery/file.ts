import { randomBytes } from "node:crypto";
import { chmodSync, existsSync, linkSync, mkdirSync, readdirSync, readFileSync, renameSync, statSync, unlinkSync, utimesSync, writeFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { logger } from "../../telemetry/log.ts";
import { parseJson, stringifyJson } from "../protocol/bigint-json.ts";
import { type Bucket, BUCKETS, type Discovery, DiscoveryError, type DiscoveryRecord } from "./discovery.ts";
import { escapeFileName, unescapeKey } from "./escape.ts";

/** Any process may delete a file whose mtime is older than this. */
export const TTL_MS = 10_000;
/** Own files are touched this often: three chances within the TTL. */
export const RENEW_MS = 2_500;
/** Any file, where the file system allows a new one. */
const PROBE = "probe";
const TEMPORARY = ".tmp_";

const log = logger("layerscale::dynamo::discovery");
const code = (error: unknown) => (error as NodeJS.ErrnoException).code;

/** What a code of the file system means for whoever set DYN_FILE_KV up. */
const MEANINGS: Record<string, string> = {
  EACCES: "this user may not write there",
  EPERM: "this user may not write there",
  EROFS: "it is mounted read-only",
  ENOSPC: "the disk is full",
  EDQUOT: "the disk quota is used up",
  ENOTDIR: "a part of the path is no directory",
  EEXIST: "it is no directory",
};
function reason(error: unknown): string {
  const meaning = MEANINGS[code(error) ?? ""];
  return meaning === undefined ? (error as Error).message : `${meaning} (${(error as Error).message})`;
}

export interface FileOptions {
  /** Whether the process is well; files are not touched for one that hangs. */
  alive?: () => boolean;
  /** Milliseconds since the epoch, as mtimes are. */
  clock?: () => number;
}

/**
 * Records as files below one directory, one flat folder per bucket. A file appears complete or not at all (link of a temporary
 * name), since readers look once; it stays alive by its mtime. All of it is synchronous, so changes and the timer never cross.
 */
export class FileDiscovery implements Discovery {
  readonly #own = new Map<string, { record: DiscoveryRecord; text: string }>();
  /** Of those, the ones that could not be renewed last time: told once. */
  readonly #failing = new Set<string>();
  readonly #clock: () => number;
  readonly #alive: () => boolean;
  #timer: ReturnType<typeof setInterval> | null;

  /** @throws DiscoveryError when the directory cannot be made */
  constructor(
    readonly root: string,
    readonly instanceId: bigint,
    { alive = () => true, clock = Date.now }: FileOptions = {},
  ) {
    this.#alive = alive;
    this.#clock = clock;
    try {
      for (const bucket of BUCKETS) {
        readdirSync(this.#folder(bucket));
        this.#unlink(this.#write(bucket, PROBE));
      }
    } catch (error) {
      throw new DiscoveryError(`DYN_FILE_KV: cannot use directory "${root}": ${reason(error)}`);
    }
    this.#timer = setInterval(() => this.touch(), RENEW_MS);
    this.#timer.unref();
  }

  async add(record: DiscoveryRecord): Promise<void> {
    const path = this.#path(record.bucket, record.key);
    const text = stringifyJson(record.value);
    try {
      this.#create(record.bucket, path, text);
    } catch (error) {
      throw new DiscoveryError(code(error) === "EEXIST" ? `record ${path} exists` : `DYN_FILE_KV: cannot write record ${path}: ${reason(error)}`);
    }
    this.#own.set(path, { record, text });
  }

  async replace(record: DiscoveryRecord): Promise<void> {
    const path = this.#path(record.bucket, record.key);
    const text = stringifyJson(record.value);
    try {
      // Readers see a rename as an update; a file written in place they read half.
      renameSync(this.#write(record.bucket, text), path);
    } catch (error) {
      throw new DiscoveryError(`DYN_FILE_KV: cannot write record ${path}: ${reason(error)}`);
    }
    this.#own.set(path, { record, text });
  }

  async remove(bucket: Bucket, key: string): Promise<void> {
    const path = this.#path(bucket, key);
    this.#own.delete(path);
    this.#failing.delete(path);
    this.#unlink(path);
  }

  async list(bucket: Bucket, prefix: string): Promise<DiscoveryRecord[]> {
    const folder = join(this.root, bucket);
    const out: DiscoveryRecord[] = [];
    for (const name of readdirSync(folder)) {
      const key = unescapeKey(name);
      if (name.startsWith(TEMPORARY) || key === null || !key.startsWith(prefix)) continue;
      try {
        // A record is judged by its age, not by its presence: a killed process leaves files behind.
        if (statSync(join(folder, name)).mtimeMs < this.#clock() - TTL_MS) continue;
        out.push({ bucket, key, value: parseJson(readFileSync(join(folder, name), "utf8")) });
      } catch (error) {
        log.debug("record skipped", { path: join(folder, name), error });
      }
    }
    return out;
  }

  onLost(): () => void {
    return () => {};
  }
  async renew(): Promise<bigint> {
    return this.instanceId;
  }

  async close(): Promise<void> {
    if (this.#timer) clearInterval(this.#timer);
    this.#timer = null;
    for (const path of this.#own.keys()) this.#unlink(path);
    this.#own.clear();
  }

  /** Touches own files, writes those again that somebody removed, and drops what other processes left to expire. */
  touch(): void {
    if (!this.#alive()) return;
    const now = this.#clock() / 1000;
    for (const [path, { record, text }] of this.#own) {
      try {
        this.#renew(record.bucket, path, text, now);
        if (this.#failing.delete(path)) log.info("discovery record is renewed again", { path });
      } catch (error) {
        if (!this.#failing.has(path)) log.error("discovery record cannot be renewed, trying on", { path, reason: reason(error) });
        this.#failing.add(path);
      }
    }
    for (const bucket of BUCKETS) this.#expire(bucket);
  }

  #renew(bucket: Bucket, path: string, text: string, now: number): void {
    try {
      utimesSync(path, now, now);
    } catch (error) {
      if (code(error) !== "ENOENT") throw error;
      this.#create(bucket, path, text);
      log.warn("discovery record was gone and is written again", { path });
    }
  }

  #path(bucket: Bucket, key: string): string {
    return join(this.root, bucket, escapeFileName(key));
  }

  /** Everyone may list and delete here: the frontend expires files, and it may run as another user. */
  #folder(bucket: Bucket): string {
    const folder = join(this.root, bucket);
    for (const made of [this.root, dirname(folder), folder]) {
      if (existsSync(made)) continue;
      mkdirSync(made, { recursive: true });
      chmodSync(made, 0o777);
    }
    return folder;
  }

  /** @returns the temporary name */
  #write(bucket: Bucket, text: string): string {
    const temporary = join(this.#folder(bucket), `${TEMPORARY}${randomBytes(8).toString("hex")}`);
    try {
      writeFileSync(temporary, text, { flag: "wx", mode: 0o644 });
      // Whatever the umask is: a frontend of another user reads it.
      chmodSync(temporary, 0o644);
    } catch (error) {
      // A full disk leaves an empty file behind.
      if (existsSync(temporary)) this.#unlink(temporary);
      throw error;
    }
    return temporary;
  }

  #create(bucket: Bucket, path: string, text: string): void {
    const temporary = this.#write(bucket, text);
    try {
      linkSync(temporary, path);
    } finally {
      this.#unlink(temporary);
    }
  }

  #expire(bucket: Bucket): void {
    const folder = join(this.root, bucket);
    let names: string[];
    try {
      names = readdirSync(folder);
    } catch {
      return; // made again with the next record
    }
    for (const name of names) {
      const path = join(folder, name);
      if (this.#own.has(path)) continue;
      try {
        if (statSync(path).mtimeMs >= this.#clock() - TTL_MS) continue;
        unlinkSync(path);
        log.info("expired discovery record removed", { path });
      } catch (error) {
        if (code(error) !== "ENOENT") log.debug("expired discovery record not removed", { path, error });
      }
    }
  }

  #unlink(path: string): void {
    try {
      unlinkSync(path);
    } catch (error) {
      if (code(error) !== "ENOENT") log.warn("cannot remove file", { path, error });
    }
  }
}
