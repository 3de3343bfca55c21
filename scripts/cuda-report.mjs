// What the compiler made of the CUDA kernels.
//   node scripts/cuda-report.mjs check BUILD_FOLDER TOOLKIT   spills, instructions that must be there; ends with `N passed, N failed`
//   node scripts/cuda-report.mjs sheet BUILD_FOLDER [FILE]     rewrites the tables of docs/cuda-kernels.md between the marks `kernels` and `linear`
import { readFileSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { ARCHS, INSTRUCTIONS, instructionProblem, spillProblem } from "./lib/cuda-check.mjs";
import { readReports, sass } from "./lib/cuda-kernels.mjs";
import { root } from "./lib/paths.mjs";
import { kernelTable, linearTable } from "./lib/cuda-sheet.mjs";

const counts = { passed: 0, failed: 0 };
function test(name, problem) {
  counts[problem ? "failed" : "passed"]++;
  process.stdout.write(problem ? `not ok ${name}: ${problem}\n` : `ok ${name}\n`);
}

function check(folder, toolkit) {
  const kernels = readReports(folder);
  for (const arch of ARCHS) test(`registers of ${kernels.filter((kernel) => kernel.arch === arch).length} kernels, ${arch}`, spillProblem(kernels, arch));
  const code = new Map();
  for (const wanted of INSTRUCTIONS) {
    const { file, kernel } = wanted;
    if (!code.has(file)) code.set(file, sass(toolkit, join(folder, "nvcc", `${file}.o`)));
    for (const arch of ARCHS) test(`instructions of ${file}, ${kernel.source}, ${arch}`, instructionProblem(code.get(file), arch, wanted));
  }
  process.stdout.write(`${counts.passed} passed, ${counts.failed} failed\n`);
  process.exitCode = counts.failed ? 1 : 0;
}

function sheet(folder, file = join(root, "docs", "cuda-kernels.md")) {
  const kernels = readReports(folder);
  let text = readFileSync(file, "utf8");
  for (const [mark, table] of [["kernels", kernelTable(kernels)], ["linear", linearTable(kernels)]]) {
    const place = new RegExp(`(<!-- begin ${mark} -->\n)[\\s\\S]*?(<!-- end ${mark} -->)`);
    if (!place.test(text)) throw new Error(`${file} has no marks for "${mark}"`);
    text = text.replace(place, (_, begin, end) => `${begin}${table}\n${end}`);
  }
  writeFileSync(file, text);
}

const [command, folder, rest] = process.argv.slice(2);
if (command === "check" && folder && rest) check(folder, rest);
else if (command === "sheet" && folder) sheet(folder, rest);
else {
  process.stderr.write("error: expected check BUILD_FOLDER TOOLKIT or sheet BUILD_FOLDER [FILE]\n");
  process.exitCode = 2;
}
