/** A stand-in of etcd's JSON gateway: leases and keys in memory, and answers that misbehave on purpose. */
interface Entry {
  value: string;
  lease: string;
}
type Body = Record<string, any>;

export const plain = (text: string) => Buffer.from(text, "base64").toString();

export class Gateway {
  readonly keys = new Map<string, Entry>();
  readonly leases = new Set<string>();
  readonly calls: string[] = [];
  next = 9_223_372_036_854_775_000n;
  /** May answer in etcd's stead. */
  before: (path: string, request: Request, body: Body) => Response | Promise<Response> | null = () => null;
  readonly #server = Bun.serve({ hostname: "127.0.0.1", port: 0, fetch: (request) => this.#answer(request) });

  get url(): string {
    return `http://127.0.0.1:${this.#server.port}`;
  }
  stop(): void {
    void this.#server.stop(true);
  }
  forget(): void {
    this.leases.clear();
    this.keys.clear();
  }

  async #answer(request: Request): Promise<Response> {
    const path = new URL(request.url).pathname;
    const body = (await request.json()) as Body;
    this.calls.push(path);
    return (await this.before(path, request, body)) ?? this.#serve(path, body);
  }
  #serve(path: string, body: Body): Response {
    const gone = () => Response.json({ error: "etcdserver: requested lease not found", code: 5 }, { status: 404 });
    switch (path) {
      case "/v3/lease/grant": {
        const id = String(this.next++);
        this.leases.add(id);
        return Response.json({ ID: id, TTL: body.TTL });
      }
      case "/v3/lease/keepalive":
        return new Response(`${JSON.stringify({ result: { ID: body.ID, ...(this.leases.has(body.ID) && { TTL: "10" }) } })}\n`);
      case "/v3/lease/timetolive":
        return this.leases.has(body.ID) ? Response.json({ TTL: "10", keys: [...this.keys].flatMap(([key, entry]) => (entry.lease === body.ID ? [Buffer.from(key).toString("base64")] : [])) }) : gone();
      case "/v3/lease/revoke":
        this.leases.delete(body.ID);
        for (const [key, entry] of this.keys) if (entry.lease === body.ID) this.keys.delete(key);
        return Response.json({});
      case "/v3/kv/txn": {
        const put = body.success[0].request_put as { key: string; value: string; lease: string };
        const held = this.keys.get(plain(put.key));
        if (held) return Response.json({ responses: [{ response_range: { kvs: [{ key: put.key, ...held }] } }] });
        if (!this.leases.has(put.lease)) return gone();
        this.keys.set(plain(put.key), { value: put.value, lease: put.lease });
        return Response.json({ succeeded: true });
      }
      case "/v3/kv/put":
        this.keys.set(plain(body.key), { value: body.value, lease: body.lease });
        return Response.json({});
      case "/v3/kv/deleterange":
        this.keys.delete(plain(body.key));
        return Response.json({});
      case "/v3/kv/range": {
        const [from, to] = [plain(body.key), plain(body.range_end)];
        return Response.json({ kvs: [...this.keys].flatMap(([key, entry]) => (key >= from && key < to ? [{ key: Buffer.from(key).toString("base64"), ...entry }] : [])) });
      }
      default:
        return new Response("404 page not found", { status: 404 });
    }
  }
}
