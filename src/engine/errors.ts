export type EngineErrorKind =
  /** The request can never run: empty prompt, id outside the vocabulary, larger than context or pool. */
  | "invalid"
  /** Not now: stopping. */
  | "unavailable"
  /** The device or the library failed; the engine is gone. */
  | "engine";

export class EngineError extends Error {
  override name = "EngineError";
  constructor(
    readonly kind: EngineErrorKind,
    message: string,
    /** The request field at fault, where there is one. */
    readonly param: string | null = null,
    /** Machine-readable cause: "context_length_exceeded", "vocabulary", "empty_prompt", "pool". */
    readonly code: string | null = null,
  ) {
    super(message);
  }
}
