import type { Metric, Registry } from "prom-client";

export interface HotHistogramOptions {
  name: string;
  help: string;
  /** Upper bounds, rising. */
  buckets: readonly number[];
  registers: readonly Registry[];
}

/** A histogram without labels for what happens with every token: an observation is a search and two additions, nothing is hashed. */
export class HotHistogram {
  readonly name: string;
  readonly #bounds: readonly number[];
  /** Per bucket, not cumulated; the last one is +Inf. */
  readonly #counts: number[];
  #sum = 0;

  constructor(private readonly options: HotHistogramOptions) {
    this.name = options.name;
    this.#bounds = options.buckets;
    this.#counts = Array(options.buckets.length + 1).fill(0);
    // A registry asks its metrics for nothing but name, get and reset.
    for (const registry of options.registers) registry.registerMetric(this as unknown as Metric);
  }

  observe(value: number): void {
    let bucket = 0;
    while (bucket < this.#bounds.length && value > this.#bounds[bucket]!) bucket++;
    this.#counts[bucket]! += 1;
    this.#sum += value;
  }

  reset(): void {
    this.#counts.fill(0);
    this.#sum = 0;
  }

  async get(): Promise<unknown> {
    const { name, help } = this.options;
    let count = 0;
    const buckets = this.#counts.map((own, index) => ({ labels: { le: this.#bounds[index] ?? "+Inf" }, value: (count += own), metricName: `${name}_bucket` }));
    const values = [...buckets, { labels: {}, value: this.#sum, metricName: `${name}_sum` }, { labels: {}, value: count, metricName: `${name}_count` }];
    return { name, help, type: "histogram", aggregator: "sum", values };
  }
}
