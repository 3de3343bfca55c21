import { readFileSync } from "node:fs";
import type { HubEnvironment } from "../../config/engine-config.ts";
import { logger } from "../../telemetry/log.ts";
import { isCommit } from "./cache.ts";
import { HubError, RangeRefused, TransientError } from "./errors.ts";
import { type Answer, pause, pieces, request, retryAfterMs } from "./http.ts";
import { isRepoPath, type RepoReference, referenceText } from "./reference.ts";

const log = logger("layerscale::model::hub");
/** Listings of the largest repos have a few MB. */
const MAX_LISTING_BYTES = 64 << 20;
/** However steadily it drips. */
const MAX_LISTING_MS = 60_000;
const LISTING = "listing of the repo";
/** An etag becomes a file name. */
const ETAG = /^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$/;

export interface RepoListing {
  commit: string;
  /** Path in the repo -> what the listing knows of it. */
  files: Map<string, { size: number | null; etag: string | null }>;
}

/** A file at one commit. */
export interface RemoteFile {
  path: string;
  /** Name of its blob: sha256 of large files (64 hex digits), git's sha1 of others (40), whatever else a mirror says. */
  etag: string;
  /** What its bytes are checked against: sha256 of them, or sha1 of git's blob, in hex; null = the hub tells neither. */
  checksum: string | null;
  /** Bytes. */
  size: number;
}

export interface RetryPolicy {
  /** Tries in a row without a byte gained. */
  tries: number;
  /** Pause after the first; doubles. */
  firstPauseMs: number;
}
export const DEFAULT_RETRY: RetryPolicy = { tries: 5, firstPauseMs: 1000 };
const MAX_PAUSE_MS = 30_000;

/** The hub's HTTP as far as a download needs it: listing of a revision, head of a file, bytes of a file. */
export class HubClient {
  readonly name: string;

  constructor(
    readonly reference: RepoReference,
    readonly env: HubEnvironment,
    readonly signal: AbortSignal,
    private readonly retry: RetryPolicy = DEFAULT_RETRY,
    private readonly listingMs = MAX_LISTING_MS,
    private readonly token = env.token ?? tokenOfFile(env.tokenPath),
  ) {
    this.name = `--model ${referenceText(reference)}`;
  }

  /** The same under another signal, or with another number of tries. */
  with(signal: AbortSignal, tries = this.retry.tries): HubClient {
    return new HubClient(this.reference, this.env, signal, { ...this.retry, tries }, this.listingMs, this.token);
  }

  /** What the revision is and which files it has. @throws HubError */
  async listing(): Promise<RepoListing> {
    const revision = this.reference.revision ?? "main";
    const url = `${this.env.endpoint}/api/models/${this.reference.repo}/revision/${encodeURIComponent(revision)}?blobs=true`;
    const body = await this.persist(LISTING, async () => {
      const answer = await request("GET", url, {}, this.token, this.env.metadataSeconds * 1000, this.signal, () => true);
      if (answer.response.ok) return this.small(answer);
      answer.abort();
      throw this.refusal(answer, null);
    });
    return this.parse(body, revision);
  }

  /** Etag and size of a file. @throws HubError */
  async head(commit: string, path: string, listed: { size: number | null; etag: string | null } | undefined): Promise<RemoteFile> {
    return this.persist(path, async () => {
      // A redirect to where large files lie is the answer: it names them. One of a mirror that does not is followed.
      const answer = await request("HEAD", this.fileUrl(commit, path), {}, this.token, this.env.metadataSeconds * 1000, this.signal, (response) => etagOf(response) === null);
      const { response } = answer;
      answer.abort();
      if (response.status >= 400) throw this.refusal(answer, path);
      const etag = etagOf(response) ?? listed?.etag ?? null;
      const size = sizeOf(response) ?? listed?.size ?? null;
      if (etag === null || !ETAG.test(etag) || size === null)
        throw new HubError("unreachable", `${this.name}: ${this.env.endpoint} does not tell ${etag === null || !ETAG.test(etag) ? "an etag" : "the size"} of ${path}, as a hub does; check HF_ENDPOINT and proxies`);
      return { path, etag, checksum: checksumOf(etag) ?? checksumOf(listed?.etag ?? ""), size };
    });
  }

