/**
 * Why a model could not be had from the hub. `denied`: the hub wants a (better) token. `unreachable`: no answer, or none that means anything; a copy in
 * the cache may serve. `missing`: no such repo, revision or file. `local`: disk, rights, or a file that is not what the hub said.
 */
export type HubErrorKind = "denied" | "unreachable" | "missing" | "local";

/** Every refusal around the hub: one line that names repo and cause. */
export class HubError extends Error {
  override name = "HubError";
  constructor(readonly kind: HubErrorKind, message: string) {
    // Texts of a server may hold anything.
    super(message.replace(/[\p{Cc}\u2028\u2029]/gu, "?").slice(0, 1000));
  }
}

/** An answer that another try may better. */
export class TransientError extends Error {
  override name = "TransientError";
  constructor(
    message: string,
    /** Milliseconds the server asked to wait; null = it said nothing. */
    readonly retryAfterMs: number | null = null,
    /** No waiting cures it, though a copy in the cache may serve. */
    readonly hopeless = false,
  ) {
    super(message);
  }
}

/** The server has no such rest of the file: only all of it can be asked for. */
export class RangeRefused extends TransientError {}
