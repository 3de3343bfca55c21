/**
 * Open-addressed hash of BPE merges: (left id, right id) → rank and merged id. Three typed arrays instead of a Map with
 * string or double keys: building 280 k merges and the lookups of a long prompt both stay in the tens of milliseconds.
 */
export class MergeTable {
  readonly #mask: number;
  /** Per slot: left id + 1 (0 = empty), right id, rank, merged id. */
  readonly #slots: Int32Array;

  constructor(capacity: number) {
    let size = 16;
    while (size < capacity * 2) size *= 2;
    this.#mask = size - 1;
    this.#slots = new Int32Array(size * 4);
  }

  #find(left: number, right: number): number {
    const slots = this.#slots;
    let hash = Math.imul(left, 0x9e3779b1) ^ Math.imul(right, 0x85ebca77);
    hash ^= hash >>> 15;
    for (let slot = hash & this.#mask; ; slot = (slot + 1) & this.#mask) {
      const at = slot * 4;
      if (slots[at] === 0 || (slots[at] === left + 1 && slots[at + 1] === right)) return at;
    }
  }

  /** A pair given twice keeps the later rank, as the reference does. */
  set(left: number, right: number, rank: number, merged: number): void {
    const at = this.#find(left, right);
    this.#slots[at] = left + 1;
    this.#slots[at + 1] = right;
    this.#slots[at + 2] = rank;
    this.#slots[at + 3] = merged;
  }

  /** Rank of the pair, or -1. */
  rank(left: number, right: number): number {
    const at = this.#find(left, right);
    return this.#slots[at] === 0 ? -1 : this.#slots[at + 2]!;
  }

  /** Id that a known pair merges into. */
  merged(left: number, right: number): number {
    return this.#slots[this.#find(left, right) + 3]!;
  }
}
