import { homedir } from "node:os";
import { join, resolve } from "node:path";
import type { HubEnvironment } from "./engine-config.ts";
import { UsageError } from "./flags.ts";
import { boolean, type Env, integer, readVariables, text, variable, type Variable, variablesHelp } from "./variable.ts";

type Read = Omit<HubEnvironment, "cacheDir" | "tokenPath"> & { home: string | null; cache: string | null; oldCache: string | null; oldToken: string | null; tokenPath: string | null };

const token = (name: string, shown: string, help: string) =>
  variable<string | null>(name, shown, help, null, (value) => {
    const bare = value.trim();
    // The value is a secret, so the message does not show it.
    if (!/^[\x21-\x7e]*$/.test(bare)) throw new UsageError(`${name}: expected a token of printable characters without spaces`);
    return bare === "" ? null : bare;
  });

/** Names, defaults and meaning are those of huggingface_hub, which shares the cache. */
export const HUB_VARIABLES = {
  home: text("HF_HOME", "~/.cache/huggingface", "directory of the hub's cache (below hub/) and token file (token)", null),
  cache: text("HF_HUB_CACHE", "$HF_HOME/hub", "directory of downloaded models", null),
  oldCache: text("HUGGINGFACE_HUB_CACHE", "none", "older name of HF_HUB_CACHE", null),
  token: token("HF_TOKEN", "the token file", "token for private and gated models"),
  oldToken: token("HUGGING_FACE_HUB_TOKEN", "none", "older name of HF_TOKEN"),
  tokenPath: text("HF_TOKEN_PATH", "$HF_HOME/token", "file with the token", null),
  endpoint: variable<string>("HF_ENDPOINT", "https://huggingface.co", "address of the hub or a mirror of it", "https://huggingface.co", (value, fail) => {
    if (!URL.canParse(value) || !/^https?:$/.test(new URL(value).protocol)) throw fail("an http:// or https:// address");
    const { username, password, search, hash, origin, pathname } = new URL(value);
    // Every message that names the hub would show them.
    if (username !== "" || password !== "") throw new UsageError("HF_ENDPOINT: expected an address without a user name and password; a token belongs into HF_TOKEN");
    if (search !== "" || hash !== "") throw fail("an address without ? and #, to which paths of the hub can be added");
    return (origin + pathname).replace(/\/+$/, "");
  }),
  offline: boolean("HF_HUB_OFFLINE", "ask no hub: models must be in the cache", false),
  metadataSeconds: integer("HF_HUB_ETAG_TIMEOUT", "10", "seconds the hub may take to answer a question about a file", 10, 1, 3600),
  stallSeconds: integer("HF_HUB_DOWNLOAD_TIMEOUT", "10", "seconds a download may stand still before it is tried again", 10, 1, 3600),
  noBar: boolean("HF_HUB_DISABLE_PROGRESS_BARS", "no bar on a terminal; log lines instead", false),
} satisfies Record<keyof Read, Variable<unknown>>;

/** "~" as shells know it; in a manifest no shell expands it. */
const expand = (path: string, home: string): string => resolve(path.replace(/^~(?=\/|$)/, home));

/** @throws UsageError naming the variable, its value and what was expected */
export function readHubEnvironment(env: Env): HubEnvironment {
  const { home, cache, oldCache, oldToken, tokenPath, ...read } = readVariables<Read>(HUB_VARIABLES, env);
  const user = env.HOME || homedir();
  const hfHome = expand(home ?? join(env.XDG_CACHE_HOME || join(user, ".cache"), "huggingface"), user);
  return Object.freeze({
    ...read,
    token: read.token ?? oldToken,
    cacheDir: expand(cache ?? oldCache ?? join(hfHome, "hub"), user),
    tokenPath: expand(tokenPath ?? join(hfHome, "token"), user),
  });
}

export const hubEnvironmentHelp = (): string => variablesHelp(HUB_VARIABLES);
