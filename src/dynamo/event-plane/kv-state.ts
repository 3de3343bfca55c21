import type { KvEvent } from "../../engine/types.ts";
import { sequenceHash, tokensHash } from "./hashes.ts";

export interface StoredBlock {
  block_hash: bigint;
  tokens_hash: bigint;
}
/** What one event says, in the router's words. */
export type EventData =
  | { stored: { parent_hash: bigint | null; start_position: null; blocks: (StoredBlock & { mm_extra_info: null })[] } }
  | { removed: { block_hashes: bigint[] } }
  | "cleared";

/** Blocks that one event may carry. */
const MAX_BLOCKS = 128;

interface Block {
  tokens: bigint;
  parent: bigint | null;
  /** Pages that hold this content. */
  pages: number;
}

/** Stores that continue each other become one event: a chain from its parent. */
function pushStored(out: EventData[], parent: bigint | null, block: StoredBlock): void {
  const last = out.at(-1);
  const entry = { ...block, mm_extra_info: null };
  if (last !== undefined && last !== "cleared" && "stored" in last) {
    const { blocks } = last.stored;
    if (parent !== null && blocks.length < MAX_BLOCKS && blocks.at(-1)!.block_hash === parent) {
      blocks.push(entry);
      return;
    }
  }
  out.push({ stored: { parent_hash: parent, start_position: null, blocks: [entry] } });
}
function pushRemoved(out: EventData[], hash: bigint): void {
  const last = out.at(-1);
  if (last !== undefined && last !== "cleared" && "removed" in last && last.removed.block_hashes.length < MAX_BLOCKS) last.removed.block_hashes.push(hash);
  else out.push({ removed: { block_hashes: [hash] } });
}

/** Pages of the prefix cache as blocks of the router. Pure: engine events in, router events out. */
export class KvState {
  /** In order of storing, so parents stand before their children. */
  readonly #blocks = new Map<bigint, Block>();
  readonly #pages = new Map<number, bigint>();

  get size(): number {
    return this.#blocks.size;
  }

  /** @returns events for the router, merged where they continue each other; empty when nothing changes for it */
  apply(events: readonly KvEvent[], unknownParent: (event: KvEvent) => void = () => {}): EventData[] {
    const out: EventData[] = [];
    for (const event of events) {
      if (event.kind === "stored") {
        const parent = event.parent === null ? null : this.#pages.get(event.parent);
        if (parent === undefined) {
          unknownParent(event);
          continue;
        }
        const tokens = tokensHash(event.tokenIds, event.domain);
        const hash = sequenceHash(parent, tokens);
        this.#pages.set(event.page, hash);
        const held = this.#blocks.get(hash);
        if (held) held.pages += 1;
        else {
          this.#blocks.set(hash, { tokens, parent, pages: 1 });
          pushStored(out, parent, { block_hash: hash, tokens_hash: tokens });
        }
      } else if (event.kind === "removed") {
        const hash = this.#pages.get(event.page);
        const block = hash === undefined ? undefined : this.#blocks.get(hash);
        if (hash === undefined || block === undefined) continue;
        this.#pages.delete(event.page);
        block.pages -= 1;
        if (block.pages > 0) continue;
        this.#blocks.delete(hash);
        pushRemoved(out, hash);
      } else {
        this.#blocks.clear();
        this.#pages.clear();
        out.push("cleared");
      }
    }
    return out;
  }

  /** Everything held, as stores that build it up from nothing. */
  dump(): EventData[] {
    const out: EventData[] = [];
    for (const [hash, block] of this.#blocks) pushStored(out, block.parent, { block_hash: hash, tokens_hash: block.tokens });
    return out;
  }
}
