import { logger } from "../telemetry/log.ts";

const log = logger("layerscale::engine");

/** Listeners of one event. One that throws is logged and hurts nobody else. */
export class Listeners<T> {
  readonly #all = new Set<(value: T) => void>();
  add(listener: (value: T) => void): () => void {
    this.#all.add(listener);
    return () => void this.#all.delete(listener);
  }
  emit(value: T): void {
    for (const listener of this.#all) {
      try {
        listener(value);
      } catch (error) {
        log.error("a listener of the engine failed", { error });
      }
    }
  }
}
