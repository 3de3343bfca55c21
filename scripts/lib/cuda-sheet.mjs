// Tables of docs/cuda-kernels.md: how much of a multiprocessor every kernel uses, and what the matrix products must move and compute.

/** Per multiprocessor: shared memory in bytes, warps, blocks. Every one has 65536 registers. */
const MULTIPROCESSORS = {
  sm_80: { shared: 164 << 10, warps: 64, blocks: 32 },
  sm_90a: { shared: 228 << 10, warps: 64, blocks: 32 },
  sm_100: { shared: 228 << 10, warps: 64, blocks: 32 },
  sm_120: { shared: 100 << 10, warps: 48, blocks: 24 },
};
const ARCHS = Object.keys(MULTIPROCESSORS);
const RESERVED_SHARED = 1 << 10; // of every block
const REGISTERS = 65536;

const UNIT_BYTES = { F32: 2048, F16: 1024, BF16: 1024, Q8_0: 544, Q4_0: 288, Q4_1: 320 };
/** As ls_dtype numbers them. */
const DTYPES = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"];

/** The block shapes of kernels/linear_sizes.cuh, from a kernel's template arguments. */
export function linearShape(name) {
  const found = /^linear_kernel<(Weights\w+(?:<[^>]*>)?), (\d+), (\d+), (\d+), (\d+), (\d+), (\d+)>$/.exec(name);
  if (!found) return null;
  const [mt, nt, wm, wn, units, stages] = found.slice(2).map(Number);
  const type = found[1] === "WeightsBf16" ? "BF16" : DTYPES[Number(/(\d)>$/.exec(found[1])?.[1])];
  const outputs = 16 * mt * wm;
  const rows = 8 * nt * wn;
  const weightBytes = 2 * mt * wm * units * UNIT_BYTES[type];
  const shared = Math.max(stages * (weightBytes + 2 * rows * units * 64), rows * (outputs + 4) * 4);
  return { type, outputs, rows, units, stages, weightBytes, threads: 64 * wm * wn, shared };
}

/** Threads and dynamic shared memory of a launch. */
function launchOf(name) {
  const linear = linearShape(name);
  if (linear) return { threads: linear.threads, shared: linear.shared };
  const attention = /^attention_(split|block|fold)_kernel<(?:(true|false), )?(\d+)>$/.exec(name);
  if (attention) {
    const dim = Number(attention[3]);
    const row = dim * (attention[2] === "true" ? 1 : 2) + 16;
    if (attention[1] === "fold") return { threads: dim, shared: 0 };
    if (attention[1] === "split") {
      const warps = dim <= 128 ? 4 : 2;
      return { threads: 32 * warps, shared: 2 * warps * 2 * 16 * row + warps * 16 * 8 };
    }
    const [warps, keys] = dim <= 128 ? [8, 64] : [4, 32];
    return { threads: 32 * warps, shared: 4 * keys * row + (dim <= 128 ? 0 : warps * 16 * dim * 2) + ((3 * keys) / 16) * 4 };
  }
  return { threads: name.startsWith("choose_kernel") ? 512 : name === "probe" ? 32 : 256, shared: 0 };
}

/** Blocks that fit a multiprocessor at once. */
function residentBlocks(arch, registers, threads, shared) {
  const { shared: all, warps: maxWarps, blocks } = MULTIPROCESSORS[arch];
  const warps = Math.ceil(threads / 32);
  const perWarp = Math.ceil((registers * 32) / 256) * 256;
  return Math.min(blocks, Math.floor(maxWarps / warps), Math.floor(Math.floor(REGISTERS / perWarp) / warps), Math.floor(all / (shared + RESERVED_SHARED)));
}

const kib = (bytes) => (bytes / 1024).toFixed(bytes % 1024 ? 1 : 0);
const label = (name) => name.replace(/^linear_kernel<.*$/, (full) => {
  const shape = linearShape(full);
  return `linear ${shape.type}, ${shape.outputs} outputs x ${shape.rows} rows`;
});

