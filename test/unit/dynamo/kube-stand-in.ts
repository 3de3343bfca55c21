/** The part of a Kubernetes API server that discovery uses, in this process, with faults on demand. */
export interface Seen {
  method: string;
  path: string;
  query: Record<string, string>;
  headers: Record<string, string>;
  body: any;
}

export class StandIn {
  readonly seen: Seen[] = [];
  readonly objects = new Map<string, any>();
  readonly extra = new Map<string, any[]>();
  /** Answers instead of the next requests that match; the first fitting one is used up. */
  readonly faults: { method: string; response: () => Response }[] = [];
  #version = 100;
  #watchers = new Map<ReadableStreamDefaultController<Uint8Array>, string>();
  readonly #server: ReturnType<typeof Bun.serve>;
  readonly port: number;

  constructor(port = 0) {
    this.#server = Bun.serve({ hostname: "127.0.0.1", port, idleTimeout: 0, fetch: (request) => this.#answer(request) });
    this.port = this.#server.port!;
  }
  get url(): string {
    return `http://127.0.0.1:${this.port}`;
  }
  get watchers(): number {
    return this.#watchers.size;
  }
  stop(): Promise<void> {
    return this.#server.stop(true);
  }
  fail(method: string, status: number, times = 1, headers: Record<string, string> = {}): void {
    for (let i = 0; i < times; i++) this.faults.push({ method, response: () => Response.json({ kind: "Status", code: status, message: `made up ${status}` }, { status, headers }) });
  }
  requests(method: string): Seen[] {
    return this.seen.filter((request) => request.method === method);
  }
  /** Somebody else's write. */
  put(name: string, change: (object: any) => any): void {
    this.#store(name, change(structuredClone(this.objects.get(name))));
  }
  remove(name: string): void {
    const object = this.objects.get(name);
    this.objects.delete(name);
    this.#version++;
    this.#tell(name, "DELETED", object);
  }
  /** Ends all watches. */
  cut(): void {
    for (const controller of this.#watchers.keys()) controller.close();
    this.#watchers.clear();
  }
  say(event: unknown): void {
    for (const controller of this.#watchers.keys()) controller.enqueue(new TextEncoder().encode(`${JSON.stringify(event)}\n`));
  }

  #store(name: string, object: any): any {
    const old = this.objects.get(name);
    const { resourceVersion: _, ...metadata } = old?.metadata ?? {};
    const next = { ...object, metadata: { ...object.metadata, uid: old?.metadata.uid ?? `uid-${++this.#version}` } };
    if (old && JSON.stringify({ ...old, metadata }) === JSON.stringify({ ...next, metadata: { ...next.metadata, resourceVersion: undefined } })) return old;
    next.metadata.resourceVersion = String(++this.#version);
    this.objects.set(name, next);
    this.#tell(name, old ? "MODIFIED" : "ADDED", next);
    return next;
  }
  #tell(name: string, type: string, object: unknown): void {
    for (const [controller, watched] of this.#watchers) if (watched === name) controller.enqueue(new TextEncoder().encode(`${JSON.stringify({ type, object })}\n`));
  }

  async #answer(request: Request): Promise<Response> {
    const url = new URL(request.url);
    const query = Object.fromEntries(url.searchParams);
    const text = await request.text();
    const method = query.watch ? "WATCH" : request.method;
    this.seen.push({ method, path: url.pathname, query, headers: request.headers.toJSON() as Record<string, string>, body: text ? JSON.parse(text) : null });
    const fault = this.faults.findIndex((candidate) => candidate.method === method);
    if (fault >= 0) return this.faults.splice(fault, 1)[0]!.response();
    const [, name] = /\/dynamoworkermetadatas\/(.+)$/.exec(url.pathname) ?? [];
    if (name === undefined) return this.#collection(url.pathname, query);
    const object = this.objects.get(name);
    if (method === "PATCH") return Response.json(this.#store(name, JSON.parse(text)));
    if (!object) return Response.json({ code: 404, message: `"${name}" not found` }, { status: 404 });
    if (method === "DELETE") {
      const wanted = text ? JSON.parse(text).preconditions : {};
      if (Object.entries(wanted).some(([key, value]) => object.metadata[key] !== value)) return Response.json({ code: 409, message: "precondition failed" }, { status: 409 });
      this.remove(name);
    }
    return Response.json(object);
  }

  #collection(path: string, query: Record<string, string>): Response {
    if (query.watch) {
      const name = query.fieldSelector!.replace("metadata.name=", "");
      let own: ReadableStreamDefaultController<Uint8Array>;
      const stream = new ReadableStream<Uint8Array>({
        start: (controller) => {
          own = controller;
          this.#watchers.set(controller, name);
          // A first byte sends the headers off.
          controller.enqueue(new TextEncoder().encode(`${JSON.stringify({ type: "BOOKMARK", object: {} })}\n`));
        },
        cancel: () => void this.#watchers.delete(own),
      });
      return new Response(stream, { headers: { "content-type": "application/json" } });
    }
    const own = path.endsWith("/dynamoworkermetadatas");
    const all = own ? [...this.objects.values()] : (this.extra.get(path) ?? []);
    const named = query.fieldSelector ? all.filter((object) => object.metadata.name === query.fieldSelector!.replace("metadata.name=", "")) : all;
    // Two to a page, whatever the limit: paging is used in every test.
    const from = Number(query.continue ?? 0);
    return Response.json({ metadata: { resourceVersion: String(this.#version), ...(from + 2 < named.length && { continue: String(from + 2) }) }, items: named.slice(from, from + 2) });
  }
}
