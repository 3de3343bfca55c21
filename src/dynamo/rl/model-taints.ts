import type { EngineRoute } from "../system-server/engine-routes.ts";

/** Taints that Dynamo derives itself. */
const RESERVED = "dynamo.topology/";

/**
 * The route update/model_taints: labels of this worker by which routers place requests. Replaces all of them, in the model record.
 * Texts of errors are those of Dynamo 1.5.0.
 */
export function modelTaintRoute(card: () => Record<string, unknown>, update: (card: Record<string, unknown>) => Promise<void>): EngineRoute {
  return async (body) => {
    if (typeof body !== "object" || body === null || Array.isArray(body)) throw new Error("request body must be a JSON object");
    const { taints } = body as { taints?: unknown };
    if (!Array.isArray(taints) || taints.some((item) => typeof item !== "string")) throw new Error("'taints' must be a JSON array of strings");
    const reserved = (taints as string[]).find((item) => item.startsWith(RESERVED));
    if (reserved !== undefined) throw new Error(`taint '${reserved}' uses reserved prefix '${RESERVED}'`);
    const unique = [...new Set(taints as string[])].sort();
    const now = card();
    await update({ ...now, runtime_config: { ...(now.runtime_config as object), taints: unique } });
    return { status: "ok", taints: unique };
  };
}
