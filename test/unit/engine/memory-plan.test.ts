import { describe, expect, test } from "bun:test";
import { availableMemory, pageBytes, planDeviceMemory, planMemory, workspaceBytes } from "../../../src/engine/memory-plan.ts";
import { tinySpec } from "../../support/fake-engine.ts";

const MIB = 2 ** 20;
const files = (content: Record<string, string>) => (path: string): string | null => content[path] ?? null;
const meminfo = (kib: number): string => `MemTotal:       99999999 kB\nMemFree:          1000 kB\nMemAvailable:   ${kib} kB\n`;

describe("available memory", () => {
  test("without a control group: the kernel's estimate", () => {
    expect(availableMemory(files({ "/proc/meminfo": meminfo(2048) }))).toBe(2 * MIB);
  });

  test("cgroup v2: the tightest limit on the way to the root, minus what is in use and cannot be reclaimed", () => {
    const read = files({
      "/proc/meminfo": meminfo(1024 * 1024), "/proc/self/cgroup": "0::/pod/app\n",
      "/sys/fs/cgroup/pod/app/memory.max": "max\n",
      "/sys/fs/cgroup/pod/memory.max": `${100 * MIB}\n`, "/sys/fs/cgroup/pod/memory.current": `${30 * MIB}\n`, "/sys/fs/cgroup/pod/memory.stat": `anon 5\ninactive_file ${10 * MIB}\n`,
    });
    expect(availableMemory(read)).toBe(80 * MIB);
  });

  test("cgroup v1, path of the host inside a container: the root's files are ours", () => {
    const read = files({
      "/proc/meminfo": meminfo(1024 * 1024), "/proc/self/cgroup": "9:cpu:/x\n4:memory:/docker/abc\n",
      "/sys/fs/cgroup/memory/memory.limit_in_bytes": `${64 * MIB}\n`, "/sys/fs/cgroup/memory/memory.usage_in_bytes": `${16 * MIB}\n`, "/sys/fs/cgroup/memory/memory.stat": `total_inactive_file ${4 * MIB}\n`,
    });
    expect(availableMemory(read)).toBe(52 * MIB);
  });

  test("a limit already used up leaves nothing, not less", () => {
    const read = files({ "/proc/meminfo": meminfo(1000), "/proc/self/cgroup": "0::/\n", "/sys/fs/cgroup/memory.max": "1000", "/sys/fs/cgroup/memory.current": "5000" });
    expect(availableMemory(read)).toBe(0);
  });

  test("an address-space limit counts what is mapped already", () => {
    const limits = (soft: string) => `Limit  Soft Limit  Hard Limit  Units\nMax address space         ${soft}            unlimited            bytes\n`;
    const read = (soft: string) => files({ "/proc/meminfo": meminfo(1024 * 1024), "/proc/self/limits": limits(soft), "/proc/self/status": "VmPeak:  9999 kB\nVmSize:   2048 kB\n" });
    expect(availableMemory(read(String(10 * MIB)))).toBe(8 * MIB);
    expect(availableMemory(read("unlimited"))).toBe(1024 * MIB);
    expect(availableMemory(read("1000"))).toBe(0);
  });

  test("no source at all is an error that says so", () => {
    expect(() => availableMemory(files({}))).toThrow("MemAvailable");
  });

  test("this machine", () => {
    expect(availableMemory()).toBeGreaterThan(16 * MIB);
  });
});

