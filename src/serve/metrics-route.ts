import type { RequestContext } from "./app.ts";

/** GET /metrics: Prometheus text format 0.0.4. */
export async function metricsRoute({ app }: RequestContext): Promise<Response> {
  return new Response(await app.metrics.render(), { headers: { "content-type": app.metrics.contentType } });
}
