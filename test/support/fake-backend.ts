import type { WeightTensor } from "../../src/config/model-spec.ts";
import {
  LS_PAGE_TOKENS as PAGE, LS_PLAN_HEADER_WORDS, LS_PLAN_ROW_WORDS, LS_RESULT_HEADER_WORDS, LS_ROW_SAMPLE, ls_event, ls_status,
} from "../../src/engine/native/abi.gen.ts";
import { NativeError, type DeviceInfo, type NativeBackend, type PoolCounts } from "../../src/engine/native/backend.ts";
import type { TransferOptions } from "../../src/engine/types.ts";
import { FakeTransfer } from "./fake-transfer.ts";
import { floatToWord, splitU64 } from "../../src/util/words.ts";

export interface FakeOptions {
  vocab: number;
  maxSeqs: number;
  maxBatchTokens: number;
  prefixCache: boolean;
  /** The model: all tokens so far and the seed → the next one. */
  next?: (tokens: readonly number[], seed: bigint) => number;
  /** Called before a step is computed; throwing fails the device. */
  beforeStep?: (step: number) => void;
}

interface Page {
  tokens: number[];
  refs: number;
  /** Place in the prefix tree; null = not cached. */
  node: { domain: bigint; parent: number | null; children: Set<number>; used: number } | null;
}

interface Open {
  pages: number[];
  /** Positions with content, submitted steps included. */
  computed: number;
  /** As computed, of the steps that were waited for. */
  completed: number;
  domain: bigint;
}

/** The next token as a function of everything before it: any mix-up of pages shows in the output. */
export function modelToken(tokens: readonly number[], seed: bigint, vocab: number): number {
  let hash = Number(BigInt.asUintN(31, seed)) ^ 0x9e3779b9;
  for (const token of tokens) hash = Math.imul(hash ^ token, 0x01000193) + (hash >>> 15);
  return (hash >>> 0) % vocab;
}

/** What a request must produce, computed without an engine. */
export function expectedTokens(prompt: readonly number[], seed: bigint, count: number, vocab: number, next = (tokens: readonly number[]) => modelToken(tokens, seed, vocab)): number[] {
  const tokens = [...prompt];
  while (tokens.length < prompt.length + count) tokens.push(next(tokens));
  return tokens.slice(prompt.length);
}

/** A device library in TypeScript with the page semantics of native/layerscale.h: pool, block tables, prefix tree, LRU eviction, events. */
export class FakeBackend implements NativeBackend {
  readonly device: DeviceInfo = { device: "fake", isa: "none", isas: ["none"], threads: 1, name: "model backend" };
  readonly handle = null;
  readonly tensors: WeightTensor[] = [];
  destroyed = false;
  transfer: FakeTransfer | null = null;
  #pages: Page[] = [];
  readonly #free: number[] = [];
  readonly #roots = new Map<bigint, Set<number>>();
  readonly #sequences = new Map<number, Open>();
  readonly #steps: { plan: number[]; step: number; owners: Open[] }[] = [];
  #events: number[][] = [];
  #clock = 0;
  #evictions = 0;

  constructor(private readonly options: FakeOptions) {}

  mapWeights(): number {
    return 0;
  }
  setTensor(tensor: WeightTensor): void {
    this.tensors.push(tensor);
  }
  finishWeights(): void {}
  memory(): null {
    return null;
  }

  createPool(pages: number): void {
    this.#pages = Array.from({ length: pages }, () => ({ tokens: [], refs: 0, node: null }));
    for (let page = pages - 1; page >= 0; page--) this.#free.push(page);
  }

