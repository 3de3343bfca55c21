import { describe, expect, test } from "bun:test";
import type { DeviceRequest, KvCacheDtype } from "../../../src/config/engine-config.ts";
import { UsageError } from "../../../src/config/flags.ts";
import { EngineError } from "../../../src/engine/errors.ts";
import type { DeviceInfo, GpuInfo } from "../../../src/engine/native/backend.ts";
import { chooseDevice, type DeviceChoice, type Probe, ranksFor } from "../../../src/runtime/device.ts";
import { nvidiaHardware } from "../../../src/runtime/select-device.ts";
import { tinySpec } from "../../support/fake-engine.ts";

const auto: DeviceRequest = { kind: "auto" };
const cpu: DeviceRequest = { kind: "cpu" };
const cuda = (index: number | null = null): DeviceRequest => ({ kind: "cuda", index });

const gpu = (index: number, capability = "9.0", error?: string): GpuInfo => ({ index, name: "H200", uuid: `GPU-${index}`, capability, memory: 2 ** 37, ...(error !== undefined && { error }) });
const library = (devices: GpuInfo[], error?: string): DeviceInfo => ({ device: "cuda", isa: "cuda", isas: ["cuda"], threads: 0, name: "CUDA", driver: error === undefined ? 13000 : 0, runtime: 13050, devices, ...(error !== undefined && { error }) });
const machine = (over: Partial<Probe> = {}): Probe => ({ cuda: null, noCuda: "this program has no CUDA library", hardware: false, forced: null, ...over });
const gpus = (count: number, over: Partial<Probe> = {}): Probe => machine({ cuda: library(Array.from({ length: count }, (_, index) => gpu(index))), hardware: true, ...over });

type Asked = { device: DeviceRequest; tp?: number; kvCacheDtype?: "auto" | KvCacheDtype };
const choose = ({ device, tp, kvCacheDtype }: Asked, probe: Probe): DeviceChoice => chooseDevice({ device, tp: tp ?? null, kvCacheDtype: kvCacheDtype ?? "auto" }, probe);

describe("a device is chosen", () => {
  test.each<[string, Asked, Probe, object]>([
    ["no GPU, no library", { device: auto }, machine(), { kind: "cpu" }],
    ["no GPU, but a library without a driver", { device: auto }, machine({ cuda: library([], "no CUDA driver is installed") }), { kind: "cpu" }],
    ["no GPU, a driver that shows none", { device: auto }, machine({ cuda: library([]) }), { kind: "cpu" }],
    ["a GPU", { device: auto }, gpus(1), { kind: "cuda", index: 0, ranks: null }],
    ["the CPU beside a GPU", { device: cpu }, gpus(4), { kind: "cpu" }],
    ["the CPU beside a GPU that cannot be used", { device: cpu }, machine({ hardware: true }), { kind: "cpu" }],
    ["all GPUs", { device: cuda() }, gpus(4), { kind: "cuda", index: 0, ranks: null }],
    ["one GPU by its number, alone", { device: cuda(2) }, gpus(4), { kind: "cuda", index: 2, ranks: 1 }],
    ["ranks from a number on", { device: cuda(2), tp: 2 }, gpus(4), { kind: "cuda", index: 2, ranks: 2 }],
    ["fp8 pages", { device: auto, kvCacheDtype: "fp8_e4m3" }, gpus(1), { kind: "cuda", ranks: null }],
    ["the library of the variable: CUDA", { device: auto }, gpus(1, { forced: "cuda", hardware: false }), { kind: "cuda" }],
    ["the library of the variable: CPU, beside a GPU", { device: auto }, gpus(1, { forced: "cpu" }), { kind: "cpu" }],
  ])("%s", (_, asked, probe, expected) => {
    expect(choose(asked, probe)).toMatchObject(expected);
  });
  test("no more GPUs are kept than are used", () => {
    const gpusOf = (choice: DeviceChoice) => (choice.kind === "cuda" ? choice.gpus.map(({ index }) => index) : null);
    expect(gpusOf(choose({ device: cuda(1), tp: 2 }, gpus(4)))).toEqual([1, 2]);
    expect(gpusOf(choose({ device: auto }, gpus(12)))).toEqual([0, 1, 2, 3, 4, 5, 6, 7]);
  });
});

