/**
 * A hub on loopback: listing, heads, bytes with ranges, large files behind a redirect to another origin with signed addresses, as the real one serves
 * them; and what goes wrong with one, on request.
 */
import { createHash } from "node:crypto";
import { readdirSync, readFileSync } from "node:fs";
import { createServer, type IncomingMessage, type Server, type ServerResponse } from "node:http";
import type { AddressInfo } from "node:net";
import { join } from "node:path";

/** Above this a file is a large one: etag sha256, bytes from the other origin. */
export const LARGE_BYTES = 20_000;

export interface HubFile {
  bytes: Buffer;
  etag: string;
  large: boolean;
}

export interface HubRepo {
  commit: string;
  files: Map<string, HubFile>;
  /** Tokens that may read it; null = everybody. */
  readers: string[] | null;
  gated: boolean;
  /** Branches and tags. */
  refs: Record<string, string>;
}

export interface Asked {
  method: string;
  /** "hub" or "files": which of the two origins. */
  origin: "hub" | "files";
  path: string;
  range: string | null;
  authorization: string | null;
  status: number;
}

/** What to do instead of answering a request; absent or false = answer. */
export type Fault = (request: Asked, response: ServerResponse) => boolean | void;

const sha1 = (bytes: Buffer) => createHash("sha1").update(`blob ${bytes.length}\0`).update(bytes).digest("hex");

export function hubFile(bytes: Buffer): HubFile {
  const large = bytes.length > LARGE_BYTES;
  return { bytes, large, etag: large ? createHash("sha256").update(bytes).digest("hex") : sha1(bytes) };
}

export class HubServer implements AsyncDisposable {
  readonly asked: Asked[] = [];
  readonly repos = new Map<string, HubRepo>();
  fault: Fault = () => false;
  /** Listings hold sizes and hashes when asked for them; older mirrors leave them out. */
  tellsBlobs = true;
  /** Bytes of a large file sent at once, and the pause between; null = all at once. */
  pace: { bytes: number; ms: number } | null = null;
  url = "";
  private filesUrl = "";
  private readonly servers: Server[] = [];

  static async start(): Promise<HubServer> {
    const self = new HubServer();
    self.url = await self.listen("hub");
    self.filesUrl = await self.listen("files");
    return self;
  }

  private async listen(origin: Asked["origin"]): Promise<string> {
    const server = createServer((request, response) => this.answer(origin, request, response).catch((error) => response.destroy(error as Error)));
    this.servers.push(server);
    await new Promise<void>((resolve) => server.listen(0, "127.0.0.1", resolve));
    return `http://127.0.0.1:${(server.address() as AddressInfo).port}`;
  }

  /** Publishes files; the commit is made of their names and contents. */
  add(repo: string, files: Readonly<Record<string, Buffer | string>>, options: Partial<Pick<HubRepo, "readers" | "gated">> & { tags?: string[] } = {}): HubRepo {
    const entries = Object.entries(files).map(([path, content]) => [path, hubFile(Buffer.from(content))] as const);
    const commit = createHash("sha1").update(repo + entries.map(([path, { etag }]) => `${path}=${etag}`).join()).digest("hex");
    const made: HubRepo = { commit, files: new Map(entries), readers: options.readers ?? null, gated: options.gated ?? false, refs: Object.fromEntries(["main", ...(options.tags ?? [])].map((name) => [name, commit])) };
    this.repos.set(repo, made);
    return made;
  }

  addDirectory(repo: string, directory: string, options: Parameters<HubServer["add"]>[2] = {}): HubRepo {
    return this.add(repo, Object.fromEntries(readdirSync(directory).map((name) => [name, readFileSync(join(directory, name))])), options);
  }

  /** Paths that were asked for with this method on either origin. */
  paths = (method: string): string[] => this.asked.filter((request) => request.method === method).map(({ path }) => path);

