import { dlopen } from "bun:ffi";
import { chmodSync, existsSync, lstatSync, mkdirSync, readFileSync, renameSync, statSync, unlinkSync, writeFileSync, writeSync } from "node:fs";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";
import { EngineError } from "../errors.ts";
import { symbols } from "./abi.gen.ts";
import { EMBEDDED_ROOT, builtCudaLibraryPath, embeddedLibraryPath } from "./embedded.ts";

export const LIBRARY_ENV = "LAYERSCALE_NATIVE_LIB";
const LIBRARY_NAME = "liblayerscale_cpu.so";
const CUDA_LIBRARY_NAME = "liblayerscale_cuda.so";

/**
 * Why a library could not be opened, in words for people. The runtime makes machine code for each foreign function; where it may not,
 * it says only that it needs its compiler.
 */
export function loadProblem(error: unknown, limits: () => string = () => readFileSync("/proc/self/limits", "utf8")): string {
  const text = error instanceof Error ? error.message : String(error);
  if (!/requires the JIT/.test(text)) return text;
  const bytes = /^Max address space\s+(\d+)\s/m.exec(limits())?.[1];
  const cause = bytes === undefined ? "code generation is switched off or refused" : `its address space is limited to ${Number(bytes) / 1024} KiB (ulimit -v), expected unlimited`;
  return `this process cannot map memory for machine code: ${cause}`;
}

export interface LibrarySearch {
  env: Record<string, string | undefined>;
  execPath: string;
  embedded: () => Promise<string | null>;
}

/** The library that LAYERSCALE_NATIVE_LIB names, whatever its device; null when it is not set. */
export function forcedLibrary(env: LibrarySearch["env"] = process.env): string | null {
  const given = env[LIBRARY_ENV];
  if (given === undefined || given === "") return null;
  if (!statSync(given, { throwIfNoEntry: false })?.isFile()) throw new EngineError("engine", `${LIBRARY_ENV}: expected the path of a native library, got "${given}", which is not a file`);
  return given;
}

/** The CPU library: LAYERSCALE_NATIVE_LIB, else beside the executable, else the copy inside it, placed where it can be loaded. */
export async function findLibrary(search: Partial<LibrarySearch> = {}): Promise<string> {
  const { env = process.env, execPath = process.execPath, embedded = embeddedLibraryPath } = search;
  const found = forcedLibrary(env) ?? (await besideOrInside(execPath, LIBRARY_NAME, embedded));
  if (found === null) throw new EngineError("engine", `no native library: ${LIBRARY_ENV} is not set, ${join(dirname(execPath), LIBRARY_NAME)} does not exist, and this program carries none; build it, or set ${LIBRARY_ENV}`);
  return found;
}

/** The CUDA library in the same places, but the variable; null = this program has none. */
export function findCudaLibrary(search: Partial<Omit<LibrarySearch, "env">> = {}): Promise<string | null> {
  const { execPath = process.execPath, embedded = builtCudaLibraryPath } = search;
  return besideOrInside(execPath, CUDA_LIBRARY_NAME, embedded);
}

async function besideOrInside(execPath: string, name: string, embedded: LibrarySearch["embedded"]): Promise<string | null> {
  const beside = join(dirname(execPath), name);
  if (existsSync(beside)) return beside;
  const inside = await embedded();
  return inside?.startsWith(EMBEDDED_ROOT) === true ? placeLibrary(await Bun.file(inside).bytes()) : inside;
}

/**
 * Writes the library where the dynamic loader can open it. One copy for each user and content, named by its hash and used again by
 * the next start; an anonymous file in memory where the temporary directory is read-only or mounted noexec.
 */
export function placeLibrary(bytes: Uint8Array, directory = join(tmpdir(), `layerscale-${process.getuid?.() ?? 0}`)): string {
  const hash = new Bun.CryptoHasher("sha256").update(bytes).digest("hex");
  const reasons: string[] = [];
  for (const [where, place] of [[directory, () => copyTo(directory, hash, bytes)], ["memory", () => copyToMemory(bytes)]] as const) {
    try {
      const path = place();
      dlopen(path, { ls_abi_version: symbols.ls_abi_version });
      return path;
    } catch (error) {
      const problem = loadProblem(error);
      // No other place would help.
      if (/machine code/.test(problem)) throw new EngineError("engine", `cannot load the native library: ${problem}`);
      reasons.push(`${where}: ${problem}`);
    }
  }
  throw new EngineError("engine", `cannot place the native library that this program carries (${reasons.join("; ")}); set TMPDIR to a directory that allows executables, or ${LIBRARY_ENV} to the library`);
}

function copyTo(directory: string, hash: string, bytes: Uint8Array): string {
  mkdirSync(directory, { recursive: true, mode: 0o700 });
  const owner = lstatSync(directory);
  // Somebody else's directory, or a link to one, could swap the file between our check and the loader's open.
  if (!owner.isDirectory() || owner.uid !== process.getuid?.() || (owner.mode & 0o022) !== 0) throw new Error(`${directory} is not a directory that only this user can write`);
  const path = join(directory, `liblayerscale-${hash.slice(0, 32)}.so`);
  if (hasContent(path, hash)) return path;
  const partial = `${path}.${process.pid}.tmp`;
  try {
    writeFileSync(partial, bytes, { mode: 0o700, flag: "wx" });
    chmodSync(partial, 0o700);
    renameSync(partial, path);
  } catch (error) {
    if (existsSync(partial)) unlinkSync(partial);
    throw error;
  }
  return path;
}

function hasContent(path: string, hash: string): boolean {
  const file = lstatSync(path, { throwIfNoEntry: false });
  if (file === undefined || !file.isFile() || file.uid !== process.getuid?.()) return false;
  return new Bun.CryptoHasher("sha256").update(readFileSync(path)).digest("hex") === hash;
}

const MFD_CLOEXEC = 1;

/** The descriptor stays open as long as the process: its path is what other threads load. */
function copyToMemory(bytes: Uint8Array): string {
  const libc = dlopen("libc.so.6", { memfd_create: { args: ["ptr", "u32"], returns: "i32" } });
  const fd = libc.symbols.memfd_create(Buffer.from("layerscale\0"), MFD_CLOEXEC);
  if (fd < 0) throw new Error("memfd_create failed");
  for (let written = 0; written < bytes.length; ) written += writeSync(fd, bytes, written);
  return `/proc/self/fd/${fd}`;
}
