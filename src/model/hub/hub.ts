import { join } from "node:path";
import type { HubEnvironment } from "../../config/engine-config.ts";
import { logger } from "../../telemetry/log.ts";
import { isCommit, RepoCache } from "./cache.ts";
import { HubClient, type RemoteFile, type RepoListing, type RetryPolicy } from "./client.ts";
import { diskError, downloadBlob, leftover } from "./download.ts";
import { HubError } from "./errors.ts";
import { bytesText, Progress, type ProgressOutput } from "./progress.ts";
import { type RepoReference, referenceText } from "./reference.ts";
import { ggufOf, INDEX, settingsOf, shardsOf, SINGLE, weightsOf } from "./select.ts";

const log = logger("layerscale::model::hub");
/** Files in transfer at once. */
const PARALLEL = 8;
/** Left free beside the download: the cache is rarely alone on its disk. */
const SPARE_BYTES = 64 << 20;

export interface HubOptions {
  /** Ends everything at once; what has come stays. */
  signal?: AbortSignal;
  /** Judges a model directory that has its settings and no weights yet. @throws to refuse it */
  onSettings?: (directory: string) => void;
  output?: ProgressOutput;
  retry?: RetryPolicy;
}

const standardOutput = (env: HubEnvironment): ProgressOutput => ({
  terminal: process.stderr.isTTY && !env.noBar ? (text) => void process.stderr.write(text) : null,
  now: () => performance.now(),
});

/**
 * A model of the hub as a local path: a snapshot's directory, or the .gguf file in it. Downloads what is missing; asks nobody when the cache has all
 * of a commit, or when HF_HUB_OFFLINE is set.
 * @throws HubError, ModelError; the signal's reason when it is raised
 */
export async function fetchModel(reference: RepoReference, env: HubEnvironment, options: HubOptions = {}): Promise<string> {
  const cache = new RepoCache(env.cacheDir, reference.repo);
  const name = `--model ${referenceText(reference)}`;
  const revision = reference.revision ?? "main";
  const pinned = isCommit(revision) ? cachedModel(cache, reference, revision) : null;
  if (pinned?.path != null) return pinned.path;
  if (env.offline) {
    const found = pinned ?? cachedAt(cache, reference, revision);
    if (found.path !== null) return found.path;
    throw new HubError("unreachable", `${name}: HF_HUB_OFFLINE is set and ${found.missing} in ${env.cacheDir} (HF_HUB_CACHE)`);
  }
  const signal = options.signal ?? new AbortController().signal;
  const client = new HubClient(reference, env, signal, options.retry);
  const cached = cachedAt(cache, reference, revision).path;
  let listing: RepoListing;
  try {
    // With a model at hand there is no need to insist.
    listing = await (cached === null ? client : client.with(signal, 1)).listing();
  } catch (error) {
    if (cached === null || !(error instanceof HubError) || error.kind === "missing") throw error;
    log.warn("the hub cannot be asked, the model in the cache is used", { path: cached, error });
    return cached;
  }
  return new Download(client, cache, listing, options.output ?? standardOutput(env), options.onSettings ?? (() => {})).run();
}

/** What the cache has of a model. `missing` says in words what it lacks when there is no path. */
export type CachedModel = { path: string } | { path: null; missing: string };

export function cachedAt(cache: RepoCache, reference: RepoReference, revision: string): CachedModel {
  const commit = cache.commitOf(revision);
  return commit === null ? { path: null, missing: `no commit of revision "${revision}" is known` } : cachedModel(cache, reference, commit);
}

function cachedModel(cache: RepoCache, reference: RepoReference, commit: string): CachedModel {
  const snapshot = cache.snapshot(commit);
  if (reference.file !== null) {
    return cache.has(commit, reference.file) ? { path: join(snapshot, reference.file) } : { path: null, missing: `${reference.file} of commit ${commit} is not` };
  }
  const lacking = (files: string[]) => files.find((file) => !cache.has(commit, file));
  const missing = (file: string): CachedModel => ({ path: null, missing: `${file} of commit ${commit} is not` });
  if (!cache.has(commit, "config.json")) {
    const gguf = onlyGguf(snapshot);
    return gguf === null ? missing("config.json") : { path: join(snapshot, gguf) };
  }
  // An interrupted download of others may have the weights already and not yet the template.
  const listed = cache.listed(commit);
  const setting = lacking(["tokenizer.json", ...(listed === null ? [] : settingsOf(listed))]);
  if (setting !== undefined) return missing(setting);
  if (cache.has(commit, SINGLE)) return { path: snapshot };
  if (!cache.has(commit, INDEX)) return missing(SINGLE);
  let shards: string[];
  try {
    shards = shardsOf(join(snapshot, INDEX));
  } catch {
    return missing(`a readable ${INDEX}`);
  }
  const shard = lacking(shards);
  return shard === undefined ? { path: snapshot } : missing(shard);
}

