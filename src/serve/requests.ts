import type { EngineMetrics, Outcome } from "../telemetry/metrics.ts";
import { ClientGone } from "./http-errors.ts";

/** One request that reached the engine: counted once, with a signal that ends its sequences. */
export interface ActiveRequest {
  readonly signal: AbortSignal;
  /** Ends its sequences; they see `reason`. */
  abort(reason: Error): void;
  /** Counts the request. Only the first call has an effect. */
  end(outcome: Outcome): void;
}

/** Every request between validation and the end of its answer. */
export class RequestRegistry {
  private readonly active = new Set<ActiveRequest>();
  private whenIdle: (() => void)[] = [];

  constructor(private readonly metrics: EngineMetrics) {}

  get size(): number {
    return this.active.size;
  }

  /** @param client aborted when the client's connection closes */
  begin(route: string, client: AbortSignal): ActiveRequest {
    const controller = new AbortController();
    const onGone = () => controller.abort(new ClientGone("the client closed the connection"));
    const request: ActiveRequest = {
      signal: controller.signal,
      abort: (reason) => controller.abort(reason),
      end: (outcome) => {
        if (!this.active.delete(request)) return;
        client.removeEventListener("abort", onGone);
        this.metrics.countRequest(route, outcome);
        if (this.active.size > 0) return;
        for (const resolve of this.whenIdle) resolve();
        this.whenIdle = [];
      },
    };
    this.active.add(request);
    this.metrics.startRequest();
    if (client.aborted) onGone();
    else client.addEventListener("abort", onGone, { once: true });
    return request;
  }

  abortAll(reason: Error): void {
    for (const request of this.active) request.abort(reason);
  }

  /** Resolves when no request is active; at once when none is. */
  idle(): Promise<void> {
    if (this.active.size === 0) return Promise.resolve();
    return new Promise((resolve) => this.whenIdle.push(resolve));
  }
}
