// What the machine code of the CUDA kernels must hold.

export const ARCHS = ["sm_80", "sm_90a", "sm_100", "sm_120"];

const PRODUCT = "HMMA.16816.F32.BF16"; // tensor cores
const COPY = "LDGSTS.E.BYPASS.128"; // cp.async
const ROWS = "LDSM.16.M88.4"; // ldmatrix x4
const COLUMNS = "LDSM.16.MT88.4"; // the same, transposed

/**
 * Object file, the kernels of it by their demangled names, how many there are, and the instructions that each of them holds on every architecture.
 * fp8 keys and values have no ldmatrix; queries of 256 dims have, whatever the keys are.
 */
export const INSTRUCTIONS = [
  { file: "linear_bf16", kernel: /^linear_kernel</, count: 4, needs: [PRODUCT, COPY, ROWS] },
  { file: "linear_q8_0", kernel: /^linear_kernel</, count: 4, needs: [PRODUCT, COPY, ROWS] },
  { file: "linear_q4_1", kernel: /^linear_kernel</, count: 4, needs: [PRODUCT, COPY, ROWS] },
  { file: "attention_split", kernel: /^attention_split_kernel<false, \d+>$/, count: 3, needs: [PRODUCT, COPY, ROWS, COLUMNS] },
  { file: "attention_split", kernel: /^attention_split_kernel<true, \d+>$/, count: 3, needs: [PRODUCT, COPY] },
  { file: "attention_block", kernel: /^attention_block_kernel<false, \d+>$/, count: 3, needs: [PRODUCT, COPY, ROWS, COLUMNS] },
  { file: "attention_block", kernel: /^attention_block_kernel<true, (64|128)>$/, count: 2, needs: [PRODUCT, COPY] },
  { file: "attention_block", kernel: /^attention_block_kernel<true, 256>$/, count: 1, needs: [PRODUCT, COPY, ROWS] },
];

/**
 * What is wrong with the machine code of one architecture; "" when nothing is.
 * @param {{ name: string, arch: string, text: string }[]} code as sass() of cuda-kernels.mjs gives it
 * @param {{ kernel: RegExp, count: number, needs: string[] }} wanted an entry of INSTRUCTIONS
 */
export function instructionProblem(code, arch, { kernel, count, needs }) {
  const found = code.filter((part) => part.arch === arch && kernel.test(part.name));
  if (found.length !== count) return `${found.length} kernels like ${kernel.source}, expected ${count}`;
  // The word whole, or followed by a suffix.
  const has = (text, word) => new RegExp(`\\b${word.replaceAll(".", "\\.")}(?![A-Za-z0-9])`).test(text);
  return found.flatMap((part) => needs.filter((word) => !has(part.text, word)).map((word) => `${part.name} has no ${word}`)).join("; ");
}

/** Kernels of one architecture that keep values in memory for want of registers; "" when none does. */
export function spillProblem(kernels, arch) {
  const of = kernels.filter((kernel) => kernel.arch === arch);
  if (of.length === 0) return "the report names no kernel";
  return of.filter((kernel) => kernel.spill > 0).map((kernel) => `${kernel.name} spills ${kernel.spill} bytes`).join("; ");
}
