/** A call of /engine/<route>: takes the parsed body, resolves to what is answered; a thrown error is a 500 with its text. */
export type EngineRoute = (body: unknown) => Promise<unknown>;

type Phase = "starting" | "running" | "shutting down";

/** An answer that says why nothing was done; HTTP status 200, as Dynamo's own workers give it. */
export const refusal = (message: string): Record<string, unknown> => ({ status: "error", message });

/** The administrative calls of a worker: POST /engine/<route> on the system server. Closed until the worker runs and once it stops. */
export class EngineRoutes {
  readonly #routes = new Map<string, EngineRoute>();
  readonly #unsupported = new Map<string, string>();
  phase: Phase = "starting";

  register(name: string, route: EngineRoute): void {
    this.#routes.set(name, route);
  }
  /** Not listed; a call is answered with the reason. */
  refuse(name: string, reason: string): void {
    this.#unsupported.set(name, reason);
  }

  /** Sorted; without what is refused. */
  get names(): string[] {
    return [...this.#routes.keys()].sort();
  }

  /** null for an unknown route. @throws Error of the route */
  async call(name: string, body: unknown): Promise<unknown> {
    const route = this.#routes.get(name);
    const reason = this.#unsupported.get(name);
    if (route === undefined) return reason === undefined ? null : refusal(`${name} is not supported by this worker: ${reason}`);
    if (this.phase !== "running") return refusal(`engine administrative routes are unavailable while the worker is ${this.phase}`);
    return route(body);
  }
}
