import type { HubEnvironment } from "../../config/engine-config.ts";
import { isCommit, RepoCache } from "./cache.ts";
import { HubClient, type RetryPolicy } from "./client.ts";
import { diskError, leftover } from "./download.ts";
import { HubError } from "./errors.ts";
import { cachedAt, inParallel, requireRoom } from "./hub.ts";
import { type RepoReference, referenceText } from "./reference.ts";
import { ggufOf, INDEX, settingsOf, SINGLE } from "./select.ts";

/** What a start would find: a model in the cache (`note`: why it may not be the newest), or bytes to download. */
export type Probe = { path: string; note: string | null } | { path: null; bytes: number; files: number; freeBytes: number | null };

const ONE_TRY: RetryPolicy = { tries: 1, firstPauseMs: 0 };
/** As almost everybody names them, and any other name. */
const SHARDS = [/^model-\d+-of-\d+\.safetensors$/, /^[^/]+\.safetensors$/];

/** Looks at cache and hub as a start would, once, without writing anything. @throws HubError for what a start would end with */
export async function probeModel(reference: RepoReference, env: HubEnvironment, signal: AbortSignal): Promise<Probe> {
  const cache = new RepoCache(env.cacheDir, reference.repo);
  const revision = reference.revision ?? "main";
  const cached = cachedAt(cache, reference, revision);
  const name = `--model ${referenceText(reference)}`;
  if (env.offline || (isCommit(revision) && cached.path !== null)) {
    if (cached.path !== null) return { path: cached.path, note: env.offline ? "HF_HUB_OFFLINE is set" : null };
    throw new HubError("unreachable", `${name}: HF_HUB_OFFLINE is set and ${cached.missing} in ${env.cacheDir} (HF_HUB_CACHE)`);
  }
  const client = new HubClient(reference, env, signal, ONE_TRY);
  try {
    const { commit, files } = await client.listing();
    if (cached.path !== null && cache.commitOf(revision) === commit) return { path: cached.path, note: null };
    const names = new Set(files.keys());
    const gguf = ggufOf(names, reference.file);
    if (gguf && "problem" in gguf) throw new HubError("missing", `${name}: ${gguf.problem}`);
    if (!gguf && !names.has("tokenizer.json")) throw new HubError("missing", `${name}: the repo has no tokenizer.json, which a model directory needs`);
    // The index is not read here; shards are told by their names.
    const weights = names.has(SINGLE) ? [SINGLE] : (SHARDS.map((shard) => [...names].filter((file) => shard.test(file))).find((found) => found.length > 0) ?? []);
    if (!gguf && weights.length === 0) throw new HubError("missing", `${name}: ${INDEX} is there, but no .safetensors file that it could name`);
    const wanted = (gguf ? [gguf.file] : [...settingsOf(names), ...weights]).filter((file) => !cache.has(commit, file, files.get(file)?.size));
    const remote = (await inParallel(wanted, client, (file, worker) => worker.head(commit, file, files.get(file)))).filter((file) => !cache.hasBlob(file.etag, file.size));
    let bytes = 0;
    for (const file of remote) bytes += file.size - (await leftover(cache, file));
    const freeBytes = requireRoom(cache, bytes, name);
    try {
      cache.requireWritable();
    } catch (error) {
      throw diskError(client, cache, "its folder", error);
    }
    return { path: null, bytes, files: remote.length, freeBytes };
  } catch (error) {
    if (cached.path === null || !(error instanceof HubError) || error.kind === "missing") throw error;
    return { path: cached.path, note: `the hub cannot be asked: ${error.message}` };
  }
}
