import { createHash, timingSafeEqual } from "node:crypto";
import { HttpError } from "./http-errors.ts";

const digest = (text: string): Buffer => createHash("sha256").update(text).digest();

/** Checks the key of a request: `Authorization: Bearer <key>` or `x-api-key: <key>`, equal to the licence key. */
export class KeyCheck {
  private readonly expected: Buffer;

  constructor(key: string) {
    this.expected = digest(key);
  }

  /** @throws HttpError 401 */
  require(headers: Headers): void {
    const bearer = /^Bearer +(.+)$/i.exec(headers.get("authorization") ?? "")?.[1];
    const given = [bearer, headers.get("x-api-key")].filter((key) => key !== undefined && key !== null && key !== "") as string[];
    // Digests have one length, so the comparison's time tells nothing about the key.
    if (given.some((key) => timingSafeEqual(digest(key.trim()), this.expected))) return;
    throw new HttpError(401, "authentication_error", given.length === 0 ? "missing key: send the licence key as bearer token or x-api-key" : "the key is not this server's licence key", {
      headers: { "www-authenticate": "Bearer" },
    });
  }
}
