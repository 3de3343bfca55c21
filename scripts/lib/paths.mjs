// Where things are: the checkout, and one cache for everything that is slow to make and safe to share between checkouts.
import { createHash } from "node:crypto";
import { existsSync, readdirSync, readFileSync, realpathSync, statSync } from "node:fs";
import { homedir } from "node:os";
import { basename, dirname, join, relative, resolve } from "node:path";
import { fileURLToPath } from "node:url";

export const root = join(dirname(fileURLToPath(import.meta.url)), "..", "..");
/** LAYERSCALE_CACHE_DIR, else $XDG_CACHE_HOME/layerscale, else ~/.cache/layerscale. Entries are named by content or version. */
export const cacheDir = realPath(resolve(process.env.LAYERSCALE_CACHE_DIR ?? join(process.env.XDG_CACHE_HOME ?? join(homedir(), ".cache"), "layerscale")));
export const dist = join(root, "dist");
export const executable = join(dist, "layerscale");

/** The path without links, as far as it exists: build trees hold their own path, which must not name a link that is gone tomorrow. */
function realPath(path) {
  if (existsSync(path)) return realpathSync(path);
  const above = dirname(path);
  return above === path ? path : join(realPath(above), basename(path));
}

/** The free community key: anyone may run the project with it. */
export const COMMUNITY_KEY =
  "LSK-eyJpZCI6ImNvbW11bml0eSIsInRpZXIiOiJjb21tdW5pdHkiLCJzZXNzaW9ucyI6NjQsImlhdCI6IjIwMjYtMTEtMjkifQ.lcTx_Dh_T6YnIdCNsOq1HeyZw6buDvl4wVSwwA2_nUrZs98pzxHUWlXf9DDPVRHU6PCbPgPAi9yiOEbJRo_SAw";

/** Hash of files (recursively, by path and content) and words: the name of a cache entry. */
export function contentHash(paths, words = []) {
  const hash = createHash("sha256");
  const visit = (path) => {
    if (statSync(path).isDirectory()) for (const name of readdirSync(path).sort()) visit(join(path, name));
    else hash.update(relative(root, path)).update("\0").update(readFileSync(path)).update("\0");
  };
  for (const path of paths) if (existsSync(path)) visit(path);
  for (const word of words) hash.update(String(word)).update("\0");
  return hash.digest("hex").slice(0, 16);
}
