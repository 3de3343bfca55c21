import { createHash, type Hash } from "node:crypto";
import { constants } from "node:fs";
import { type FileHandle, open, rename } from "node:fs/promises";
import { logger } from "../../telemetry/log.ts";
import { FileLock } from "../../util/flock.ts";
import { reason } from "../files.ts";
import type { RepoCache } from "./cache.ts";
import type { HubClient, RemoteFile } from "./client.ts";
import { HubError, RangeRefused, TransientError } from "./errors.ts";
import { pieces } from "./http.ts";
import type { Progress } from "./progress.ts";

const log = logger("layerscale::model::hub");
const READ_BYTES = 1 << 20;
const NO_ROOM = new Set(["ENOSPC", "EDQUOT"]);

/** sha256 is of the bytes, sha1 of git's blob with its header; null = there is nothing to check against. */
function hashOf({ checksum, size }: RemoteFile): Hash | null {
  if (checksum === null) return null;
  return checksum.length === 64 ? createHash("sha256") : createHash("sha1").update(`blob ${size}\0`);
}

/** What went wrong with the disk, in the words of whoever set it up. */
export function diskError(client: HubClient, cache: RepoCache, what: string, error: unknown): HubError {
  const code = (error as NodeJS.ErrnoException).code ?? "";
  const meaning = NO_ROOM.has(code) ? "the disk is full; make room, the download goes on from there" : ["EACCES", "EPERM", "EROFS"].includes(code) ? "this user may not write there" : "it cannot be written";
  return new HubError("local", `${client.name}: ${what} in ${cache.root} (HF_HUB_CACHE): ${meaning} (${reason(error)})`);
}

/** Bytes of a file that an earlier download left, as far as they can be used. */
export async function leftover(cache: RepoCache, file: RemoteFile): Promise<number> {
  const size = await Bun.file(cache.incomplete(file.etag)).stat().then((found) => found.size, () => 0);
  return size <= file.size ? size : 0;
}

/**
 * Brings one blob into the cache: complete and checked, or not at all. What has come stays in `<etag>.incomplete` whatever happens, and the next try
 * asks for the rest. Writes go to their own offsets, so that two processes without a lock between them write the same bytes to the same places.
 * @throws HubError; the signal's reason when it is raised
 */
export async function downloadBlob(client: HubClient, cache: RepoCache, commit: string, file: RemoteFile, progress: Progress): Promise<void> {
  const { signal } = client;
  let lock: FileLock;
  try {
    lock = await FileLock.acquire(cache.lock(file.etag), signal, () => log.info("another process downloads the file, waiting", { file: file.path }));
  } catch (error) {
    signal.throwIfAborted();
    throw diskError(client, cache, "the lock of a file", error);
  }
  try {
    if (cache.hasBlob(file.etag, file.size)) return progress.add(file.size, true);
    await fill(client, cache, commit, file, progress);
  } finally {
    lock.release();
  }
}

async function fill(client: HubClient, cache: RepoCache, commit: string, file: RemoteFile, progress: Progress): Promise<void> {
  const path = cache.incomplete(file.etag);
  const disk = <T>(work: Promise<T>): Promise<T> => work.catch((error: unknown) => Promise.reject(diskError(client, cache, file.path, error)));
  const handle = await disk(open(path, constants.O_RDWR | constants.O_CREAT, 0o666));
  try {
    const part = new Part(client, commit, file, handle, progress, disk);
    await part.resume();
    for (let corrupt = 0; ; corrupt++) {
      await part.complete();
      if (part.matches()) break;
      // Part of it may come from another time, or from a machine that lost power.
      await part.restart();
      if (corrupt > 0) throw new HubError("local", `${client.name}: ${file.path}: the bytes do not match the checksum ${file.checksum} that the hub gives, twice; a proxy or mirror alters them, or the file is damaged there`);
      log.warn("the checksum does not match, the file is downloaded anew", { file: file.path });
    }
    await disk(handle.sync());
    await disk(rename(path, cache.blob(file.etag))).catch((error: unknown) => {
      // Without working locks another process may have finished the same file.
      if (!cache.hasBlob(file.etag, file.size)) throw error;
    });
  } finally {
    await handle.close();
  }
}

/** The growing file and the hash of what is in it. */
class Part {
  private have = 0;
  private hash: Hash | null;

  constructor(
    private readonly client: HubClient,
    private readonly commit: string,
    private readonly file: RemoteFile,
    private readonly handle: FileHandle,
    private readonly progress: Progress,
    private readonly disk: <T>(work: Promise<T>) => Promise<T>,
  ) {
    this.hash = hashOf(file);
  }

  /** Takes over what is there; longer than the file it cannot be a part of it. */
  async resume(): Promise<void> {
    const { size } = await this.disk(this.handle.stat());
    if (size > this.file.size) return this.restart();
    const piece = Buffer.allocUnsafe(READ_BYTES);
    while (this.have < size) {
      this.client.signal.throwIfAborted();
      const { bytesRead } = await this.disk(this.handle.read(piece, 0, Math.min(piece.length, size - this.have), this.have));
      if (bytesRead === 0) break;
      this.take(piece.subarray(0, bytesRead), true);
    }
  }

  async restart(): Promise<void> {
    this.rewind();
    await this.disk(this.handle.truncate(0));
  }

  /** Asks for what is missing until it is there. */
  async complete(): Promise<void> {
    let best = this.have;
    await this.client.persist(this.file.path, async () => {
      while (this.have < this.file.size) await this.receive();
    }, () => {
      const gained = this.have > best;
      best = Math.max(best, this.have);
      return gained;
    });
  }

  matches(): boolean {
    return this.hash === null || this.hash.copy().digest("hex") === this.file.checksum;
  }

  private async receive(): Promise<void> {
    const { client, file } = this;
    const answer = await client.open(this.commit, file.path, this.have).catch((error: unknown) => {
      if (error instanceof RangeRefused) this.rewind();
      throw error;
    });
    const { status, headers } = answer.response;
    if (status === 206 ? !headers.get("content-range")?.startsWith(`bytes ${this.have}-`) : this.have > 0) {
      // The whole file instead of its rest.
      if (status === 206) {
        answer.abort();
        throw new TransientError(`${answer.url.host} sends another range than was asked for`);
      }
      this.rewind();
    }
    const from = this.have;
    for await (const piece of pieces(answer, client.env.stallSeconds * 1000, client.signal)) {
      if (this.have + piece.length > file.size) {
        const over = this.have + piece.length;
        this.rewind();
        throw new TransientError(`${answer.url.host} sends more than the ${file.size} bytes that the file has (${over})`);
      }
      for (let done = 0; done < piece.length; ) {
        const { bytesWritten } = await this.disk(this.handle.write(piece, done, piece.length - done, this.have + done));
        done += bytesWritten;
      }
      this.take(piece, false);
    }
    if (this.have < file.size) throw new TransientError(`${answer.url.host} ended the transfer after ${this.have - from} of ${file.size - from} bytes`);
  }

  private take(piece: Uint8Array, old: boolean): void {
    this.hash?.update(piece);
    this.have += piece.length;
    this.progress.add(piece.length, old);
  }

  private rewind(): void {
    this.progress.add(-this.have, true);
    this.have = 0;
    this.hash = hashOf(this.file);
  }
}
