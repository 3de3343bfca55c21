// What the compiler made of the CUDA kernels.
//   node scripts/cuda-report.mjs check BUILD_FOLDER TOOLKIT   spills, instructions that must be there; ends with `N passed, N failed`
//   node scripts/cuda-report.mjs sheet BUILD_FOLDER [FILE]     rewrites the tables of docs/cuda-kernels.md between the marks `kernels` and `linear`
import { readFileSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { readReports, sass } from "./lib/cuda-kernels.mjs";
import { root } from "./lib/paths.mjs";
import { kernelTable, linearTable } from "./lib/cuda-sheet.mjs";

/** Kernels that may spill, with the most bytes they may: none so far. */
const SPILLS = {};
const ARCHS = ["sm_80", "sm_90a", "sm_100", "sm_120"];
/** object file -> what the machine code of each of its kernels of this name holds, on every architecture */
const INSTRUCTIONS = [
  { file: "linear_bf16", kernel: "linear_kernel", needs: ["HMMA.16816.F32.BF16", "LDGSTS.E.BYPASS.128", "LDSM"] },
  { file: "linear_q8_0", kernel: "linear_kernel", needs: ["HMMA.16816.F32.BF16", "LDGSTS.E.BYPASS.128", "LDSM"] },
  { file: "linear_q4_1", kernel: "linear_kernel", needs: ["HMMA.16816.F32.BF16", "LDGSTS.E.BYPASS.128", "LDSM"] },
  { file: "attention_split", kernel: "attention_split_kernel", needs: ["HMMA.16816.F32.BF16", "LDGSTS"] },
  { file: "attention_block", kernel: "attention_block_kernel", needs: ["HMMA.16816.F32.BF16", "LDGSTS"] },
];

const counts = { passed: 0, failed: 0 };
function test(name, problem) {
  counts[problem ? "failed" : "passed"]++;
  process.stdout.write(problem ? `not ok ${name}: ${problem}\n` : `ok ${name}\n`);
}

function check(folder, toolkit) {
  const kernels = readReports(folder);
  for (const arch of ARCHS) {
    const of = kernels.filter((kernel) => kernel.arch === arch);
    const spilled = of.filter((kernel) => kernel.spill > (SPILLS[kernel.name] ?? 0)).map((kernel) => `${kernel.name} spills ${kernel.spill} bytes`);
    test(`registers of ${of.length} kernels, ${arch}`, of.length === 0 ? "the report names no kernel" : spilled.join("; "));
  }
  for (const { file, kernel, needs } of INSTRUCTIONS) {
    const code = sass(toolkit, join(folder, "nvcc", `${file}.o`));
    for (const arch of ARCHS) {
      const found = code.filter((part) => part.arch === arch && part.name.includes(kernel));
      const lacking = found.flatMap((part) => needs.filter((word) => !part.text.includes(word)).map((word) => `${part.name} has no ${word}`));
      test(`instructions of ${file}, ${arch}`, found.length === 0 ? `no kernel ${kernel}` : lacking.join("; "));
    }
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
