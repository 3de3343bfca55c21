import { randomBytes } from "node:crypto";
import { chmodSync, existsSync, linkSync, mkdirSync, readdirSync, readFileSync, statSync, unlinkSync, utimesSync, writeFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { logger } from "../../telemetry/log.ts";
import { parseJson, stringifyJson } from "../protocol/bigint-json.ts";
import { type Bucket, BUCKETS, type Discovery, DiscoveryError, type DiscoveryRecord } from "./discovery.ts";
import { escapeFileName, unescapeKey } from "./escape.ts";

/** Any process may delete a file whose mtime is older than this. */
export const TTL_MS = 10_000;
/** Own files are touched this often: three chances within the TTL. */
export const RENEW_MS = 2_500;
const TEMPORARY = ".tmp_";

const log = logger("layerscale::dynamo::discovery");
const code = (error: unknown) => (error as NodeJS.ErrnoException).code;

/**
 * Records as files below one directory, one flat folder per bucket. A file appears complete or not at all (link of a temporary
 * name), since readers look once; it stays alive by its mtime. The timer runs on the main thread, which no engine call blocks.
 */
export class FileDiscovery implements Discovery {
  readonly #own = new Map<string, { record: DiscoveryRecord; text: string }>();
  #timer: ReturnType<typeof setInterval> | null;

  /** @throws DiscoveryError when the directory cannot be made */
  constructor(
    readonly root: string,
    readonly instanceId: bigint,
    readonly clock: () => number = Date.now,
  ) {
    try {
      for (const bucket of BUCKETS) this.#folder(bucket);
    } catch (error) {
      throw new DiscoveryError(`DYN_FILE_KV: cannot use directory ${root}: ${(error as Error).message}`);
    }
    this.#timer = setInterval(() => this.renew(), RENEW_MS);
    this.#timer.unref();
  }

  async add(record: DiscoveryRecord): Promise<void> {
    const path = this.#path(record.bucket, record.key);
    const text = stringifyJson(record.value);
    try {
      this.#create(record.bucket, path, text);
    } catch (error) {
      throw new DiscoveryError(code(error) === "EEXIST" ? `record ${path} exists` : `cannot write record ${path}: ${(error as Error).message}`);
    }
    this.#own.set(path, { record, text });
  }

  async remove(bucket: Bucket, key: string): Promise<void> {
    const path = this.#path(bucket, key);
    this.#own.delete(path);
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
        if (statSync(join(folder, name)).mtimeMs < this.clock() - TTL_MS) continue;
        out.push({ bucket, key, value: parseJson(readFileSync(join(folder, name), "utf8")) });
      } catch (error) {
        log.debug("record skipped", { path: join(folder, name), error });
      }
    }
    return out;
  }

  async close(): Promise<void> {
    if (this.#timer) clearInterval(this.#timer);
    this.#timer = null;
    for (const path of this.#own.keys()) this.#unlink(path);
    this.#own.clear();
  }

  /** Touches own files, writes those again that somebody removed, and drops what other processes left to expire. */
  renew(): void {
    const now = this.clock() / 1000;
    for (const [path, { record, text }] of this.#own) {
      try {
        utimesSync(path, now, now);
      } catch (error) {
        try {
          this.#create(record.bucket, path, text);
          log.warn("discovery record was gone and is written again", { path, cause: code(error) });
        } catch (failure) {
          log.error("discovery record cannot be renewed", { path, error: failure });
        }
      }
    }
    for (const bucket of BUCKETS) this.#expire(bucket);
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

  #create(bucket: Bucket, path: string, text: string): void {
    const temporary = join(this.#folder(bucket), `${TEMPORARY}${randomBytes(8).toString("hex")}`);
    writeFileSync(temporary, text, { flag: "wx", mode: 0o644 });
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
        if (statSync(path).mtimeMs >= this.clock() - TTL_MS) continue;
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
