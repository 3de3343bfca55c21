import { existsSync } from "node:fs";
import { HubError } from "./errors.ts";

/** A model of the hub as --model names it. */
export interface RepoReference {
  /** "org/name", or "name" of the oldest repos. */
  repo: string;
  /** Branch, tag, `refs/pr/N` or commit; null = main. */
  revision: string | null;
  /** A .gguf file of the repo, with its folders. */
  file: string | null;
}

const NAME = "[A-Za-z0-9_](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?";
const REFERENCE = new RegExp(`^((?:${NAME}/)?${NAME})(?:@([^:@\\s]+))?(?::(.+))?$`);
/** What git takes for a ref, as far as a path below refs/ could be harmed by it. */
const REVISION = /^(?!.*(?:\.\.|\/\/|\/\.|\.lock(?:\/|$)))[A-Za-z0-9_][A-Za-z0-9._+/-]{0,254}$/;

/** What a local path looks like, whether it exists or not. */
const PATH_LIKE = /^[./~]|\/$|\\|\/.*\/|\.(gguf|safetensors|json|bin)$/i;

/**
 * What --model means: null for a local path, which wins whenever it exists; else a repo.
 * @throws HubError for what looks like a path and is not there, or like neither
 */
export function parseReference(model: string): RepoReference | null {
  if (!model.includes("\0") && existsSync(model)) return null;
  const [, repo, revision, file] = REFERENCE.exec(model) ?? [];
  if (/^\w+:\/\//.test(model)) throw new HubError("local", `--model: "${model}" is an address; expected the repo id alone, such as org/name`);
  const head = model.split(/[@:]/, 1)[0]!;
  if (PATH_LIKE.test(repo ?? head) || model === "") throw new HubError("local", `--model: "${model}" does not exist; expected a model directory, a .gguf file, or a repo id such as org/name`);
  if (repo === undefined || repo.includes("--") || repo.includes("..") || repo.endsWith(".git"))
    throw new HubError("local", `--model: "${model}" is neither a path that exists nor a repo id; expected org/name, org/name@revision or org/name:file.gguf`);
  if (revision !== undefined && !REVISION.test(revision)) throw new HubError("local", `--model: "${model}": "${revision}" cannot be a revision; expected a branch, a tag or a commit`);
  if (file !== undefined && (!/\.gguf$/i.test(file) || !isRepoPath(file))) throw new HubError("local", `--model: "${model}": expected a .gguf file behind the colon, got "${file}"`);
  return { repo, revision: revision ?? null, file: file ?? null };
}

/** A path inside a repo: nothing that leaves it once joined to a directory. */
export const isRepoPath = (path: string): boolean => path.length <= 512 && path.split("/").every((part) => part !== "" && part !== "." && part !== "..") && !/[\\\p{Cc}]/u.test(path);

/** As it was written; workers are one group by this text. */
export const referenceText = ({ repo, revision, file }: RepoReference): string => `${repo}${revision === null ? "" : `@${revision}`}${file === null ? "" : `:${file}`}`;
