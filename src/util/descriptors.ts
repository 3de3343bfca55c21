import { readFileSync } from "node:fs";

/** What POSIX systems grant at least by habit. */
const USUAL = 1024;

/** File descriptors this process may have open; the runtime has raised the soft limit to the hard one. */
export function descriptorLimit(): number {
  try {
    const words = /^Max open files\s+(\d+)/m.exec(readFileSync("/proc/self/limits", "latin1"));
    return words ? Number(words[1]) : USUAL;
  } catch {
    return USUAL;
  }
}
