import type { App, RequestContext } from "./app.ts";
import { HttpError, unavailable } from "./http-errors.ts";

/** One entry that is OpenAI's and Anthropic's at once. */
function entry(app: App): Record<string, unknown> & { id: string } {
  if (!app.identity) throw unavailable("the model file is still being read");
  const { name, contextLength } = app.identity;
  return {
    id: name,
    object: "model",
    created: app.created,
    owned_by: "layerscale",
    max_model_len: contextLength,
    type: "model",
    display_name: name,
    created_at: new Date(app.created * 1000).toISOString().replace(".000Z", "Z"),
    max_input_tokens: contextLength - 1,
    max_tokens: contextLength - 1,
    lifecycle: "active",
    capabilities: null,
    deprecated_at: null,
    retires_at: null,
    line: null,
  };
}

/** GET /v1/models: exactly one; works while weights are loading. */
export function listModels({ app }: RequestContext): Response {
  const model = entry(app);
  return Response.json({ object: "list", data: [model], has_more: false, first_id: model.id, last_id: model.id });
}

export const MODEL_PREFIX = "/v1/models/";

/** GET /v1/models/{id}: the id may hold slashes, raw or as %2F, in any case. */
export function getModel({ app, path }: RequestContext): Response {
  const model = entry(app);
  const raw = path.slice(MODEL_PREFIX.length);
  let id = raw;
  try {
    id = decodeURIComponent(raw);
  } catch {
    // A broken percent sequence is no escape: taken as it stands.
  }
  if (id.toLowerCase() !== model.id.toLowerCase()) throw new HttpError(404, "not_found_error", `no model ${JSON.stringify(id.slice(0, 100))}; this server has ${JSON.stringify(model.id)}`);
  return Response.json(model);
}
