// Reading what ptxas reported and what cuobjdump disassembles.
import { execFileSync } from "node:child_process";
import { readdirSync, readFileSync } from "node:fs";
import { join } from "node:path";

/** Code that is good for a whole family (sm_100f) goes by the name of its first member. */
const plainArch = (arch) => arch.replace(/f$/, "");

/** Readable names without namespaces, return type and parameters: `linear_kernel<WeightsBf16, 1, 1, 1, 1, 2, 6>`. */
function demangle(names) {
  const unique = [...new Set(names)];
  if (unique.length === 0) return new Map();
  const lines = execFileSync("c++filt", { input: unique.join("\n"), encoding: "utf8", maxBuffer: 1 << 26 }).trim().split("\n");
  return new Map(unique.map((name, index) => [name, shorten(lines[index])]));
}

function shorten(name) {
  const plain = name.replaceAll("(anonymous namespace)::", "").replaceAll("ls::cuda::", "").replaceAll("ls::", "").replace(/^void /, "");
  let depth = 0;
  // The parameter list begins at the first parenthesis outside of template arguments.
  for (let i = 0; i < plain.length; i++) {
    if (plain[i] === "<") depth++;
    else if (plain[i] === ">") depth--;
    else if (plain[i] === "(" && depth === 0) return plain.slice(0, i);
  }
  return plain;
}

/**
 * Kernels of all objects under `folder`/nvcc.
 * @returns {{ name: string, file: string, arch: string, registers: number, shared: number, spill: number, stack: number }[]} bytes
 */
export function readReports(folder) {
  const kernels = [];
  for (const file of readdirSync(join(folder, "nvcc")).filter((name) => name.endsWith(".report")).sort()) {
    let current = null;
    for (const line of readFileSync(join(folder, "nvcc", file), "utf8").split("\n")) {
      const entry = /Compiling entry function '([^']+)' for '([^']+)'/.exec(line);
      if (entry) kernels.push((current = { name: entry[1], file: file.replace(/\.o\.report$/, ""), arch: plainArch(entry[2]), registers: 0, shared: 0, spill: 0, stack: 0 }));
      if (!current) continue;
      const spill = /(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads/.exec(line);
      if (spill) Object.assign(current, { stack: Number(spill[1]), spill: Math.max(Number(spill[2]), Number(spill[3])) });
      const used = /Used (\d+) registers/.exec(line);
      if (used) Object.assign(current, { registers: Number(used[1]), shared: Number(/(\d+) bytes smem/.exec(line)?.[1] ?? 0) });
    }
  }
  const names = demangle(kernels.map((kernel) => kernel.name));
  for (const kernel of kernels) kernel.name = names.get(kernel.name);
  return kernels;
}

/** Machine code of an object file, one entry a kernel and architecture. */
export function sass(toolkit, object) {
  const env = { ...process.env, PATH: `${join(toolkit, "bin")}:${process.env.PATH}` };
  return parseSass(execFileSync(join(toolkit, "bin", "cuobjdump"), ["-sass", object], { encoding: "utf8", env, maxBuffer: 1 << 28 }));
}

/** @returns {{ name: string, arch: string, text: string }[]} of a listing of cuobjdump */
export function parseSass(text) {
  const parts = [];
  let arch = "";
  for (const section of text.split(/^(?=\s*(?:Function : |Fatbin (?:elf|ptx) code:))/m)) {
    arch = plainArch(/^arch = (\S+)/m.exec(section)?.[1] ?? arch);
    const name = /^\s*Function : (\S+)/.exec(section)?.[1];
    if (name) parts.push({ name, arch, text: section });
  }
  const names = demangle(parts.map((part) => part.name));
  return parts.map((part) => ({ ...part, name: names.get(part.name) }));
}