describe("pool size", () => {
  const bytes = pageBytes(tinySpec, "f32");
  const options = { spec: tinySpec, weights: { files: [], tensors: [] }, contextLength: 160, maxNumSeqs: 4, maxTotalTokens: null, memoryUtilization: 0.5, kvCacheDtype: "f32" as const };
  const workspace = workspaceBytes(tinySpec, 64, 4);
  /** Memory of which half leaves exactly `pages` pages. */
  const room = (pages: number) => () => 2 * (workspace + pages * bytes);

  test("a page is keys and values of 16 tokens over all layers", () => {
    expect(bytes).toBe(2 * 2 * 16 * 2 * 16 * 4);
    expect(pageBytes(tinySpec, "bf16")).toBe(bytes / 2);
  });

  test("what the fraction leaves", () => {
    const plan = planMemory(options, 64, room(23));
    expect(plan.pages).toBe(23);
    expect(plan.memoryRule).toContain("0.5 of");
  });

  test("weights count", () => {
    const weights = { files: [], tensors: [{ id: 1, name: "w", file: 0, offset: 0, bytes: 3 * bytes, dtype: "f32" as const, rows: 1, cols: 1 }] };
    expect(planMemory({ ...options, weights }, 64, room(23)).pages).toBe(20);
  });

  test("no more than all sequences at full context can use", () => {
    const plan = planMemory(options, 64, room(1000));
    expect(plan.pages).toBe(40);
    expect(plan.memoryRule).toContain("4 sequences of 160 tokens");
  });

  test("maxTotalTokens caps, in whole pages, and may be below one context", () => {
    expect(planMemory({ ...options, maxTotalTokens: 100 }, 64, room(1000))).toMatchObject({ pages: 6 });
    expect(planMemory({ ...options, maxTotalTokens: 100 }, 64, room(1000)).memoryRule).toContain("--max-total-tokens 100");
    expect(() => planMemory({ ...options, maxTotalTokens: 15 }, 64, room(1000))).toThrow("--max-total-tokens 15");
  });

  test("a context that cannot hold a prompt and a token", () => {
    expect(() => planMemory({ ...options, contextLength: 1 }, 64, room(10))).toThrow("context length 1");
  });

  test("too little for one sequence: the arithmetic is in the message", () => {
    expect(() => planMemory(options, 64, room(9))).toThrow(/one sequence of 160 tokens.*0\.5 of .* weights .*9 pages of 8192 bytes.*10 pages are needed/);
    expect(() => planMemory(options, 64, () => 0)).toThrow("0 pages of");
  });
});

describe("pool size on a device with memory of its own", () => {
  const limits = { contextLength: 160, maxNumSeqs: 4, maxTotalTokens: null, memoryUtilization: 0.5 };
  // 512 of 1000 MiB are taken: 100 by others, 300 of weights, 100 of step buffers, 12 by the driver.
  const memory = { total: 1000 * MIB, usedBefore: 100 * MIB, weights: 300 * MIB, workspace: 100 * MIB, graphs: 8 * MIB, free: 488 * MIB, pageBytes: MIB };

  test("what the fraction of all its memory leaves beside everything that is taken", () => {
    const plan = planDeviceMemory({ ...limits, memoryUtilization: 0.55 }, memory);
    expect(plan.pages).toBe(550 - 512 - 8);
    for (const part of ["0.55 of 0.98 GiB device memory", "0.10 GiB in use before", "0.29 GiB of weights", "0.10 GiB of step buffers", "0.01 GiB of graphs", "0.01 GiB of the driver"]) expect(plan.memoryRule).toContain(part);
  });

  test("never more than is free", () => {
    expect(planDeviceMemory({ ...limits, maxNumSeqs: 1000, memoryUtilization: 1 }, { ...memory, free: 30 * MIB, usedBefore: 558 * MIB }).pages).toBe(30 - 8);
  });

  test("too little is refused with the arithmetic", () => {
    expect(() => planDeviceMemory(limits, memory)).toThrow(/too little memory for one sequence of 160 tokens: 0\.5 of 0\.98 GiB.*10 pages are needed.*--gpu-memory-utilization/);
  });

  test("the flag and what is useful bound it", () => {
    expect(planDeviceMemory({ ...limits, memoryUtilization: 1, maxTotalTokens: 320 }, memory)).toMatchObject({ pages: 20, memoryRule: expect.stringContaining("--max-total-tokens 320") });
    expect(planDeviceMemory({ ...limits, memoryUtilization: 1 }, memory).pages).toBe(40);
  });
});