  /** Starts the transfer of a file from byte `from`. @throws HubError, TransientError */
  async open(commit: string, path: string, from: number): Promise<Answer> {
    const answer = await request("GET", this.fileUrl(commit, path), from > 0 ? { range: `bytes=${from}-` } : {}, this.token, this.env.stallSeconds * 1000, this.signal, () => true);
    if (answer.response.status === 200 || answer.response.status === 206) return answer;
    answer.abort();
    if (from > 0 && answer.response.status === 416) throw new RangeRefused(`${answer.url.host} answers 416 to the rest from byte ${from} on`);
    // Addresses of large files are signed and expire; another try gets another one.
    if (answer.url.origin !== new URL(this.env.endpoint).origin) throw new TransientError(`${answer.url.host} answers ${answer.response.status}`, retryAfterMs(answer.response));
    throw this.refusal(answer, path);
  }

  /**
   * Tries again what may work the next time, with growing pauses.
   * @param gained whether the last try got somewhere: then counting starts again
   * @throws HubError of the last try
   */
  async persist<T>(what: string, attempt: () => Promise<T>, gained: () => boolean = () => false): Promise<T> {
    for (let tried = 1; ; tried++) {
      try {
        return await attempt();
      } catch (error) {
        this.signal.throwIfAborted();
        if (!(error instanceof TransientError)) throw error;
        if (gained()) tried = 1;
        if (tried >= this.retry.tries || error.hopeless) throw new HubError("unreachable", `${this.name}: ${what}: ${error.message}${tried === 1 ? "" : ` (${tried} tries)`}${what === LISTING ? "" : "; the download goes on from there when it is started again"}`);
        const waitMs = error.retryAfterMs ?? Math.min(this.retry.firstPauseMs * 2 ** (tried - 1), MAX_PAUSE_MS) * (0.75 + Math.random() / 2);
        log.warn("the hub is asked again", { repo: this.reference.repo, file: what, error: error.message, attempt: tried, waitMs: Math.round(waitMs) });
        await pause(waitMs, this.signal);
      }
    }
  }

  private fileUrl(commit: string, path: string): string {
    return `${this.env.endpoint}/${this.reference.repo}/resolve/${commit}/${path.split("/").map(encodeURIComponent).join("/")}`;
  }

  /** What a status means for whoever typed --model. */
  private refusal({ response, url }: Answer, path: string | null): HubError | TransientError {
    const { status } = response;
    if (status === 408 || status === 429 || status >= 500) return new TransientError(`${url.host} answers ${status}`, retryAfterMs(response));
    const code = response.headers.get("x-error-code");
    const words = response.headers.get("x-error-message") ?? "";
    const { repo, revision } = this.reference;
    const page = `${this.env.endpoint}/${repo}`;
    if (code === "GatedRepo")
      return new HubError("denied", `${this.name}: access to this repo is gated; ${this.token === null ? `accept its conditions on ${page} and set HF_TOKEN to a token of that account` : `the account of the token has no access: accept the conditions on ${page}`}`);
    if (status === 401 && /invalid/i.test(words)) return new HubError("denied", `${this.name}: ${url.host} refuses the token (HF_TOKEN or ${this.env.tokenPath}): ${words}`);
    if (code === "RevisionNotFound") return new HubError("missing", `${this.name}: the repo has no revision "${revision ?? "main"}"; expected a branch, a tag or a commit`);
    if (code === "EntryNotFound" || (status === 404 && path !== null && code === null)) return new HubError("missing", `${this.name}: the repo has no file ${path} at this revision`);
    if (code === "RepoNotFound" || status === 401 || status === 404)
      return new HubError("missing", `${this.name}: ${url.host} knows no such repo${this.token === null ? ", or it is private and needs HF_TOKEN" : ", or the token has no access to it"}; nor is it a local path`);
    if (status === 403) return new HubError("denied", `${this.name}: ${url.host} denies access${words === "" ? "" : `: ${words}`}`);
    return new HubError("unreachable", `${this.name}: ${url.host} answers ${status}${words === "" ? "" : ` (${words})`}, expected a hub; check HF_ENDPOINT and proxies`);
  }

