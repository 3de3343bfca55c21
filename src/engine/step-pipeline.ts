import { EngineError } from "./errors.ts";
import { ls_status } from "./native/abi.gen.ts";
import { NativeError, type NativeBackend } from "./native/backend.ts";
import type { Scheduler, SequenceOutput } from "./scheduler.ts";
import type { Row, StepPlan, SubmittedStep } from "./step-plan.ts";

/** Plans refused one after the other for want of pages before that is a failure. */
const MAX_REFUSALS = 16;

/** ls_step_submit takes so many steps that have not been waited for. */
export const MAX_STEPS_SUBMITTED = 2;

/**
 * Steps between scheduler and device, in order. A device that works by itself gets the next step before the result of the one before is
 * taken in, so that it never waits for the host; what a step samples stays on the device for the next one.
 */
export class StepPipeline {
  /** Submitted since start. */
  steps = 0;
  readonly #submitted: (SubmittedStep & { step: number })[] = [];
  #refusals = 0;

  constructor(
    private readonly backend: Pick<NativeBackend, "submit" | "wait">,
    private readonly plan: StepPlan,
    private readonly scheduler: Scheduler,
    /** depth: steps to submit before the oldest is waited for; 1 = each by itself. strict: a plan that the pool has no pages for is a failure. */
    private readonly options: { depth: number; strict: boolean },
    private readonly clock: () => number,
  ) {
    if (options.depth < 1 || options.depth > MAX_STEPS_SUBMITTED) throw new RangeError(`${options.depth} steps to submit, expected 1 to ${MAX_STEPS_SUBMITTED}`);
  }

  /** Results are outstanding. */
  get busy(): boolean {
    return this.#submitted.length > 0;
  }
  get full(): boolean {
    return this.#submitted.length >= this.options.depth;
  }

  /** @returns false when the pool had no pages for the plan after all: to be planned again, once the results outstanding are in */
  submit(rows: readonly Row[]): boolean {
    const step = (this.steps + 1) | 0;
    try {
      this.backend.submit(this.plan.pack(rows, step).words, this.plan.length);
    } catch (error) {
      const noPages = error instanceof NativeError && error.status === ls_status.LS_NO_PAGES;
      if (this.options.strict || !noPages || this.scheduler.running.length < 2 || ++this.#refusals > MAX_REFUSALS) throw error;
      // Native knows the pages better than the mirror: take its counts, make room, plan again.
      this.scheduler.kv.sync();
      if (!this.busy) this.scheduler.preemptLast();
      return false;
    }
    this.steps = step;
    this.#refusals = 0;
    this.#submitted.push({ ...this.scheduler.submitted(rows), step });
    const now = this.clock();
    for (const { sequence } of rows) sequence.admittedAt ??= now;
    return true;
  }

  /** Waits for the oldest step. */
  complete(): SequenceOutput[] {
    const submitted = this.#submitted.shift();
    if (submitted === undefined) throw new EngineError("engine", "no step is submitted");
    const result = this.plan.unpack(this.backend.wait(this.plan.result));
    if (result.step !== submitted.step) throw new EngineError("engine", `ls_step_wait returned step ${result.step}, expected ${submitted.step}`);
    return this.scheduler.apply(submitted, result);
  }
}
