import type { Work } from "../request-plane/work-handler.ts";
import type { EngineRoutes } from "../system-server/engine-routes.ts";

/** What the control endpoint answers; texts are those of Dynamo 1.5.0. It only describes: calls go to POST {system_url}/engine/<route>. */
export function describe(request: unknown, routes: EngineRoutes, systemUrl: string): Record<string, unknown> {
  const method = typeof request === "object" && request !== null ? (request as { method?: unknown }).method : undefined;
  if (typeof method !== "string") return { status: "error", message: "rl_dispatch: missing 'method' (str)" };
  if (method !== "routes") return { status: "error", method, message: "rl request-plane endpoint only supports method='routes'" };
  // world_size: ranks of this worker; there is one.
  return { status: "ok", routes: routes.names, system_url: systemUrl, world_size: 1 };
}

/** One request, one item. */
export const rlWork = (routes: EngineRoutes, systemUrl: string): Work =>
  async function* (body) {
    yield { data: describe(body, routes, systemUrl) };
  };
