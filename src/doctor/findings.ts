import { UsageError } from "../config/flags.ts";

/** Every check: its id, and what it looks at. Help and documentation are made of this table. */
export const CHECKS = {
  config: "flags and variables can be read",
  license: "the key is there, genuine and not expired",
  "native-library": "the native library is found and can be loaded",
  "instruction-set": "the processor, or LAYERSCALE_CPU_ISA, is one that the library has kernels for",
  gpu: "driver and GPUs are visible and usable, where --device asks for them",
  model: "--model is there: a path, a model in the hub's cache, or a repo that may be downloaded onto this disk",
  "model-files": "its files are complete and can be read, and the model is one that can be served",
  tokenizer: "the tokenizer can be built and brings text back",
  "chat-template": "the chat template, or --custom-jinja-template, renders a conversation",
  disaggregation: "the model can be split over prefill and decode workers, where the role asks for it",
  context: "weights and the context of one sequence fit into memory",
  "tool-parser": "--dyn-tool-call-parser is a name that Dynamo's frontend knows",
  "reasoning-parser": "--dyn-reasoning-parser is a name that Dynamo's frontend knows",
  "http-port": "serve can listen on its address",
  "pod-ip": "POD_IP and DYN_TCP_RPC_HOST are addresses of this machine",
  "request-port": "the request plane can listen on its address",
  "request-tls": "the certificates of the request plane can be read",
  "system-port": "the system server can listen on its address",
  discovery: "the discovery store answers",
  "discovery-rights": "this process may read and write there",
  clock: "this machine's clock agrees with that of the discovery store",
  nats: "nats-server answers and takes the login, where a plane uses it",
} as const;
export type CheckId = keyof typeof CHECKS;

export type Status = "ok" | "warning" | "failed" | "skipped";

export interface Finding {
  id: CheckId;
  status: Status;
  /** What was found, in one line. */
  detail: string;
  /** What to do about it; null = nothing. */
  fix: string | null;
}

/** Ends a check with another result than ok. */
class Verdict extends Error {
  constructor(readonly status: Status, detail: string, readonly fix: string | null) {
    super(detail);
  }
}
export const warn = (detail: string, fix: string | null = null): Verdict => new Verdict("warning", detail, fix);
export const fail = (detail: string, fix: string | null = null): Verdict => new Verdict("failed", detail, fix);
export const skip = (why: string): Verdict => new Verdict("skipped", why, null);

/** Results of checks; each id occurs once. */
export class Findings {
  readonly list: Finding[] = [];

  /**
   * Runs one check: the text it returns is what was found to be right, an error is what is wrong.
   * @returns whether what depends on it can be checked: not after a failure or when it was left out
   */
  async check(id: CheckId, body: () => string | Promise<string>, fix: string | null = null): Promise<boolean> {
    try {
      this.#add(id, "ok", await body(), null);
      return true;
    } catch (error) {
      if (error instanceof Verdict) this.#add(id, error.status, error.message, error.fix);
      // What the product refuses it refuses in words; anything else is a fault of this program, and is shown as such.
      else this.#add(id, "failed", error instanceof Error ? (foreseen(error) ? error.message : `${error.name}: ${error.message}`) : String(error), fix);
      return this.list.at(-1)!.status === "warning";
    }
  }

  skip(why: string, ...ids: CheckId[]): void {
    for (const id of ids) this.#add(id, "skipped", why, null);
  }

  /** As the table has them, whatever order they were looked at in. */
  inOrder(): this {
    const ids = Object.keys(CHECKS);
    this.list.sort((a, b) => ids.indexOf(a.id) - ids.indexOf(b.id));
    return this;
  }

  count(status: Status): number {
    return this.list.filter((finding) => finding.status === status).length;
  }

  #add(id: CheckId, status: Status, detail: string, fix: string | null): void {
    this.list.push({ id, status, detail: detail.replace(/\s*[\r\n]+\s*/g, " "), fix });
  }
}

const NAMES = new Set(["LicenseError", "ModelError", "HubError", "EngineError", "NativeError", "TokenizerError", "TemplateError", "DiscoveryError", "ApiError", "EtcdError", "EtcdUnreachable", "PlaneError"]);
/** Errors of system calls say in words what cannot be done, and to which file. */
const foreseen = (error: Error): boolean => error instanceof UsageError || NAMES.has(error.name) || "syscall" in error;
