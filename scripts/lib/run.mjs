// Running programs with visible progress, and saying plainly what failed.
import { spawn, spawnSync } from "node:child_process";
import { createInterface } from "node:readline";

export function say(text) {
  process.stderr.write(`\x1b[36m==>\x1b[0m ${text}\n`);
}

/** Ends the script with a line for people. */
export function die(text, code = 1) {
  process.stderr.write(`error: ${text}\n`);
  process.exit(code);
}

/** Output of a program, or null when it is absent or fails. */
export function output(command, args, options = {}) {
  const result = spawnSync(command, args, { encoding: "utf8", ...options });
  return result.status === 0 ? result.stdout.trim() : null;
}

/** As run, but of its standard output only the lines that `shown` gives a text for. */
export function runShowing(command, args, shown) {
  return started(command, args, { stdio: ["ignore", "pipe", "inherit"] }, (child) =>
    createInterface(child.stdout).on("line", (line) => {
      const text = shown(line);
      if (text !== null) process.stderr.write(`    ${text}\n`);
    }),
  );
}

/** Runs a program with its output passed through; rejects with its exit code in the text. */
export function run(command, args, options = {}) {
  return started(command, args, { stdio: "inherit", ...options }, () => {});
}

function started(command, args, options, watch) {
  return new Promise((resolve, reject) => {
    const child = spawn(command, args, options);
    watch(child);
    child.on("error", (error) => reject(new Error(`${command} cannot be started: ${error.message}`)));
    child.on("close", (code, signal) => (code === 0 ? resolve() : reject(new Error(`${command} ${args.slice(0, 3).join(" ")} … ended with ${signal ?? `exit code ${code}`}`))));
  });
}
