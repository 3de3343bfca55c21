import { lstatSync, mkdirSync, readFileSync, renameSync, rmSync, writeFileSync } from "node:fs";
import { homedir, tmpdir } from "node:os";
import { isAbsolute, join, resolve } from "node:path";
import { logger } from "../telemetry/log.ts";
import { reason } from "./files.ts";
import { ModelError } from "./types.ts";

const log = logger("layerscale::model");

/** Contents by file name. */
export type FileSet = Record<string, string>;

/**
 * Writes a set of files into `<dir>/<name>/` and returns that directory. Without dir (or ""): layerscale/<kind>/ in the user's cache directory, and when that
 * cannot be written, a private directory under the temporary one. Each file is written aside and renamed, so a reader never sees part of
 * one; files that already hold the content are left alone, so a restart and several processes at once are fine.
 * @throws ModelError when no place can be written.
 */
export function writeFileSet(model: string, kind: string, name: string, files: FileSet, dir?: string): string {
  if (dir) {
    try {
      return writeInto(join(resolve(dir), name), files);
    } catch (error) {
      throw new ModelError(model, "", `its tokenizer and settings cannot be written to ${dir}: ${reason(error)}`);
    }
  }
  const cache = join(cacheHome(), "layerscale", kind, name);
  try {
    return writeInto(cache, files);
  } catch (error) {
    const fallback = join(privateTemporaryDirectory(model, error), kind, name);
    try {
      const path = writeInto(fallback, files);
      log.warn("the cache directory cannot be written, the temporary directory is used", { cache, path, error });
      return path;
    } catch (second) {
      throw new ModelError(model, "", `its tokenizer and settings can be written neither to ${cache} (${reason(error)}) nor to ${fallback} (${reason(second)})`);
    }
  }
}

/** XDG_CACHE_HOME counts only when absolute, as its specification says. */
function cacheHome(): string {
  const xdg = process.env.XDG_CACHE_HOME;
  return xdg && isAbsolute(xdg) ? xdg : join(process.env.HOME || homedir(), ".cache");
}

/** The temporary directory is shared: a directory that somebody else made there is not used. */
function privateTemporaryDirectory(model: string, cause: unknown): string {
  const uid = process.getuid?.() ?? 0;
  const path = join(tmpdir(), `layerscale-${uid}`);
  try {
    mkdirSync(path, { recursive: true, mode: 0o700 });
    const stat = lstatSync(path);
    if (!stat.isDirectory() || stat.uid !== uid) throw new Error("it belongs to another user");
  } catch (error) {
    throw new ModelError(model, "", `the cache directory cannot be written (${reason(cause)}), nor can ${path}: ${reason(error)}`);
  }
  return path;
}

function writeInto(directory: string, files: FileSet): string {
  mkdirSync(directory, { recursive: true });
  for (const [name, content] of Object.entries(files)) {
    const path = join(directory, name);
    if (holds(path, content)) continue;
    const temporary = join(directory, `.${name}.${process.pid}.${crypto.randomUUID()}`);
    try {
      writeFileSync(temporary, content, { flag: "wx" });
      renameSync(temporary, path);
    } catch (error) {
      rmSync(temporary, { force: true });
      throw error;
    }
  }
  return directory;
}

function holds(path: string, content: string): boolean {
  try {
    return lstatSync(path).isFile() && readFileSync(path, "utf8") === content;
  } catch {
    return false;
  }
}
