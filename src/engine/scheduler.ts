import { EngineError } from "./errors.ts";
import { newPages, pagesFor, type KvManager } from "./kv-manager.ts";
import { LS_PAGE_TOKENS } from "./native/abi.gen.ts";
import type { NativeTransferEvent } from "./native/transfer.ts";
import { Pulls, type Refused } from "./pulls.ts";
import { insertByRank, type Sequence, type SequenceOutput } from "./sequence.ts";
import { prefillBudget, type SchedulerOptions } from "./step-budget.ts";
import type { Row, StepResult, SubmittedStep } from "./step-plan.ts";
import type { FinishReason } from "./types.ts";

export type { SequenceOutput } from "./sequence.ts";

/**
 * Decides what each step computes. Pure: no clock and no I/O but the page pool behind KvManager.
 *
 * A step is filled in this order:
 * 1. Every sequence that needs one token (decodes), by rank (priority, then arrival). When pages run out, the running sequence of
 *    lowest rank is preempted: closed into the prefix cache and put back into the queue in its old place.
 * 2. Waiting sequences are admitted by rank, while slots and pages last; none in a step that preempted. The first that does not fit
 *    holds back all behind it, so a large request is never overtaken for ever.
 * 3. What is left of the token budget goes to prefills, by priority, then fewest tokens left first, so that a short prompt does not
 *    wait for a long one. Against starvation the prefill of highest rank (the oldest) is sure of half.
 *
 * A step may be planned while those before it are on the device: they count as done, and the tokens they sample are not known yet. What
 * closes a running sequence to make room waits until all results are in.
 *
 * A sequence whose KV is pulled from another engine holds slot and pages from its admission and takes no row until they have come.
 * Nothing waits for it. When there are no pages for it, or its pull fails, it becomes an ordinary prompt.
 */
export class Scheduler {
  /** By rank. */
  readonly running: Sequence[] = [];
  /** By rank. */
  readonly waiting: Sequence[] = [];
  preemptions = 0;
  /** Prompt tokens that steps have computed; internal sequences excluded. */
  promptTokensComputed = 0;
  /** Sequences that were refused instead of admitted, since they were taken last. */
  readonly refused: Refused[] = [];
  readonly pulls: Pulls;
  #arrivals = 0;
  /** The waiting sequence that did not fit, and the release count then. */
  #blocked: { sequence: Sequence; releases: number } | null = null;
  /** Pages that the rows planned so far in this step take. */
  #planned = 0;
  /** Steps whose results have not come. */
  #submitted = 0;

  constructor(
    readonly kv: KvManager,
    private readonly options: SchedulerOptions,
  ) {
    this.pulls = new Pulls(kv);
  }

  get hasWork(): boolean {
    return this.running.length + this.waiting.length > 0;
  }
  /** Some sequence waits for pages to arrive: having no step to run is no stall. */
  get pulling(): boolean {
    return this.running.some((sequence) => sequence.pulling);
  }

  /** The sequence must fit pool and context (the caller refused it otherwise): that is what rules out a deadlock. */
  add(sequence: Sequence): void {
    if (pagesFor(sequence.numTokens) > this.kv.total || sequence.numTokens >= this.options.contextLength) {
      throw new EngineError("invalid", `a prompt of ${sequence.promptLength} tokens does not fit a pool of ${this.kv.total} pages and a context of ${this.options.contextLength} tokens`);
    }
    sequence.arrival = this.#arrivals++;
    insertByRank(this.waiting, sequence);
  }

