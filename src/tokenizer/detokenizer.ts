import type { PieceStream } from "./decoder.ts";
import type { Tokenizer } from "./tokenizer.ts";

/**
 * Incremental decoding of one generated text: constant work per token. All pushes and the flush joined equal
 * `tokenizer.decode` of all ids. A character split over tokens comes out with its last byte; U+FFFD comes out only for
 * bytes that cannot become valid any more.
 */
export class Detokenizer {
  readonly #tokenizer: Tokenizer;
  readonly #skipSpecialTokens: boolean;
  readonly #stream: PieceStream;
  #first: boolean;

  /**
   * `continuation`: the ids go on a text that stands before them (a raw completion), so that a decoder which drops the
   * space before the first word of a text keeps it.
   */
  constructor(tokenizer: Tokenizer, { skipSpecialTokens, continuation = false }: { skipSpecialTokens: boolean; continuation?: boolean }) {
    this.#tokenizer = tokenizer;
    this.#skipSpecialTokens = skipSpecialTokens;
    this.#stream = tokenizer.pieceStream(continuation);
    this.#first = !continuation;
  }

  /** Text that is certain after these ids. */
  push(ids: readonly number[]): string {
    let text = "";
    for (const id of ids) {
      const piece = this.#tokenizer.pieceOf(id, { skipSpecialTokens: this.#skipSpecialTokens, first: this.#first });
      if (piece === null) continue;
      this.#first = false;
      text += this.#stream.push(piece);
    }
    return text;
  }

  /** The text ends: what was held back, bytes that never became a character as U+FFFD. */
  flush(): string {
    return this.#stream.flush();
  }
}
