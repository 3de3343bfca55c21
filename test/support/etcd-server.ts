/** A real etcd for tests: one member on loopback, its data in a temporary directory, spoken to apart from the code under test. */
import { mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { eventually, Launched } from "./launch.ts";
import { freePort } from "./free-port.ts";

/** Path of the server, as the test runner sets it; tests without it are left out. */
export const etcdProgram = process.env.LAYERSCALE_TEST_ETCD;
export const hasEtcd = Boolean(etcdProgram);
const LIMIT_MS = 60_000;

export interface ServerTls {
  /** Paths of PEM files. */
  ca: string;
  cert: string;
  key: string;
  /** For this side's own calls. */
  client: { ca: string; cert: string; key: string };
}

export interface Change {
  type: "put" | "delete";
  key: string;
}

const base64 = (text: string) => Buffer.from(text).toString("base64");
const plain = (text: string) => Buffer.from(text, "base64").toString();

export class EtcdServer implements AsyncDisposable {
  readonly #home = mkdtempSync(join(tmpdir(), "layerscale-etcd-"));
  readonly #watches: AbortController[] = [];
  process!: Launched;
  #generation = 0;
  token = "";

  private constructor(
    readonly port: number,
    readonly peerPort: number,
    readonly tls: ServerTls | null,
  ) {}

  static async start(tls: ServerTls | null = null): Promise<EtcdServer> {
    const self = new EtcdServer(await freePort(), await freePort(), tls);
    await self.up();
    return self;
  }

  get url(): string {
    return `${this.tls === null ? "http" : "https"}://127.0.0.1:${this.port}`;
  }

  /** Starts it again, with what it stored or with nothing. */
  async up(data: "kept" | "empty" = "kept"): Promise<void> {
    if (data === "empty") this.#generation += 1;
    // A member keeps the peer address that it was founded with; nobody dials it.
    const peer = `http://127.0.0.1:${this.peerPort}`;
    const { tls } = this;
    this.process = Launched.command([
      etcdProgram as string, "--data-dir", join(this.#home, `data-${this.#generation}`), "--listen-client-urls", this.url, "--advertise-client-urls", this.url, "--listen-peer-urls", peer,
      "--initial-advertise-peer-urls", peer, "--initial-cluster", `default=${peer}`, "--log-level", "warn",
      ...(tls === null ? [] : ["--client-cert-auth", "--trusted-ca-file", tls.ca, "--cert-file", tls.cert, "--key-file", tls.key]),
    ]);
    await eventually(() => {
      if (!this.process.running) throw new Error(`etcd ended: ${this.process.stderr.slice(-2000)}`);
      return this.call("/v3/kv/range", { key: base64("a") }).then(() => true, (error: Error) => /user name is empty|auth token/.test(error.message));
    }, "etcd answers", LIMIT_MS);
  }
  async kill(): Promise<void> {
    this.process.signal("SIGKILL");
    await this.process.exit();
  }

  async call(path: string, body: unknown): Promise<Record<string, any>> {
    const response = await fetch(this.url + path, {
      method: "POST", body: JSON.stringify(body), headers: this.token === "" ? {} : { authorization: this.token }, signal: AbortSignal.timeout(10_000),
      ...(this.tls !== null && { tls: this.tls.client }),
    });
    const text = await response.text();
    if (response.status !== 200) throw new Error(`etcd ${path}: ${text}`);
    return JSON.parse(text) as Record<string, any>;
  }

  /** Keys below v1/, in the order in which they were written. */
  async keys(): Promise<string[]> {
    return (await this.records()).map(({ key }) => key);
  }
  /** With their values and leases (decimal). */
  async records(): Promise<{ key: string; value: string; lease: string }[]> {
    const { kvs } = await this.call("/v3/kv/range", { key: base64("v1/"), range_end: base64("v10"), sort_target: "CREATE", sort_order: "ASCEND" });
    return (kvs ?? []).map((item: Record<string, string>) => ({ key: plain(item.key!), value: plain(item.value!), lease: item.lease ?? "0" }));
  }
  async leases(): Promise<string[]> {
    const { leases } = await this.call("/v3/lease/leases", {});
    return (leases ?? []).map((item: Record<string, string>) => item.ID!);
  }
  /** @param lease decimal */
  async revoke(lease: string): Promise<void> {
    await this.call("/v3/lease/revoke", { ID: lease });
  }
  async delete(key: string): Promise<void> {
    await this.call("/v3/kv/deleterange", { key: base64(key) });
  }

  /** Switches authentication on: root, and a user who may use v1/ only. */
  async secure(user: string, password: string): Promise<void> {
    for (const name of ["root", user]) {
      await this.call("/v3/auth/user/add", { name, password });
      await this.call("/v3/auth/role/add", { name });
      await this.call("/v3/auth/user/grant", { user: name, role: name });
    }
    await this.call("/v3/auth/role/grant", { name: user, perm: { permType: "READWRITE", key: base64("v1/"), range_end: base64("v10") } });
    await this.call("/v3/auth/enable", {});
    await this.login(password);
  }
  async login(password: string): Promise<void> {
    this.token = "";
    this.token = (await this.call("/v3/auth/authenticate", { name: "root", password })).token;
  }

  /** Collects changes of keys below v1/ from now on. */
  async watch(): Promise<Change[]> {
    const stop = new AbortController();
    this.#watches.push(stop);
    const response = await fetch(`${this.url}/v3/watch`, { method: "POST", body: JSON.stringify({ create_request: { key: base64("v1/"), range_end: base64("v10") } }), signal: stop.signal });
    const changes: Change[] = [];
    const created = Promise.withResolvers<void>();
    void (async () => {
      const decoder = new TextDecoder();
      let rest = "";
      for await (const chunk of response.body!) {
        const lines = (rest + decoder.decode(chunk as Uint8Array, { stream: true })).split("\n");
        rest = lines.pop()!;
        for (const line of lines.filter(Boolean)) {
          const { result } = JSON.parse(line) as { result: { created?: boolean; events?: { type?: string; kv: { key: string } }[] } };
          if (result.created) created.resolve();
          for (const event of result.events ?? []) changes.push({ type: event.type === "DELETE" ? "delete" : "put", key: plain(event.kv.key) });
        }
      }
    })().catch(() => {});
    await created.promise;
    return changes;
  }

  async [Symbol.asyncDispose](): Promise<void> {
    for (const watch of this.#watches) watch.abort();
    await this.kill();
    rmSync(this.#home, { recursive: true, force: true });
  }
}