export function kernelTable(kernels) {
  const rows = new Map();
  for (const kernel of kernels) {
    if (!rows.has(kernel.name)) rows.set(kernel.name, {});
    rows.get(kernel.name)[kernel.arch] = kernel;
  }
  const lines = ["| kernel | threads | registers | shared KiB | blocks an SM | warps of all |", "|---|---|---|---|---|---|"];
  for (const [name, byArch] of rows) {
    const { threads, shared } = launchOf(name);
    const total = shared + Math.max(...ARCHS.map((arch) => byArch[arch]?.shared ?? 0));
    const resident = ARCHS.map((arch) => (byArch[arch] ? residentBlocks(arch, byArch[arch].registers, threads, total) : 0));
    const part = ARCHS.map((arch, index) => `${Math.round((100 * resident[index] * Math.ceil(threads / 32)) / MULTIPROCESSORS[arch].warps)} %`);
    lines.push(`| ${label(name).replaceAll("|", "\\|")} | ${threads} | ${ARCHS.map((arch) => byArch[arch]?.registers ?? "-").join(" · ")} | ${kib(total)} | ${resident.join(" · ")} | ${part.join(" · ")} |`);
  }
  return lines.join("\n");
}

/** H200: bytes a second of its memory, bf16 FLOP a second with dense operands, multiprocessors. */
const H200 = { bytes: 4.8e12, flops: 989e12, multiprocessors: 132 };
/** Matrices of a layer of Qwen3-8B: [name, outputs of one launch, inputs]. */
const MATRICES = [["q, k, v", 6144, 4096], ["o", 4096, 4096], ["gate, up", 24576, 4096], ["down", 4096, 12288]];
/** Rows and the outputs of the block that they get, the smallest such: [rows, outputs]. */
const CASES = [[1, 16], [64, 32], [8192, 128]];

export function linearTable(kernels) {
  const lines = ["| weights | rows | matrices | memory MB | GFLOP | bound | least µs | blocks | L2 MB | KiB under way an SM |", "|---|---|---|---|---|---|---|---|---|---|"];
  const shapes = kernels.filter((kernel) => kernel.arch === "sm_90a").flatMap((kernel) => {
    const shape = linearShape(kernel.name);
    return shape ? [{ ...shape, resident: residentBlocks("sm_90a", kernel.registers, shape.threads, shape.shared) }] : [];
  });
  for (const type of ["BF16", "Q8_0", "Q4_0"])
    for (const [rows, blockOutputs] of CASES)
      for (const [name, outputs, inputs] of MATRICES) {
        const shape = shapes.filter((candidate) => candidate.type === type && candidate.outputs === blockOutputs).sort((a, b) => a.rows - b.rows)[0];
        if (!shape) throw new Error(`no ${type} kernel for blocks of ${blockOutputs} outputs`);
        const weights = ((outputs / 16) * inputs) / 32 * UNIT_BYTES[type];
        const bytes = weights + rows * (inputs + outputs) * 2;
        const flops = 2 * rows * inputs * outputs;
        const [memory, math] = [bytes / H200.bytes, flops / H200.flops];
        const rowBlocks = Math.ceil(rows / shape.rows);
        const blocks = Math.ceil(outputs / shape.outputs) * rowBlocks;
        const traffic = rowBlocks * weights + (blocks / rowBlocks) * rows * inputs * 2;
        const perSm = Math.min(shape.resident, Math.ceil(blocks / H200.multiprocessors));
        lines.push(
          `| ${type} | ${rows} | ${name} | ${(bytes / 1e6).toFixed(1)} | ${(flops / 1e9).toFixed(2)} | ${memory > math ? "memory" : "tensor cores"} | ${(Math.max(memory, math) * 1e6).toFixed(1)} | ${blocks} | ${(traffic / 1e6).toFixed(0)} | ${kib(perSm * (shape.stages - 1) * shape.weightBytes)} |`,
        );
      }
  return lines.join("\n");
}
