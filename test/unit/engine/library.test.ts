import { afterEach, beforeEach, describe, expect, test } from "bun:test";
import { chmodSync, existsSync, mkdirSync, mkdtempSync, readdirSync, readFileSync, rmSync, statSync, symlinkSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { findLibrary, LIBRARY_ENV, loadProblem, placeLibrary } from "../../../src/engine/native/library.ts";

let directory: string;
beforeEach(() => (directory = mkdtempSync(join(tmpdir(), "layerscale-library-"))));
afterEach(() => rmSync(directory, { recursive: true, force: true }));

function touch(name: string): string {
  const path = join(directory, name);
  writeFileSync(path, "");
  return path;
}
const atExecutable = (): string => join(directory, "layerscale");
const none = async (): Promise<null> => null;

describe("order", () => {
  test("the variable first", async () => {
    const given = touch("mine.so");
    touch("liblayerscale_cpu.so");
    expect(await findLibrary({ env: { [LIBRARY_ENV]: given }, execPath: atExecutable(), embedded: none })).toBe(given);
  });

  test("a variable that names no file is an error with name and value, not a fallback", async () => {
    touch("liblayerscale_cpu.so");
    await expect(findLibrary({ env: { [LIBRARY_ENV]: "/nope/x.so" }, execPath: atExecutable(), embedded: none })).rejects.toThrow(/LAYERSCALE_NATIVE_LIB.*"\/nope\/x\.so"/);
  });

  test("then beside the executable, then the embedded one", async () => {
    const embedded = async (): Promise<string> => "/elsewhere/dist/lib.so";
    expect(await findLibrary({ env: {}, execPath: atExecutable(), embedded })).toBe("/elsewhere/dist/lib.so");
    const beside = touch("liblayerscale_cpu.so");
    expect(await findLibrary({ env: {}, execPath: atExecutable(), embedded })).toBe(beside);
  });

  test("none at all says where it looked", async () => {
    await expect(findLibrary({ env: {}, execPath: atExecutable(), embedded: none })).rejects.toThrow("liblayerscale_cpu.so does not exist");
  });
});

/** A real shared object that exports ls_abi_version, from the machine's compiler. */
function compile(): Uint8Array {
  const source = join(directory, "abi.c");
  const output = join(directory, "abi.so");
  writeFileSync(source, "unsigned ls_abi_version(void) { return 1; }\n");
  const built = Bun.spawnSync(["cc", "-shared", "-fPIC", "-o", output, source]);
  if (!built.success) throw new Error(built.stderr.toString());
  return new Uint8Array(readFileSync(output));
}

describe("placing the embedded copy", () => {
  test("one private file named by its content, used again, replaced when it was tampered with", () => {
    const bytes = compile();
    const target = join(directory, "place");
    const path = placeLibrary(bytes, target);
    expect(statSync(target).mode & 0o777).toBe(0o700);
    expect(statSync(path).mode & 0o777).toBe(0o700);
    const before = statSync(path).ino;
    expect(placeLibrary(bytes, target)).toBe(path);
    expect(statSync(path).ino).toBe(before);
    rmSync(path); // it is mapped: another file takes its place
    writeFileSync(path, "junk");
    expect(placeLibrary(bytes, target)).toBe(path);
    expect(readFileSync(path).equals(bytes)).toBe(true);
    expect(readdirSync(target).length).toBe(1);
  });

  test("where no file can be written: an anonymous file in memory", () => {
    const blocked = touch("a-file");
    expect(placeLibrary(compile(), join(blocked, "place"))).toMatch(/^\/proc\/self\/fd\/\d+$/);
  });

  test("a directory that others can write, or a link to one, is not trusted", () => {
    const open = join(directory, "open");
    mkdirSync(open);
    chmodSync(open, 0o777);
    symlinkSync(open, join(directory, "link"));
    for (const name of ["open", "link"]) expect(placeLibrary(compile(), join(directory, name))).toMatch(/^\/proc\/self\/fd/);
    expect(existsSync(open) && readdirSync(open)).toEqual([]);
  });

  test("bytes that are no library: an error with both reasons and the way out", () => {
    expect(() => placeLibrary(new TextEncoder().encode("not a library"), join(directory, "place"))).toThrow(/place: .*memory: .*LAYERSCALE_NATIVE_LIB/s);
  });
});

describe("a runtime that may not make machine code", () => {
  const error = new Error("bun:ffi requires the JIT");
  test("because of an address-space limit: names it, its value and what was expected", () => {
    const limits = () => "Limit                     Soft Limit           Hard Limit           Units\nMax address space         409600000            unlimited            bytes\n";
    expect(loadProblem(error, limits)).toBe("this process cannot map memory for machine code: its address space is limited to 400000 KiB (ulimit -v), expected unlimited");
  });
  test("for another reason, and other errors as they are", () => {
    expect(loadProblem(error, () => "Max address space         unlimited            unlimited            bytes\n")).toContain("switched off or refused");
    expect(loadProblem(new Error("no such file"))).toBe("no such file");
  });
});
