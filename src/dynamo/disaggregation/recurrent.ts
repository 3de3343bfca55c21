import type { DynamoConfig } from "../../config/engine-config.ts";
import { recurrentLayers } from "../../model/recurrent.ts";
import { ModelError } from "../../model/types.ts";

/**
 * Prefill and decode workers exchange pages of KV; what a recurrent layer remembers is not in them.
 * @param model a directory or .gguf file; one that is not there is not judged
 * @throws ModelError naming the setting that tells of such layers
 */
export function refuseRecurrent({ worker }: Pick<DynamoConfig, "worker">, model: string): void {
  if (worker.disaggregationMode === "agg") return;
  const found = recurrentLayers(model);
  if (found === null) return;
  throw new ModelError(
    model,
    "",
    `models with recurrent layers beside attention (${found}) keep state outside the paged KV cache, which cannot be moved between workers; --disaggregation-mode ${worker.disaggregationMode} is refused, serve this model aggregated`,
  );
}