  /** Rows of the next step; none when nothing can run before another result has come. */
  schedule(): Row[] {
    if (this.#probeNeedsRoom() && !this.#preempt()) return [];
    const before = this.preemptions;
    for (;;) {
      const rows: Row[] = [];
      this.#planned = 0;
      if (!this.#addDecodes(rows)) return [];
      if (this.preemptions === before) this.#admit();
      this.#addPrefills(rows);
      // Two or more running prefills may hold the pages that each of them needs; a sequence alone always fits.
      if (rows.length > 0 || this.running.length <= 1 || this.pulling || !this.#preempt()) return rows;
    }
  }

  /** @returns false when one has to give way, and cannot yet */
  #addDecodes(rows: Row[]): boolean {
    for (const sequence of this.running.filter((candidate) => candidate.pending === 1 && this.#runnable(candidate))) {
      // The last of the running ranks at or below this one, so no planned row is ever preempted.
      while (sequence.status === "running" && newPages(sequence.numComputed, 1) > this.#free) if (!this.#preempt()) return false;
      if (sequence.status === "running") this.#addRow(rows, sequence, 1);
    }
    return true;
  }

  /** Its KV is here, and it goes on after the steps that are submitted, unless a token that is not known yet ends it. */
  #runnable(sequence: Sequence): boolean {
    return !sequence.pulling && !(sequence.unresolved > 0 && sequence.fullAt(sequence.numTokens, this.options.contextLength));
  }

  #addPrefills(rows: Row[]): void {
    const budget = prefillBudget(this.options.chunkedPrefillSize, rows.length);
    // Includes a newcomer whose cached prefix leaves a single token: it was admitted after the decodes were planned.
    const planned = new Set(rows.map((row) => row.sequence));
    const prefills = this.running.filter((sequence) => !planned.has(sequence) && this.#runnable(sequence));
    const oldest = prefills[0];
    if (oldest === undefined) return;
    let left = budget;
    let reserved = Math.min(oldest.pending, Math.ceil(budget / 2), this.#room(oldest));
    const shortestFirst = prefills.toSorted((a, b) => b.priority - a.priority || a.pending - b.pending || a.arrival - b.arrival);
    for (const sequence of shortestFirst) {
      if (sequence === oldest) reserved = 0;
      const length = Math.min(sequence.pending, left - reserved, this.#room(sequence));
      if (length <= 0) continue;
      this.#addRow(rows, sequence, length);
      left -= length;
    }
  }

  #addRow(rows: Row[], sequence: Sequence, length: number): void {
    const start = sequence.numComputed;
    rows.push({ sequence, start, length, sample: length === sequence.pending });
    this.#planned += newPages(start, length);
  }

  /** Pages that running sequences still need for the tokens they have. */
  get #claimed(): number {
    return this.running.reduce((sum, other) => sum + newPages(other.numComputed, other.pending), 0);
  }
  get #free(): number {
    return this.kv.available - this.#planned;
  }
  /** Tokens the sequence can add with the pages left: the rest of its last page, then free ones. */
  #room(sequence: Sequence): number {
    return (pagesFor(sequence.numComputed) + this.#free) * LS_PAGE_TOKENS - sequence.numComputed;
  }

  #admit(): void {
    while (this.running.length < this.options.maxNumSeqs) {
      const sequence = this.waiting[0];
      if (sequence === undefined) return;
      const alone = this.running.length === 0;
      if (!alone && this.#blocked?.sequence === sequence && this.#blocked.releases === this.kv.releases) return;
      if (sequence.source !== null && this.#admitPull(sequence, alone)) continue;
      this.kv.open(sequence);
      if (!alone && !this.#fits(sequence)) {
        this.kv.close(sequence);
        this.#blocked = { sequence, releases: this.kv.releases };
        return;
      }
      if (sequence.stage && !this.kv.stage(sequence)) {
        this.kv.close(sequence);
        this.#refuse(sequence, "overloaded", `no host memory for a copy of the KV of ${sequence.promptLength} tokens`);
        continue;
      }
      this.#start(sequence, sequence.numAttached);
    }
  }

  /** Moves an opened sequence from the head of the queue to the running ones. */
  #start(sequence: Sequence, cached: number): void {
    this.#blocked = null;
    this.waiting.shift();
    sequence.status = "running";
    if (!sequence.counted) sequence.numCached = cached;
    sequence.counted = true;
    insertByRank(this.running, sequence);
  }

  /** @returns false when the sequence is an ordinary prompt now, still at the head of the queue */
  #admitPull(sequence: Sequence, alone: boolean): boolean {
    const opened = this.pulls.open(sequence, () => alone || this.#fitsPulled(sequence));
    if (opened === true) this.#start(sequence, sequence.pulling ? sequence.numAttached : sequence.promptLength - 1);
    else if (opened !== false) this.#refuse(sequence, "layout", opened.differs);
    return opened !== false;
  }

  /** Ends the head of the queue. */
  #refuse(sequence: Sequence, refusal: Refused["refusal"], message: string): void {
    this.#finish(sequence, "error");
    this.refused.push({ sequence, refusal, message });
  }

  /** Takes the end of a pull in: the sequence can be computed now, or is an ordinary prompt that waits in its old place. */
  pullEnded(event: NativeTransferEvent): void {
    const sequence = this.running.find((candidate) => candidate.pulling && candidate.slot === event.slot);
    if (sequence !== undefined && !this.pulls.ended(sequence, event)) this.#giveUp(sequence);
  }

  #giveUp(sequence: Sequence): void {
    this.running.splice(this.running.indexOf(sequence), 1);
    this.kv.close(sequence);
    sequence.counted = false;
    sequence.status = "waiting";
    insertByRank(this.waiting, sequence);
  }

