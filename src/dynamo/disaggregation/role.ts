import type { DisaggregationMode } from "../../config/engine-config.ts";
import type { GenerateRequest, KvSource, StepOutput, TransferReport } from "../../engine/types.ts";
import { completionUsage, outputItem } from "../protocol/engine-output.ts";
import { internal } from "../protocol/errors.ts";
import type { PreprocessedRequest } from "../protocol/preprocessed-request.ts";
import type { WorkerEngine } from "../worker-engine.ts";
import { handoff, readHandoff } from "./handoff.ts";

/** What the role of a worker adds to a request of the engine. */
export type Part = Pick<GenerateRequest, "stage" | "pull">;

/** What a worker of one role does with a request, beside running it. A health check, and what the router wants run whole, runs whole in any role. */
export interface Role {
  part(request: PreprocessedRequest, body: unknown, requestId: string): Part;
  /** The item that hands a staged prompt over. */
  answer(step: StepOutput): unknown;
  /** The answer did not leave: nobody will ask for the copy. */
  withdraw(copy: bigint): void;
  /** The engine never got the request. */
  abandoned(body: unknown): void;
}

const WHOLE: Part = {};

class AggregatedRole implements Role {
  part(_request: PreprocessedRequest, _body: unknown, _requestId: string): Part {
    return WHOLE;
  }
  answer(_step: StepOutput): unknown {
    throw internal("this worker hands no KV over");
  }
  withdraw(_copy: bigint): void {}
  abandoned(_body: unknown): void {}
}

/** Computes the prompt, keeps a copy of its KV in host memory, and says where to fetch it. */
class PrefillRole extends AggregatedRole {
  constructor(
    readonly engine: WorkerEngine,
    /** Numeric address that decode workers reach this one by. */
    readonly host: string,
  ) {
    super();
  }

  override part(request: PreprocessedRequest): Part {
    return request.healthCheck || request.whole ? WHOLE : { stage: true };
  }

  override answer({ staged, usage }: StepOutput): unknown {
    const { transfer } = this.engine.info;
    if (staged === undefined || staged === null || transfer === null) throw internal("the engine staged no copy");
    // The decode worker samples the first token itself. The frontend goes on to it only after "length".
    return outputItem({ token_ids: [], finish_reason: "length", disaggregated_params: handoff(staged, this.host, transfer, usage.promptTokens - 1), completion_usage: completionUsage(usage, 0) });
  }

  override withdraw(copy: bigint): void {
    this.engine.releaseCopy(copy);
  }
}

/** Pulls what a prefill worker has computed; a prompt that comes without runs whole. */
class DecodeRole extends AggregatedRole {
  constructor(
    readonly engine: WorkerEngine,
    readonly report: (transfer: TransferReport) => void,
  ) {
    super();
  }

  override part(request: PreprocessedRequest, body: unknown, requestId: string): Part {
    const source = readHandoff(body);
    if (source === null) return WHOLE;
    if (typeof source === "string") {
      this.report({ role: "receive", requestId, transferId: null, outcome: "handoff", bytes: 0, seconds: 0, detail: source, fallback: true });
      return WHOLE;
    }
    if (!request.healthCheck && !request.whole) return { pull: source };
    this.engine.dropCopy(source);
    return WHOLE;
  }

  override abandoned(body: unknown): void {
    const source: KvSource | string | null = readHandoff(body);
    if (source !== null && typeof source !== "string") this.engine.dropCopy(source);
  }
}

export function openRole(mode: DisaggregationMode, engine: WorkerEngine, host: string | null, report: (transfer: TransferReport) => void): Role {
  if (mode === "prefill" && host !== null) return new PrefillRole(engine, host);
  return mode === "decode" ? new DecodeRole(engine, report) : new AggregatedRole();
}