describe("one line says why not", () => {
  const old = machine({ hardware: true, cuda: library([], "the CUDA driver is too old: it serves CUDA 12.4, this library needs 13.0 or later") });
  test.each<[string, Asked, Probe, typeof UsageError | typeof EngineError, string[]]>([
    ["a GPU and no library", { device: auto }, machine({ hardware: true }), EngineError, ["a GPU is visible", "no CUDA library", "--device cpu"]],
    ["CUDA asked for, no library", { device: cuda() }, machine(), EngineError, ["--device cuda", "no CUDA library"]],
    ["no driver", { device: cuda() }, machine({ cuda: library([], "no CUDA driver is installed") }), EngineError, ["no CUDA driver is installed"]],
    ["an old driver", { device: auto }, old, EngineError, ["too old", "12.4", "13.0", "--device cpu"]],
    ["an old driver, by name", { device: cuda(1) }, old, EngineError, ["--device cuda:1", "too old"]],
    ["no GPU", { device: cuda() }, machine({ cuda: library([]) }), EngineError, ["shows no GPU"]],
    ["nodes but no GPU", { device: auto }, machine({ hardware: true, cuda: library([]) }), EngineError, ["a GPU is visible", "shows no GPU"]],
    ["a number too high", { device: cuda(4) }, gpus(4), UsageError, ["GPU 4", "4 GPUs are visible", "cuda:3"]],
    ["more ranks than GPUs", { device: auto, tp: 3 }, gpus(2), UsageError, ["--tp", '"3"', "at most 2", "2 GPUs are visible"]],
    ["more ranks than GPUs behind", { device: cuda(1), tp: 2 }, gpus(2), UsageError, ["--tp", '"2"', "at most 1"]],
    ["more ranks than the kernels take", { device: auto, tp: 9 }, gpus(16), UsageError, ["--tp", '"9"', "at most 8"]],
    ["no code for the architecture", { device: auto }, machine({ cuda: library([gpu(0, "8.7", "no kernel image is available for execution on the device")]) }), EngineError, ["GPU 0 (H200, compute capability 8.7)", "no kernel image"]],
    ["no bf16", { device: auto }, machine({ cuda: library([gpu(0, "7.5", "no kernel image")]) }), EngineError, ["7.5", "no bf16", "8.0"]],
    ["one of several GPUs", { device: auto, tp: 2 }, machine({ cuda: library([gpu(0), gpu(1, "7.0")]) }), EngineError, ["GPU 1"]],
    ["no fp8", { device: auto, kvCacheDtype: "fp8_e5m2" }, machine({ cuda: library([gpu(0, "8.0")]) }), UsageError, ["--kv-cache-dtype", "no fp8", '"fp8_e5m2"']],
    ["f32 pages on a GPU", { device: cuda(), kvCacheDtype: "f32" }, gpus(1), UsageError, ["--kv-cache-dtype", '"f32"']],
    ["fp8 pages on the CPU", { device: cpu, kvCacheDtype: "fp8_e4m3" }, machine(), UsageError, ["--kv-cache-dtype", "on the CPU", '"fp8_e4m3"']],
    ["ranks on the CPU", { device: auto, tp: 2 }, machine(), UsageError, ["--tp", "not available on the CPU", '"2"']],
    ["the variable against the flag", { device: cuda() }, machine({ forced: "cpu" }), UsageError, ["--device", "LAYERSCALE_NATIVE_LIB"]],
    ["the flag against the variable", { device: cpu }, gpus(1, { forced: "cuda" }), UsageError, ["--device", "LAYERSCALE_NATIVE_LIB"]],
  ])("%s", (_, asked, probe, kind, parts) => {
    let caught: unknown;
    try {
      choose(asked, probe);
    } catch (error) {
      caught = error;
    }
    expect(caught).toBeInstanceOf(kind);
    for (const part of parts) expect((caught as Error).message).toContain(part);
    expect((caught as Error).message).not.toContain("\n");
  });
});

describe("ranks for a model", () => {
  const visible = (count: number, ranks: number | null = null) => choose({ device: cuda(), ...(ranks !== null && { tp: ranks }) }, gpus(count)) as DeviceChoice & { kind: "cuda" };
  test("without --tp, all GPUs among which heads and inner width can be shared", () => {
    const spec = { ...tinySpec, heads: 16, kvHeads: 8, intermediate: 1024 };
    expect([1, 2, 3, 4, 7, 8].map((count) => ranksFor(visible(count), spec))).toEqual([1, 2, 2, 4, 4, 8]);
    expect(ranksFor(visible(8), { ...spec, kvHeads: 3, heads: 9, intermediate: 96 })).toBe(3);
  });
  test("--tp that does not fit names the model's numbers", () => {
    expect(ranksFor(visible(4, 2), tinySpec)).toBe(2);
    expect(() => ranksFor(visible(4, 4), tinySpec)).toThrow(/--tp: 2 kv heads.*"4"/);
  });
});

test("hardware: nodes of GPUs, or the driver's list where there is a control node", () => {
  const machineOf = (files: Record<string, string[]>) => [(path: string) => path in files, (path: string) => files[path] ?? []] as const;
  expect(nvidiaHardware(...machineOf({}))).toBe(false);
  expect(nvidiaHardware(...machineOf({ "/dev": ["null", "nvidiactl", "nvidia-uvm"] }))).toBe(false);
  expect(nvidiaHardware(...machineOf({ "/dev": ["nvidia0"] }))).toBe(true);
  // The list alone is what a container without GPUs sees, too.
  expect(nvidiaHardware(...machineOf({ "/dev": [], "/proc/driver/nvidia/gpus": ["0000:01:00.0"] }))).toBe(false);
  expect(nvidiaHardware(...machineOf({ "/dev": [], "/dev/nvidiactl": [], "/proc/driver/nvidia/gpus": ["0000:01:00.0"] }))).toBe(true);
});
