import type { RequestContext } from "./app.ts";

/**
 * GET /health, /healthz: 200 when requests are admitted, else 503, with the same body. Counters of features that
 * this server does not have stay 0, so that dashboards made for the contract find every field.
 */
export function health({ app, connections }: RequestContext): Response {
  const ready = app.phase === "ready";
  const stats = app.serving?.engine.stats();
  const totals = app.metrics.totals();
  return Response.json(
    {
      status: ready ? "ok" : "unavailable",
      uptime_ms: totals.uptimeMs,
      queued: stats?.waiting ?? 0,
      running: stats?.running ?? 0,
      // The same numbers as the gauges layerscale_kv_pages*: free + cached + held = total; cached pages can be taken too.
      kv_pages_total: stats?.pagesTotal ?? 0,
      kv_pages_free: stats?.pagesFree ?? 0,
      kv_pages_cached: stats?.pagesCached ?? 0,
      kv_pages_held: stats?.pagesHeld ?? 0,
      connections,
      steps: stats?.steps ?? 0,
      preemptions: stats?.preemptions ?? 0,
      evictions: stats?.evictions ?? 0,
      graph_captures: 0,
      requests_started: totals.started,
      requests_ok: totals.ok,
      requests_failed: totals.failed,
      requests_cancelled: totals.cancelled,
      prompt_tokens: totals.promptTokens,
      generated_tokens: totals.generatedTokens,
      prefix_cached_tokens: totals.prefixCachedTokens,
      prefix_window_miss_tokens: 0,
      sessions: 0,
      session_turns: 0,
      session_cached_tokens: 0,
      session_snapshot_evictions: 0,
      session_ingested_tokens: 0,
      session_warm_turns: 0,
      session_warmed_tokens: 0,
      session_flash_hits: 0,
      session_ready_exits: 0,
      tool_calls_malformed: 0,
      tool_calls_recovered: 0,
      tool_calls_jump_forward: 0,
      tool_calls_forced_tokens: 0,
      session_call_turns_exact: 0,
      session_call_turns_diverged: 0,
    },
    { status: ready ? 200 : 503, headers: { "cache-control": "no-store" } },
  );
}
