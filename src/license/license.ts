import { createPublicKey, verify } from "node:crypto";
import { z } from "zod";

/**
 * Licence keys: `LSK-<base64url payload>.<base64url Ed25519 signature over the ASCII bytes of that base64url payload>`.
 * Verified offline with the public key below; the payload is JSON `{id, tier, sessions?, max_ctx?, iat, exp?}`, dates are `YYYY-MM-DD` in UTC.
 */
const PUBLIC_KEY = createPublicKey(`-----BEGIN PUBLIC KEY-----
MCowBQYDK2VwAyEAG6yA5mA4UdX9t3/nHa+DhtrRSojoUXC94F0ikcMp4rM=
-----END PUBLIC KEY-----
`);

export interface License {
  id: string;
  tier: string;
  /** Live sessions allowed; null = no ceiling. */
  maxSessions: number | null;
  /** Ceiling of the context length; null = none. */
  maxCtx: number | null;
  issued: string;
  /** Last valid day, UTC; null = for ever. */
  expires: string | null;
}

/** Every refusal is one line for stderr; the process ends with this code (EX_CONFIG of sysexits). */
export const LICENSE_EXIT_CODE = 78;

export class LicenseError extends Error {
  override name = "LicenseError";
  constructor(readonly kind: "missing" | "malformed" | "forged" | "expired", message: string) {
    super(message);
  }
}

const day = z.string().regex(/^\d{4}-\d{2}-\d{2}$/).refine(isCalendarDay);
const Payload = z.object({
  id: z.string().min(1),
  tier: z.string().min(1),
  sessions: z.number().int().positive().optional(),
  max_ctx: z.number().int().positive().optional(),
  iat: day,
  exp: day.optional(),
});

const KEY = /^LSK-([A-Za-z0-9_-]+)\.([A-Za-z0-9_-]+)$/;
const SIGNATURE_BYTES = 64;

/**
 * Checks a key's form, signature and last day.
 * @param source where the key came from, for the message: `--license-key` or `LAYERSCALE_LICENSE_KEY`
 * @throws LicenseError missing, malformed, forged or expired, each with its own line
 */
export function checkLicense(key: string | undefined, source: string, now = new Date()): License {
  if (key === undefined || key.trim() === "")
    throw new LicenseError("missing", "license: no key given; pass --license-key LSK-… or set LAYERSCALE_LICENSE_KEY (README.md has the free community key)");
  const match = KEY.exec(key.trim());
  if (!match) throw malformed(source, "expected LSK-<payload>.<signature> in base64url");
  const [, payload, signature] = match as unknown as [string, string, string];
  const signatureBytes = Buffer.from(signature, "base64url");
  // One spelling only: spare bits of the last character would otherwise give a key many texts.
  if (signatureBytes.toString("base64url") !== signature || Buffer.from(payload, "base64url").toString("base64url") !== payload)
    throw malformed(source, "the base64url text is not canonical");
  if (signatureBytes.length !== SIGNATURE_BYTES) throw malformed(source, `the signature has ${signatureBytes.length} bytes, expected ${SIGNATURE_BYTES}`);
  // Signature first: nothing inside an unsigned payload is worth reading.
  if (!verify(null, Buffer.from(payload, "ascii"), PUBLIC_KEY, signatureBytes))
    throw new LicenseError("forged", `license: the signature of ${source} does not match its payload; the key was altered or not issued by us`);
  const fields = parsePayload(payload, source);
  const today = now.toISOString().slice(0, 10);
  if (fields.exp !== undefined && today > fields.exp)
    throw new LicenseError("expired", `license: the key "${fields.id}" expired on ${fields.exp} (today is ${today} UTC)`);
  return {
    id: fields.id,
    tier: fields.tier,
    maxSessions: fields.sessions ?? null,
    maxCtx: fields.max_ctx ?? null,
    issued: fields.iat,
    expires: fields.exp ?? null,
  };
}

function parsePayload(payload: string, source: string): z.infer<typeof Payload> {
  let json: unknown;
  try {
    json = JSON.parse(Buffer.from(payload, "base64url").toString("utf8"));
  } catch {
    throw malformed(source, "the payload is not JSON");
  }
  const parsed = Payload.safeParse(json);
  if (!parsed.success) {
    const issue = parsed.error.issues[0];
    throw malformed(source, `payload field "${issue?.path.join(".") ?? "?"}": ${issue?.message ?? "invalid"}`);
  }
  return parsed.data;
}

function malformed(source: string, why: string): LicenseError {
  return new LicenseError("malformed", `license: ${source} is malformed: ${why}`);
}

function isCalendarDay(text: string): boolean {
  const date = new Date(`${text}T00:00:00Z`);
  return !Number.isNaN(date.getTime()) && date.toISOString().startsWith(text);
}