  poolStats(): PoolCounts {
    const held = this.#pages.filter((page) => page.refs > 0).length;
    const cached = this.#pages.filter((page) => page.refs === 0 && page.node !== null).length;
    return { total: this.#pages.length, free: this.#free.length, cached, held, openSeqs: this.#sequences.size, evictions: this.#evictions };
  }

  checkPool(): void {
    const { free, cached, held, total } = this.poolStats();
    if (free + cached + held !== total) throw this.#error(ls_status.LS_INTERNAL, "ls_pool_check", `${free} + ${cached} + ${held} != ${total}`);
    const refs = this.#pages.map(() => 0);
    for (const { pages } of this.#sequences.values()) for (const page of pages) refs[page]!++;
    this.#pages.forEach((page, id) => {
      if (page.refs !== refs[id]) throw this.#error(ls_status.LS_INTERNAL, "ls_pool_check", `page ${id} has ${page.refs} references, ${refs[id]} tables name it`);
    });
  }

  openSequence(tokens: Int32Array, count: number, domain: bigint): { slot: number; cachedTokens: number; start: number } {
    const slot = Array.from({ length: this.options.maxSeqs }, (_, index) => index).find((index) => !this.#sequences.has(index));
    if (slot === undefined) throw this.#error(ls_status.LS_NO_SLOTS, "ls_seq_open", "no slot");
    const pages: number[] = [];
    while (this.options.prefixCache && (pages.length + 1) * PAGE <= count - 1) {
      const content = tokens.subarray(pages.length * PAGE, (pages.length + 1) * PAGE);
      const page = [...this.#children(domain, pages.at(-1) ?? null)].find((id) => this.#pages[id]!.tokens.every((token, index) => token === content[index]));
      if (page === undefined) break;
      pages.push(page);
    }
    for (const page of pages) {
      this.#pages[page]!.refs++;
      this.#pages[page]!.node!.used = ++this.#clock;
    }
    const sequence: Open = { pages, computed: pages.length * PAGE, completed: 0, domain };
    this.#sequences.set(slot, sequence);
    const cachedTokens = sequence.computed;
    if (this.options.prefixCache) for (const token of this.#head(sequence, tokens.subarray(0, count - 1))) this.#write(sequence, token);
    sequence.completed = sequence.computed;
    return { slot, cachedTokens, start: sequence.computed };
  }

  closeSequence(slot: number, commit: number): void {
    const sequence = this.#slot(slot, "ls_seq_close");
    this.transfer?.closed(slot);
    this.#sequences.delete(slot);
    const full = Math.floor(Math.min(commit, sequence.completed) / PAGE);
    let parent: number | null = null;
    sequence.pages.forEach((id, index) => {
      const page = this.#pages[id]!;
      page.refs--;
      if (index < full) {
        const twin: number | undefined = [...this.#children(sequence.domain, parent)].find((other) => this.#pages[other]!.tokens.join() === page.tokens.join());
        if (twin === undefined) {
          page.node = { domain: sequence.domain, parent, children: new Set(), used: ++this.#clock };
          this.#children(sequence.domain, parent).add(id);
          this.#events.push([ls_event.LS_EVENT_STORED, id, parent ?? -1, ...splitU64(sequence.domain), ...page.tokens]);
        }
        parent = twin ?? id;
      }
      if (page.refs === 0 && page.node === null) this.#release(id);
    });
  }

  submit(plan: Int32Array, words: number): void {
    if (this.#steps.length === 2) throw this.#error(ls_status.LS_STATE, "ls_step_submit", "two steps are submitted already");
    const rows = plan[0]!;
    if (words !== LS_PLAN_HEADER_WORDS + rows * LS_PLAN_ROW_WORDS + plan[1]!) throw this.#error(ls_status.LS_INVALID, "ls_step_submit", `${words} words`);
    if (plan[1]! > this.options.maxBatchTokens) throw this.#error(ls_status.LS_INVALID, "ls_step_submit", `${plan[1]} tokens`);
    const seen = new Set<number>();
    const owners: Open[] = [];
    let needed = 0;
    for (let row = 0; row < rows; row++) {
      const [slot, start, length] = plan.subarray(LS_PLAN_HEADER_WORDS + row * LS_PLAN_ROW_WORDS) as unknown as [number, number, number];
      const sequence = this.#slot(slot, "ls_step_submit");
      if (seen.has(slot) || start !== sequence.computed || length < 1) throw this.#error(ls_status.LS_INVALID, "ls_step_submit", `slot ${slot} start ${start} length ${length}`);
      seen.add(slot);
      owners.push(sequence);
      needed += Math.ceil((start + length) / PAGE) - sequence.pages.length;
    }
    const { free, cached } = this.poolStats();
    if (needed > free + cached) throw this.#error(ls_status.LS_NO_PAGES, "ls_step_submit", `${needed} pages needed, ${free + cached} left`);
    let token = LS_PLAN_HEADER_WORDS + rows * LS_PLAN_ROW_WORDS;
    for (let row = 0; row < rows; row++) {
      const [slot, , length] = plan.subarray(LS_PLAN_HEADER_WORDS + row * LS_PLAN_ROW_WORDS) as unknown as [number, number, number];
      const sequence = this.#slot(slot, "ls_step_submit");
      for (let index = 0; index < length; index++) this.#write(sequence, plan[token++]!);
    }
    this.#steps.push({ plan: Array.from(plan.subarray(0, words)), step: plan[2]!, owners });
  }

  wait(result: Int32Array): number {
    const submitted = this.#steps.shift();
    if (submitted === undefined) throw this.#error(ls_status.LS_STATE, "ls_step_wait", "nothing submitted");
    const { plan, step, owners } = submitted;
    this.options.beforeStep?.(step);
    const { free, cached, held, total } = this.poolStats();
    const rows = plan[0]!;
    result.set([rows, step, free, cached, held, total, 1, 0]);
    let at = LS_RESULT_HEADER_WORDS;
    for (let row = 0; row < rows; row++) {
      const words = plan.slice(LS_PLAN_HEADER_WORDS + row * LS_PLAN_ROW_WORDS);
      const [slot, start, length, flags] = words as [number, number, number, number];
      const seed = (BigInt(words[7]! >>> 0) << 32n) | BigInt(words[6]! >>> 0);
      // Of a sequence that was closed since, its pages may be another's: it samples something.
      const owner = this.#sequences.get(slot) === owners[row] ? owners[row]! : null;
      const tokens = owner?.pages.flatMap((page) => this.#pages[page]!.tokens).slice(0, start + length) ?? [];
      if (tokens.some((token) => token < 0)) throw this.#error(ls_status.LS_INTERNAL, "ls_step_wait", `slot ${slot} computes a token that nobody sampled`);
      const next = this.options.next ?? ((all: readonly number[], key: bigint) => modelToken(all, key, this.options.vocab));
      const sampled = (flags & LS_ROW_SAMPLE) !== 0 ? next(tokens, seed) : -1;
      if (owner !== null) {
        owner.completed = start + length;
        this.#carry(owner, sampled);
      }
      const alternatives = sampled < 0 ? 0 : flags >> 8;
      result.set([slot, sampled, floatToWord(sampled < 0 ? 0 : -0.5), alternatives], at);
      at += 4;
      for (let index = 0; index < alternatives; index++) {
        result.set([(sampled + index) % this.options.vocab, floatToWord(index === 19 ? -Infinity : -0.5 - index)], at);
        at += 2;
      }
    }
    return at;
  }

  /** Puts what a sequence sampled where the next step has begun with it. */
  #carry(owner: Open, sampled: number): void {
    if (owner.computed <= owner.completed) return;
    const { tokens } = this.#pages[owner.pages[Math.floor(owner.completed / PAGE)]!]!;
    if (tokens[owner.completed % PAGE] === -1) tokens[owner.completed % PAGE] = sampled;
  }

  clearCache(): void {
    for (const roots of this.#roots.values()) roots.clear();
    this.#pages.forEach((page, id) => {
      if (page.node === null) return;
      page.node = null;
      if (page.refs === 0) this.#release(id);
    });
    this.#events.push([ls_event.LS_EVENT_CLEARED]);
  }

  drainEvents(words: Int32Array): number {
    let at = 0;
    while (this.#events.length > 0 && at + this.#events[0]!.length <= words.length) {
      const event = this.#events.shift()!;
      words.set(event, at);
      at += event.length;
    }
    return at;
  }

  startTransfer(transfer: TransferOptions, modelDigest: Uint8Array): FakeTransfer {
    return (this.transfer = new FakeTransfer(this, transfer, modelDigest));
  }

  destroy(): void {
    this.destroyed = true;
  }

  #children(domain: bigint, parent: number | null): Set<number> {
    if (parent !== null) return this.#pages[parent]!.node!.children;
    let roots = this.#roots.get(domain);
    if (roots === undefined) this.#roots.set(domain, (roots = new Set()));
    return roots;
  }

  /** Tokens of positions [0, computed) of an open sequence: what a copy of its KV is here. */
  contentOf(slot: number): number[] {
    return this.#slot(slot, "contentOf").pages.flatMap((page) => this.#pages[page]!.tokens);
  }

  /** Takes pages for positions up to `until` of an open sequence; they hold nothing yet. */
  reserve(slot: number, until: number): void {
    const sequence = this.#slot(slot, "reserve");
    const { free, cached } = this.poolStats();
    if (Math.ceil(until / PAGE) - sequence.pages.length > free + cached) throw this.#error(ls_status.LS_NO_PAGES, "ls_seq_open_pull", "no pages");
    while (sequence.pages.length * PAGE < until) {
      const page = this.#free.pop() ?? this.#evict();
      this.#pages[page] = { tokens: [], refs: 1, node: null };
      sequence.pages.push(page);
    }
  }

  /** Writes positions [computed, content.length) into reserved pages. */
  fill(slot: number, content: readonly number[]): void {
    const sequence = this.#slot(slot, "fill");
    for (; sequence.computed < content.length; sequence.computed++) this.#pages[sequence.pages[Math.floor(sequence.computed / PAGE)]!]!.tokens[sequence.computed % PAGE] = content[sequence.computed]!;
    sequence.completed = sequence.computed;
  }

  /** Leading tokens that some page behind the attached ones shares with the prompt, when there is a page to copy them to. */
  #head(sequence: Open, prompt: Int32Array): number[] {
    const { free, cached } = this.poolStats();
    if (free + cached === 0) return [];
    let head: number[] = [];
    for (const id of this.#children(sequence.domain, sequence.pages.at(-1) ?? null)) {
      const { tokens } = this.#pages[id]!;
      let same = 0;
      while (same < tokens.length && tokens[same] === prompt[sequence.computed + same]) same++;
      if (same > head.length) head = tokens.slice(0, same);
    }
    return head;
  }

  #write(sequence: Open, token: number): void {
    if (sequence.computed === sequence.pages.length * PAGE) {
      const page = this.#free.pop() ?? this.#evict();
      this.#pages[page] = { tokens: [], refs: 1, node: null };
      sequence.pages.push(page);
    }
    this.#pages[sequence.pages.at(-1)!]!.tokens.push(token);
    sequence.computed++;
  }

  /** The least recently used cached page without children. */
  #evict(): number {
    let victim = -1;
    this.#pages.forEach(({ refs, node }, id) => {
      if (refs === 0 && node !== null && node.children.size === 0 && (victim < 0 || node.used < this.#pages[victim]!.node!.used)) victim = id;
    });
    if (victim < 0) throw this.#error(ls_status.LS_INTERNAL, "evict", "no page to evict");
    const { domain, parent } = this.#pages[victim]!.node!;
    this.#children(domain, parent).delete(victim);
    this.#events.push([ls_event.LS_EVENT_REMOVED, victim]);
    this.#evictions++;
    return victim;
  }

  #release(id: number): void {
    this.#pages[id]!.tokens = [];
    this.#free.push(id);
  }

  #slot(slot: number, call: string): Open {
    const sequence = this.#sequences.get(slot);
    if (sequence === undefined) throw this.#error(ls_status.LS_INVALID, call, `slot ${slot} is not open`);
    return sequence;
  }

  #error(status: number, call: string, text: string): NativeError {
    return new NativeError(status, call, text);
  }
}
