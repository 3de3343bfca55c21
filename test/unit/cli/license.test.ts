import { describe, expect, test } from "bun:test";
import { checkLicense, LicenseError } from "../../../src/license/license.ts";
import { COMMUNITY_KEY } from "../../../scripts/lib/paths.mjs";

const EXPIRED =
  "LSK-eyJpZCI6ImV4cGlyZWQtZXhhbXBsZSIsInRpZXIiOiJwcm8iLCJzZXNzaW9ucyI6NjQsImlhdCI6IjIwMjUtMDEtMDEiLCJleHAiOiIyMDI1LTEyLTMxIn0.6NGPRNi2pHY_I-wlPtgZY9CYoHZKRbnJ25ttneWFePkFg7F74849uezORsjq_WZuHqcgkpHyI_p17S1qjiVEDw";
const LIMITED =
  "LSK-eyJpZCI6ImxpbWl0cy1leGFtcGxlIiwidGllciI6InRyaWFsIiwic2Vzc2lvbnMiOjIsIm1heF9jdHgiOjQwOTYsImlhdCI6IjIwMjYtMTEtMjkifQ.eKWLIHLsPRtwHKrHqNTtFrQsJXpbN6f1_ZJ6t5f2kCG1HJZ-fJ78kDj0F1qrbBbMarwaagpBHyqo6FL6HWglAw";

function refusal(key: string | undefined, now?: Date): LicenseError {
  try {
    checkLicense(key, "--license-key", now);
  } catch (error) {
    if (error instanceof LicenseError) return error;
    throw error;
  }
  throw new Error("the key was accepted");
}

describe("licence keys", () => {
  test("the community key has no end and no ceiling", () => {
    expect(checkLicense(COMMUNITY_KEY, "--license-key")).toMatchObject({ id: "community", maxSessions: 64, maxCtx: null, expires: null });
  });
  test("a limited key carries its ceilings", () => {
    expect(checkLicense(LIMITED, "--license-key")).toMatchObject({ maxSessions: 2, maxCtx: 4096 });
  });
  test("exp is the last valid day, in UTC", () => {
    expect(checkLicense(EXPIRED, "--license-key", new Date("2025-12-31T23:59:59Z")).expires).toBe("2025-12-31");
    expect(refusal(EXPIRED, new Date("2026-01-01T00:00:00Z")).kind).toBe("expired");
  });
  test("an iat in the future is accepted", () => {
    expect(checkLicense(COMMUNITY_KEY, "--license-key", new Date("2020-01-01T00:00:00Z")).id).toBe("community");
  });
  test.each([[undefined], [""], ["  "]])("missing: %p", (key) => {
    expect(refusal(key).kind).toBe("missing");
  });
  test.each([["abc"], ["LSK-"], ["LSK-abc"], ["LSK-a.b.c"], ["LSK-!!.??"], [COMMUNITY_KEY.slice(0, -4)], [COMMUNITY_KEY + "AAAA"], [COMMUNITY_KEY.replace("LSK-", "lsk-")]])("malformed: %p", (key) => {
    expect(refusal(key).kind).toBe("malformed");
  });
  test("forged: any other payload under a real signature", () => {
    const signature = COMMUNITY_KEY.split(".")[1];
    const payload = Buffer.from(JSON.stringify({ id: "community", tier: "enterprise", iat: "2026-11-29" })).toString("base64url");
    expect(refusal(`LSK-${payload}.${signature}`).kind).toBe("forged");
  });
  test("every single changed character is refused", () => {
    for (let i = 4; i < COMMUNITY_KEY.length; i++) {
      const c = COMMUNITY_KEY[i] === "A" ? "B" : "A";
      if (COMMUNITY_KEY[i] === ".") continue;
      expect(["forged", "malformed"]).toContain(refusal(COMMUNITY_KEY.slice(0, i) + c + COMMUNITY_KEY.slice(i + 1)).kind);
    }
  });
  test("each kind has its own one-line text", () => {
    const texts = [refusal(undefined), refusal("x"), refusal(EXPIRED)].map((error) => error.message);
    expect(new Set(texts).size).toBe(3);
    expect(texts.filter((text) => text.includes("\n"))).toEqual([]);
  });
});
