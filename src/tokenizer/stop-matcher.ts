/** One node of the Aho–Corasick automaton: the longest end of the text so far that begins some stop string. */
interface State {
  next: Map<number, State>;
  fail: State | null;
  /** Length of that end. */
  depth: number;
  /** Longest stop string that ends here. */
  stop: string | null;
}

const newState = (depth: number): State => ({ next: new Map(), fail: null, depth, stop: null });

/**
 * Cuts a streamed text at the first stop string. The first is the one that is complete first; of several complete at the
 * same character, the longest, so that no character of a stop string leaves. Held back is only what may still become a
 * stop string. Constant work per character for any number of stop strings.
 */
export class StopMatcher {
  readonly #root: State;
  #state: State;
  #held = "";
  #done = false;

  /** @throws RangeError for an empty stop string (it would match everywhere). */
  constructor(stops: readonly string[]) {
    this.#root = automaton(stops);
    this.#state = this.#root;
  }

  /** Text that may leave. After a match nothing leaves any more. */
  push(text: string): { text: string; matched: string | null } {
    if (this.#done || text === "") return { text: "", matched: null };
    const all = this.#held + text;
    let state = this.#state;
    for (let i = this.#held.length; i < all.length; i++) {
      state = this.#step(state, all.charCodeAt(i));
      if (state.stop === null) continue;
      this.#done = true;
      this.#held = "";
      return { text: all.slice(0, i + 1 - state.stop.length), matched: state.stop };
    }
    this.#state = state;
    this.#held = all.slice(all.length - state.depth);
    return { text: all.slice(0, all.length - state.depth), matched: null };
  }

  /** The text ended without a match: what was held back. */
  flush(): string {
    const held = this.#held;
    this.#held = "";
    this.#state = this.#root;
    return held;
  }

  #step(from: State, code: number): State {
    for (let state: State | null = from; state; state = state.fail) {
      const next = state.next.get(code);
      if (next) return next;
    }
    return this.#root;
  }
}

function automaton(stops: readonly string[]): State {
  const root = newState(0);
  for (const stop of stops) {
    if (stop === "") throw new RangeError('stop is "", expected a non-empty string');
    let state = root;
    for (let i = 0; i < stop.length; i++) {
      const code = stop.charCodeAt(i);
      let next = state.next.get(code);
      if (!next) state.next.set(code, (next = newState(i + 1)));
      state = next;
    }
    state.stop = stop;
  }
  // Breadth first: a state's fail link is shallower, so it is complete when the state is reached.
  const queue = [root];
  for (const state of queue) {
    for (const [code, child] of state.next) {
      let fail = state.fail;
      while (fail && !fail.next.has(code)) fail = fail.fail;
      child.fail = fail?.next.get(code) ?? root;
      child.stop ??= child.fail.stop;
      queue.push(child);
    }
  }
  return root;
}
