/** loading → serving → stopping. */
export type WorkerPhase = "starting" | "ready" | "stopping";

/** What /health and /live answer: the worker's phase, and per endpoint whether it serves. */
export class Health {
  phase: WorkerPhase = "starting";
  readonly #endpoints = new Map<string, boolean>();
  readonly #startedAt = performance.now();

  /** @param required endpoints that must be ready; none = all that are known */
  constructor(readonly required: readonly string[] = []) {}

  set(endpoint: string, ready: boolean): void {
    this.#endpoints.set(endpoint, ready);
  }
  forget(endpoint: string): void {
    this.#endpoints.delete(endpoint);
  }

  get ready(): boolean {
    if (this.phase !== "ready") return false;
    const names = this.required.length > 0 ? this.required : [...this.#endpoints.keys()];
    return names.every((name) => this.#endpoints.get(name) === true);
  }

  /** The body that Dynamo 1.5.0's own workers answer with; no endpoints while loading, none ready while stopping. */
  body(): Record<string, unknown> {
    const ms = performance.now() - this.#startedAt;
    const secs = Math.floor(ms / 1000);
    const word = (ready: boolean) => (ready && this.phase === "ready" ? "ready" : "notready");
    const endpoints = this.phase === "starting" ? {} : Object.fromEntries([...this.#endpoints].map(([name, ready]) => [name, word(ready)]));
    return { status: word(this.ready), uptime: { secs, nanos: Math.floor((ms - secs * 1000) * 1e6) }, endpoints };
  }
}