  private async answer(origin: Asked["origin"], request: IncomingMessage, response: ServerResponse): Promise<void> {
    const url = new URL(request.url!, "http://hub");
    const asked: Asked = { method: request.method!, origin, path: url.pathname, range: request.headers.range ?? null, authorization: request.headers.authorization ?? null, status: 0 };
    this.asked.push(asked);
    response.on("close", () => (asked.status = response.statusCode));
    if (this.fault(asked, response)) return;
    if (origin === "files") return this.signed(url, asked, response);
    const listing = /^\/api\/models\/(.+?)(?:\/revision\/([^/]+))?$/.exec(url.pathname);
    const tree = /^\/api\/models\/(.+?)\/tree\/([^/]+)$/.exec(url.pathname);
    const resolve = /^\/(.+?)\/resolve\/([^/]+)\/(.+)$/.exec(url.pathname);
    const [, name, revision] = (tree ?? listing ?? resolve ?? []).map((part) => part && decodeURIComponent(part));
    const repo = name === undefined ? undefined : this.repos.get(name);
    const refuse = (status: number, code: string, message: string) => void response.writeHead(status, { "X-Error-Code": code, "X-Error-Message": message }).end();
    const token = asked.authorization?.replace(/^Bearer /, "") ?? null;
    if (repo === undefined) return refuse(token === null ? 401 : 404, "RepoNotFound", "Repository not found");
    if (repo.readers !== null && (token === null || !repo.readers.includes(token)))
      return repo.gated ? refuse(token === null ? 401 : 403, "GatedRepo", `Access to model ${name} is restricted.`) : refuse(token === null ? 401 : 404, "RepoNotFound", "Repository not found");
    const commit = revision === undefined ? repo.commit : revision === repo.commit ? revision : repo.refs[revision];
    if (commit === undefined) return refuse(404, "RevisionNotFound", `Invalid rev id: ${revision}`);
    if (tree) return this.json(response, [...repo.files].map(([path, { bytes, etag, large }]) => ({ type: "file", path, size: bytes.length, oid: sha1(bytes), ...(large ? { lfs: { oid: etag, size: bytes.length, pointerSize: 134 } } : {}) })));
    if (listing) return this.json(response, { id: name, modelId: name, sha: commit, private: repo.readers !== null, gated: repo.gated, siblings: this.siblings(repo, this.tellsBlobs && url.searchParams.has("blobs")) });
    const file = repo.files.get(decodeURIComponent(resolve![3]!));
    if (file === undefined) return void response.writeHead(404, { "X-Error-Code": "EntryNotFound", "X-Error-Message": "Entry not found", "X-Repo-Commit": commit }).end();
    response.setHeader("X-Repo-Commit", commit);
    if (!file.large) return this.bytes(file, asked, response, { ETag: `"${file.etag}"` });
    response.writeHead(302, { Location: `${this.filesUrl}/${file.etag}?signature=${Math.random()}`, "X-Linked-Etag": `"${file.etag}"`, "X-Linked-Size": String(file.bytes.length), ETag: '"of-the-redirect"' }).end();
  }

  /** As the hub lists files: with sizes and hashes when asked for them; the git blob of a large file is its pointer. */
  private siblings(repo: HubRepo, blobs: boolean): unknown[] {
    return [...repo.files].map(([rfilename, { bytes, etag, large }]) => ({
      rfilename,
      ...(blobs && { size: bytes.length, blobId: large ? sha1(Buffer.from(`pointer to ${etag}`)) : etag, ...(large && { lfs: { sha256: etag, size: bytes.length, pointerSize: 134 } }) }),
    }));
  }

  /** The store of large files wants a signature and no token. */
  private signed(url: URL, asked: Asked, response: ServerResponse): Promise<void> | void {
    const file = [...this.repos.values()].flatMap((repo) => [...repo.files.values()]).find(({ etag }) => `/${etag}` === url.pathname);
    if (file === undefined || !url.searchParams.has("signature") || asked.authorization !== null) return void response.writeHead(403).end();
    return this.bytes(file, asked, response, { ETag: `"${file.etag.slice(0, 32)}"` });
  }

  private async bytes(file: HubFile, asked: Asked, response: ServerResponse, headers: Record<string, string>): Promise<void> {
    const from = Number(/^bytes=(\d+)-$/.exec(asked.range ?? "")?.[1] ?? 0);
    const total = file.bytes.length;
    if (from >= total && total > 0) return void response.writeHead(416, { "Content-Range": `bytes */${total}` }).end();
    const part = file.bytes.subarray(from);
    response.writeHead(from > 0 ? 206 : 200, { ...headers, "Accept-Ranges": "bytes", "Content-Length": String(part.length), ...(from > 0 ? { "Content-Range": `bytes ${from}-${total - 1}/${total}` } : {}) });
    if (asked.method === "HEAD") return void response.end();
    const { bytes: step, ms } = (file.large ? this.pace : null) ?? { bytes: part.length, ms: 0 };
    let moved = Promise.withResolvers<void>();
    for (const event of ["drain", "close"]) response.on(event, () => moved.resolve());
    for (let at = 0; at < part.length && !response.destroyed; at += step) {
      moved = Promise.withResolvers<void>();
      if (!response.write(part.subarray(at, at + step)) && !response.destroyed) await moved.promise;
      if (ms > 0) await Bun.sleep(ms);
    }
    response.end();
  }

  private json(response: ServerResponse, value: unknown): void {
    response.writeHead(200, { "Content-Type": "application/json" }).end(JSON.stringify(value));
  }

  async [Symbol.asyncDispose](): Promise<void> {
    for (const server of this.servers) {
      server.closeAllConnections();
      await new Promise((resolve) => server.close(resolve));
    }
  }
}