  /**
   * A health check at the head of the queue asks whether the engine works, not whether it is full: the running sequence of lowest rank
   * gives its place up, one per step, until the check fits.
   */
  #probeNeedsRoom(): boolean {
    const probe = this.waiting[0];
    const last = this.running.at(-1);
    if (probe === undefined || !probe.internal || last === undefined || last.internal) return false;
    return this.running.length >= this.options.maxNumSeqs || this.#claimed + newPages(0, probe.numTokens) + this.running.length > this.kv.available;
  }

  /** @returns false when results are outstanding: the tokens of who would have to go are not known yet */
  #preempt(): boolean {
    if (this.#submitted > 0) return false;
    this.preemptLast();
    return true;
  }

  /** Pages for all its tokens, beside those that running sequences still claim for theirs, and one spare for each to decode into. */
  #fits(sequence: Sequence): boolean {
    return this.#claimed + newPages(sequence.numComputed, sequence.pending) + this.running.length <= this.kv.available;
  }

  /** As #fits, for a sequence that is not open yet. What the prefix cache has of it is looked up only when it decides. */
  #fitsPulled(sequence: Sequence): boolean {
    if (this.#claimed + pagesFor(sequence.numTokens) + this.running.length <= this.kv.available) return true;
    this.kv.open(sequence);
    const fits = this.#fits(sequence);
    this.kv.close(sequence);
    return fits;
  }

  /** Closes the running sequence of lowest rank into the prefix cache; it waits again, in its old place. */
  preemptLast(): void {
    const sequence = this.running.at(-1);
    if (sequence === undefined) return;
    sequence.preemptions++;
    this.preemptions++;
    if (sequence.pulling) {
      this.pulls.preempted(sequence);
      return this.#giveUp(sequence);
    }
    this.running.pop();
    this.kv.close(sequence);
    sequence.status = "waiting";
    insertByRank(this.waiting, sequence);
  }

  /** Takes note that the device has accepted a step. */
  submitted(rows: readonly Row[]): SubmittedStep {
    this.#submitted++;
    for (const { sequence, length, sample } of rows) {
      sequence.numComputed += length;
      if (sample) sequence.expect();
    }
    this.kv.took(rows.reduce((sum, row) => sum + newPages(row.start, row.length), 0));
    return { rows, slots: rows.map(({ sequence }) => sequence.slot) };
  }

  /** Takes the result of the oldest submitted step in. Outputs of sequences that got a token, in row order. */
  apply({ rows, slots }: SubmittedStep, result: StepResult): SequenceOutput[] {
    if (result.rows.length !== rows.length) throw new EngineError("engine", `step result has ${result.rows.length} rows, the plan had ${rows.length}`);
    this.#submitted--;
    this.kv.settle(result);
    const outputs: SequenceOutput[] = [];
    rows.forEach(({ sequence, start, length, sample }, index) => {
      const { slot, token, logprob, top } = result.rows[index]!;
      if (slot !== slots[index] || (token !== null) !== sample) {
        throw new EngineError("engine", `step result row ${index}: slot ${slot}, ${token === null ? "no token" : "a token"}; expected slot ${slots[index]}, ${sample ? "a token" : "no token"}`);
      }
      if (!sequence.internal) this.promptTokensComputed += Math.max(0, Math.min(start + length, sequence.promptLength) - start);
      // Ended since, by the token before or from outside: what was computed ahead is nobody's.
      if (token === null || sequence.status === "finished") return;
      sequence.resolve(token);
      const finishReason = sequence.endOf(token, start + length + 1, this.options.contextLength);
      if (finishReason !== null) this.#finish(sequence, finishReason);
      outputs.push({ sequence, token, logprob, top, finishReason });
    });
    return outputs;
  }

  /** Ends a sequence from outside. null when it has ended already. */
  abort(sequence: Sequence, finishReason: FinishReason): SequenceOutput | null {
    if (sequence.status === "finished") return null;
    this.#finish(sequence, finishReason);
    return { sequence, token: null, logprob: 0, top: [], finishReason };
  }

  #finish(sequence: Sequence, finishReason: FinishReason): void {
    const list = sequence.status === "running" ? this.running : this.waiting;
    list.splice(list.indexOf(sequence), 1);
    if (sequence.status === "running") {
      // A pull that is under way is dropped with its sequence.
      if (sequence.stage && finishReason === "length") this.kv.publish(sequence);
      this.kv.close(sequence);
    } else if (sequence.source !== null) this.kv.drop(sequence.source);
    sequence.forget();
    sequence.source = null;
    sequence.status = "finished";
    sequence.finishReason = finishReason;
  }
}
