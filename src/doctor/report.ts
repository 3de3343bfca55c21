import { VERSION } from "../config/version.ts";
import type { Finding, Findings, Status } from "./findings.ts";

const WORD: Record<Status, string> = { ok: "ok", warning: "warn", failed: "FAIL", skipped: "-" };

/** One line per check, what to do behind what is not right, and a count. */
export function reportText(command: string, findings: Findings): string {
  const width = Math.max(...findings.list.map(({ id }) => id.length));
  const lines = findings.list.flatMap(({ id, status, detail, fix }) => [
    `${WORD[status].padEnd(4)}  ${id.padEnd(width)}  ${detail}`,
    ...(fix !== null && status !== "ok" ? [`${" ".repeat(width + 8)}-> ${fix}`] : []),
  ]);
  const counts = (["ok", "warning", "failed", "skipped"] as const).map((status) => `${findings.count(status)} ${status}`).join(", ");
  return [`layerscale ${VERSION} doctor, for layerscale ${command}`, ...lines, counts].join("\n");
}

/** For machines: one object. `checks` are in order; an id occurs once. */
export function reportJson(command: string, checks: readonly Finding[]): string {
  return JSON.stringify({ version: VERSION, command, ok: checks.every(({ status }) => status !== "failed"), checks });
}
