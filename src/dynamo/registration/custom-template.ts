import { accessSync, constants, statSync } from "node:fs";
import { UsageError } from "../../config/flags.ts";

/** Looked at before anything is loaded. @throws UsageError */
export function checkTemplate(path: string | null): void {
  if (path === null) return;
  const source = "--custom-jinja-template / DYN_CUSTOM_JINJA_TEMPLATE";
  try {
    accessSync(path, constants.R_OK);
  } catch (error) {
    throw new UsageError(`${source}: cannot read "${path}": ${(error as Error).message}`);
  }
  // Reading a fifo would wait for a writer, through any signal.
  if (!statSync(path).isFile()) throw new UsageError(`${source}: expected a regular file, got "${path}"`);
}
