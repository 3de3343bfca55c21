import { type Discovery, DiscoveryError } from "../discovery/discovery.ts";
import type { EndpointName } from "../discovery/records.ts";

interface Identity {
  display_name?: unknown;
  source_path?: unknown;
}

const identity = (value: unknown): Identity => {
  const card = typeof value === "object" && value !== null ? (value as { card_json?: unknown }).card_json : null;
  return typeof card === "object" && card !== null ? card : {};
};

/**
 * One endpoint serves one model: other live workers there must have the same name or the same source.
 * @throws DiscoveryError naming both models
 */
export async function refuseConflict(discovery: Discovery, endpoint: EndpointName, ownKey: string, card: Identity): Promise<void> {
  const prefix = `${endpoint.namespace}/${endpoint.component}/${endpoint.endpoint}/`;
  for (const record of await discovery.list("v1/mdc", prefix)) {
    if (record.key === ownKey) continue;
    const other = identity(record.value);
    if (other.display_name === undefined || other.display_name === card.display_name) continue;
    if (typeof other.source_path === "string" && other.source_path !== "" && other.source_path === card.source_path) continue;
    throw new DiscoveryError(
      `cannot register model "${String(card.display_name)}" on endpoint ${prefix.slice(0, -1)}: a different model "${String(other.display_name)}" is registered there; use another --component or --endpoint`,
    );
  }
}