  private async small(answer: Answer): Promise<string> {
    const parts: Uint8Array[] = [];
    const end = performance.now() + this.listingMs;
    let bytes = 0;
    for await (const piece of pieces(answer, this.env.metadataSeconds * 1000, this.signal)) {
      bytes += piece.length;
      if (bytes > MAX_LISTING_BYTES) throw new HubError("unreachable", `${this.name}: the listing of the repo has more than ${MAX_LISTING_BYTES} bytes`);
      if (performance.now() > end) throw new TransientError(`${answer.url.host} has not sent all of it within ${this.listingMs / 1000} s`, null, true);
      parts.push(piece);
    }
    return Buffer.concat(parts).toString("utf8");
  }

  private parse(text: string, revision: string): RepoListing {
    const foreign = (what: string) => new HubError("unreachable", `${this.name}: ${this.env.endpoint} answers without ${what}, as no hub does; check HF_ENDPOINT and proxies`);
    let json: { sha?: unknown; siblings?: unknown };
    try {
      json = Object(JSON.parse(text));
    } catch {
      throw foreign("a listing in JSON");
    }
    if (typeof json.sha !== "string" || !isCommit(json.sha)) throw foreign(`the commit of "${revision}"`);
    if (!Array.isArray(json.siblings)) throw foreign("a list of files");
    const files: RepoListing["files"] = new Map();
    for (const entry of json.siblings as { rfilename?: unknown; size?: unknown; blobId?: unknown; lfs?: { sha256?: unknown } | null }[]) {
      const path = entry?.rfilename;
      // Names with parts like ".." are for nobody's disk.
      if (typeof path !== "string" || !isRepoPath(path)) continue;
      // The blob of a large file in git is its pointer.
      const etag = entry.lfs ? entry.lfs.sha256 : entry.blobId;
      files.set(path, { size: Number.isSafeInteger(entry.size) ? (entry.size as number) : null, etag: typeof etag === "string" ? etag : null });
    }
    return { commit: json.sha, files };
  }
}

/** The linked file's etag before the answer's own, bare of quotes and of the mark of weak ones. */
function etagOf(response: Response): string | null {
  const text = response.headers.get("x-linked-etag") ?? response.headers.get("etag");
  return text === null ? null : text.trim().replace(/^W\//, "").replace(/^"(.*)"$/, "$1");
}

/** Mirrors and proxies may give etags of their own; the listing then still has the hash. */
const checksumOf = (etag: string): string | null => (/^(?:[0-9a-f]{64}|[0-9a-f]{40})$/i.test(etag) ? etag.toLowerCase() : null);

function sizeOf(response: Response): number | null {
  // The length of a redirect's or a compressed answer's body is not the file's.
  const other = response.status >= 300 || !/^(identity)?$/i.test(response.headers.get("content-encoding") ?? "");
  const text = response.headers.get("x-linked-size") ?? (other ? null : response.headers.get("content-length"));
  return text !== null && /^\d{1,15}$/.test(text) ? Number(text) : null;
}

function tokenOfFile(path: string): string | null {
  try {
    const text = readFileSync(path, "utf8").trim();
    if (/^[\x21-\x7e]+$/.test(text)) return text;
    if (text !== "") log.warn("the token file holds no token of printable characters without spaces, the hub is asked without one", { path });
  } catch (error) {
    if ((error as NodeJS.ErrnoException).code !== "ENOENT") log.warn("the token file cannot be read, the hub is asked without a token", { path, error });
  }
  return null;
}
