// The check of the CUDA kernels' machine code, on listings that are made up: it passes what it should and finds what is missing.
import { describe, expect, test } from "bun:test";
import { ARCHS, INSTRUCTIONS, instructionProblem, spillProblem } from "../../../scripts/lib/cuda-check.mjs";
import { parseSass } from "../../../scripts/lib/cuda-kernels.mjs";

const KEYS = "LDSM.16.M88.4 R8, [R4] ;";
const VALUES = "LDSM.16.MT88.4 R8, [R4] ;";
const COMMON = ["HMMA.16816.F32.BF16 R20, R4, R10, RZ ;", "LDGSTS.E.BYPASS.128.ZFILL [R2], [R4.64] ;"];
/** Mangled as nvcc does it: attention_split_kernel<fp8, dims>. */
const mangled = (fp8: boolean, dims: number) => `_ZN2ls4cuda51_GLOBAL__N__46ec76e9_18_attention_split_cu_5bc4f73d22attention_split_kernelILb${fp8 ? 1 : 0}ELi${dims}EEEvNS0_13AttentionArgsEPKNS0_13AttentionTileEPKi`;

function listing(edit: (lines: string[], name: { fp8: boolean; dims: number; arch: string }) => string[] = (lines) => lines): string {
  let text = "";
  for (const arch of ARCHS) {
    text += `\nFatbin elf code:\n================\narch = ${arch === "sm_100" ? "sm_100f" : arch}\ncode version = [1,8]\n\n\tcode for ${arch}\n`;
    for (const fp8 of [true, false])
      for (const dims of [64, 128, 256]) {
        const lines = edit([...COMMON, ...(fp8 ? [] : [KEYS, VALUES])], { fp8, dims, arch });
        text += `\t\tFunction : ${mangled(fp8, dims)}\n${lines.map((line) => `        /*0000*/                   ${line}\n`).join("")}`;
      }
  }
  // The code for later ones, which has no functions in a listing.
  return `${text.replace("\nFatbin elf code:\n================\narch = sm_120", `\nFatbin ptx code:\n================\narch = sm_120\ncode version = [9,0]\n$&`)}`;
}

const split = INSTRUCTIONS.filter(({ file }) => file === "attention_split");
const problems = (text: string) => {
  const code = parseSass(text);
  return split.flatMap((wanted) => ARCHS.map((arch) => instructionProblem(code, arch, wanted))).filter(Boolean);
};

describe("the check of machine code", () => {
  test("a listing that has everything passes", () => {
    expect(split.length).toBe(2);
    expect(problems(listing())).toEqual([]);
  });

  test("a bf16 kernel without ldmatrix, plain or transposed, is named", () => {
    const at = (name: { fp8: boolean; dims: number; arch: string }) => !name.fp8 && name.dims === 128 && name.arch === "sm_100";
    expect(problems(listing((lines, name) => (at(name) ? lines.filter((line) => line !== KEYS) : lines)))).toEqual(["attention_split_kernel<false, 128> has no LDSM.16.M88.4"]);
    expect(problems(listing((lines, name) => (at(name) ? lines.filter((line) => line !== VALUES) : lines)))).toEqual(["attention_split_kernel<false, 128> has no LDSM.16.MT88.4"]);
    // One of another shape is none.
    expect(problems(listing((lines, name) => (at(name) ? lines.map((line) => line.replace("M88.4", "M88.41")) : lines))).length).toBe(1);
  });

  test("so are a product without tensor cores and a copy through registers, in fp8 kernels too", () => {
    const without = (word: string) => problems(listing((lines, name) => (name.fp8 && name.dims === 64 && name.arch === "sm_80" ? lines.filter((line) => !line.startsWith(word)) : lines)));
    expect(without("HMMA")).toEqual(["attention_split_kernel<true, 64> has no HMMA.16816.F32.BF16"]);
    expect(without("LDGSTS")).toEqual(["attention_split_kernel<true, 64> has no LDGSTS.E.BYPASS.128"]);
  });

  test("a kernel or an architecture that is not there is found", () => {
    expect(problems(listing().replace(mangled(false, 64), "_Z5otherv"))).toEqual(["2 kernels like ^attention_split_kernel<false, \\d+>$, expected 3"]);
    expect(problems(listing().replace(/arch = sm_90a/, "arch = sm_70")).length).toBe(2);
    expect(problems("").length).toBe(2 * ARCHS.length);
  });

  test("spills are told, and an empty report", () => {
    const kernel = { name: "k<1>", file: "k", arch: "sm_80", registers: 255, shared: 0, spill: 0, stack: 0 };
    expect(spillProblem([kernel], "sm_80")).toBe("");
    expect(spillProblem([kernel, { ...kernel, spill: 8 }], "sm_80")).toBe("k<1> spills 8 bytes");
    expect(spillProblem([kernel], "sm_120")).toBe("the report names no kernel");
  });
});