function onlyGguf(snapshot: string): string | null {
  try {
    const found = [...new Bun.Glob("**/*.gguf").scanSync({ cwd: snapshot, followSymlinks: false, onlyFiles: false })];
    return found.length === 1 ? found[0]! : null;
  } catch {
    return null;
  }
}

/** @returns bytes that are free; null = nobody can tell. @throws HubError when a download of `needed` bytes would not leave the spare ones */
export function requireRoom(cache: RepoCache, needed: number, name: string): number | null {
  const free = cache.freeBytes();
  if (free !== null && needed > 0 && needed + SPARE_BYTES > free)
    throw new HubError("local", `${name}: ${bytesText(needed)} are still to be downloaded, but only ${bytesText(free)} are free in ${cache.root} (HF_HUB_CACHE)${needed > free ? "" : `, of which ${bytesText(SPARE_BYTES)} must stay free`}`);
  return free;
}

/** One model on its way into the cache: settings first, so that a model which cannot be served is refused before its weights are on the line. */
class Download {
  private readonly names: ReadonlySet<string>;

  constructor(
    private readonly client: HubClient,
    private readonly cache: RepoCache,
    private readonly listing: RepoListing,
    private readonly output: ProgressOutput,
    private readonly onSettings: (directory: string) => void,
  ) {
    this.names = new Set(listing.files.keys());
  }

  async run(): Promise<string> {
    const { client, cache, listing, names } = this;
    const gguf = ggufOf(names, client.reference.file);
    if (gguf && "problem" in gguf) throw new HubError("missing", `${client.name}: ${gguf.problem}`);
    const snapshot = cache.snapshot(listing.commit);
    if (gguf) await this.bring([gguf.file]);
    else {
      if (!names.has("tokenizer.json")) throw new HubError("missing", `${client.name}: the repo has no tokenizer.json, which a model directory needs`);
      await this.bring(settingsOf(names));
      this.onSettings(snapshot);
      const weights = weightsOf(names, snapshot);
      const absent = weights.find((file) => !names.has(file));
      if (absent !== undefined) throw new HubError("missing", `${client.name}: ${INDEX} names ${absent}, which the repo does not have`);
      await this.bring(weights);
    }
    this.remember();
    return gguf ? join(snapshot, gguf.file) : snapshot;
  }

  /** The branch points to the new commit once all of it is there: until then a start without the hub finds the old one. */
  private remember(): void {
    try {
      this.cache.setRef(this.client.reference.revision ?? "main", this.listing.commit);
    } catch (error) {
      log.warn("the cache cannot be written, the revision is asked again next time", { error });
    }
  }

  private async bring(paths: readonly string[]): Promise<void> {
    const { client, cache, listing } = this;
    // One of another length than the listing tells was cut by something else.
    const absent = paths.filter((path) => !cache.has(listing.commit, path, listing.files.get(path)?.size));
    if (absent.length === 0) return;
    const files = await inParallel(absent, client, (path, worker) => worker.head(listing.commit, path, listing.files.get(path)));
    try {
      cache.prepare();
    } catch (error) {
      throw diskError(client, cache, "its folder", error);
    }
    const missing = files.filter((file) => !cache.hasBlob(file.etag, file.size));
    // Files of equal content are one blob.
    const blobs = [...new Map(missing.map((file) => [file.etag, file])).values()].sort((a, b) => a.size - b.size);
    if (blobs.length > 0) await this.download(blobs);
    for (const file of files) {
      try {
        cache.link(listing.commit, file.path, file.etag);
      } catch (error) {
        throw diskError(client, cache, file.path, error);
      }
    }
  }

  private async download(blobs: readonly RemoteFile[]): Promise<void> {
    const { client, cache, listing } = this;
    const total = blobs.reduce((sum, { size }) => sum + size, 0);
    let there = 0;
    for (const file of blobs) there += await leftover(cache, file);
    const needed = total - there;
    requireRoom(cache, needed, client.name);
    const progress = new Progress(client.reference.repo, total, blobs.length, this.output);
    progress.start();
    let complete = false;
    try {
      await inParallel(blobs, client, (file, worker) => downloadBlob(worker, cache, listing.commit, file, progress));
      complete = true;
    } finally {
      progress.stop(complete);
    }
  }
}

/** Works through a list with a bounded number of hands; the first failure ends the others and is thrown when they have ended. */
export async function inParallel<T, R>(items: readonly T[], client: HubClient, work: (item: T, client: HubClient) => Promise<R>): Promise<R[]> {
  const failed = new AbortController();
  const worker = client.with(AbortSignal.any([client.signal, failed.signal]));
  const results: R[] = [];
  let next = 0;
  let cause: { error: unknown } | null = null;
  const hand = async (): Promise<void> => {
    while (next < items.length && cause === null) {
      const at = next++;
      try {
        results[at] = await work(items[at]!, worker);
      } catch (error) {
        cause ??= { error };
        failed.abort();
      }
    }
  };
  await Promise.all(Array.from({ length: Math.min(PARALLEL, items.length) }, hand));
  client.signal.throwIfAborted();
  if (cause !== null) throw (cause as { error: unknown }).error;
  return results;
}
