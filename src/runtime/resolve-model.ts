import type { EngineConfig } from "../config/engine-config.ts";
import { checkSettings } from "../model/hf-directory.ts";
import { fetchModel } from "../model/hub/hub.ts";
import { parseReference, referenceText } from "../model/hub/reference.ts";

export interface ResolvedModel {
  /** The configuration with a local path as its model. */
  config: EngineConfig;
  /** The repo as it was asked for; null for a local path. */
  source: string | null;
}

/**
 * Makes --model a local path: as it is when it exists, else out of the hub's cache, else downloaded into it.
 * @param check judges the settings of a model directory before its weights are downloaded
 * @throws HubError, ModelError; the signal's reason when it is raised
 */
export async function resolveModel(config: EngineConfig, signal: AbortSignal, check: (directory: string) => void = () => {}): Promise<ResolvedModel> {
  const reference = parseReference(config.model);
  if (reference === null) return { config, source: null };
  const model = await fetchModel(reference, config.hub, {
    signal,
    onSettings(directory) {
      checkSettings(directory);
      check(directory);
    },
  });
  return { config: { ...config, model }, source: referenceText(reference) };
}
