import { dlopen } from "bun:ffi";
import { readFileSync } from "node:fs";
import type { DeviceRequest, EngineConfig } from "../config/engine-config.ts";
import { LS_ABI_VERSION } from "../engine/native/abi.gen.ts";
import { deviceInfo, openLibrary } from "../engine/native/ffi-backend.ts";
import { findLibrary } from "../engine/native/library.ts";
import { type SelectedDevice, selectDevice } from "../runtime/select-device.ts";
import { fail, type Findings } from "./findings.ts";

type DeviceWish = Pick<EngineConfig, "device" | "tp" | "kvCacheDtype">;

/** @returns what an engine would run on; null when there is no usable library or device */
export async function machineChecks(findings: Findings, wish: DeviceWish): Promise<SelectedDevice | null> {
  let library = "";
  let selected: SelectedDevice | null = null;
  const loaded = await findings.check("native-library", async () => {
    library = await findLibrary();
    openLibrary(library);
    return `ABI ${LS_ABI_VERSION}, ${library}`;
  });
  let usable = false;
  if (loaded)
    usable = await findings.check("instruction-set", () => {
      const info = deviceInfo(openLibrary(library).symbols);
      return `${info.isa} with ${info.threads} threads (this machine has ${info.isas.join(", ")})`;
    });
  else findings.skip("the native library cannot be loaded", "instruction-set");
  await findings.check("gpu", async () => {
    const seen = gpuChecks(wish.device);
    // A library that is of no use has been named already.
    if (!usable) return seen;
    try {
      selected = await selectDevice(wish);
    } catch (error) {
      throw fail(`${(error as Error).message} (${seen})`);
    }
    return selected.device.kind === "cpu" && wish.device.kind === "auto" ? `none is used (${seen})` : seen;
  });
  return selected;
}

function gpuChecks(wish: DeviceRequest): string {
  const found = gpus();
  const seen = typeof found === "string" ? found : `${found.length === 0 ? "the driver is there, but no GPU" : found.join(", ")}`;
  if (wish.kind === "cpu") return `not needed for --device cpu (${seen})`;
  if (wish.kind === "auto") return seen;
  const asked = wish.index === null ? "cuda" : `cuda:${wish.index}`;
  if (typeof found === "string") throw fail(`--device ${asked}: ${found}`, "install NVIDIA's driver and start the container with --gpus all (in Kubernetes: an nvidia.com/gpu limit), or use --device cpu");
  if (found.length === 0) throw fail(`--device ${asked}: no GPU is visible to this process`, "look at CUDA_VISIBLE_DEVICES, --gpus and the nvidia.com/gpu limit");
  return seen;
}

/** One line per GPU, or why there are none. Through the driver itself, as an engine would reach it. */
export function gpus(library = "libcuda.so.1"): string[] | string {
  let driver: ReturnType<typeof open>;
  try {
    driver = open(library);
  } catch {
    return `no CUDA driver: ${library} cannot be loaded${kernelModule()}`;
  }
  const { cuInit, cuDriverGetVersion, cuDeviceGetCount, cuDeviceGetName, cuDeviceTotalMem_v2: cuDeviceTotalMem } = driver.symbols;
  const result = cuInit(0);
  if (result !== 0) return result === NO_DEVICE ? [] : `the CUDA driver cannot be started (cuInit: error ${result})${kernelModule()}`;
  const words = new Int32Array(new ArrayBuffer(8));
  cuDriverGetVersion(words);
  const version = `driver for CUDA ${Math.floor(words[0]! / 1000)}.${Math.floor((words[0]! % 1000) / 10)}`;
  cuDeviceGetCount(words);
  return Array.from({ length: words[0]! }, (_, index) => {
    const name = new Uint8Array(new ArrayBuffer(256));
    const bytes = new BigUint64Array(new ArrayBuffer(8));
    if (cuDeviceGetName(name, name.length, index) !== 0 || cuDeviceTotalMem(bytes, index) !== 0) return `GPU ${index}: cannot be asked`;
    return `GPU ${index}: ${Buffer.from(name).toString("utf8", 0, name.indexOf(0))}, ${(Number(bytes[0]) / 2 ** 30).toFixed(1)} GiB, ${version}`;
  });
}

const NO_DEVICE = 100;
const open = (library: string) =>
  dlopen(library, {
    cuInit: { args: ["u32"], returns: "i32" },
    cuDriverGetVersion: { args: ["ptr"], returns: "i32" },
    cuDeviceGetCount: { args: ["ptr"], returns: "i32" },
    cuDeviceGetName: { args: ["ptr", "i32", "i32"], returns: "i32" },
    cuDeviceTotalMem_v2: { args: ["ptr", "i32"], returns: "i32" },
  });

/** The host may have a driver that the container does not see. */
function kernelModule(): string {
  try {
    const version = /Kernel Module\s+(?:for \S+\s+)?([\d.]+)/.exec(readFileSync("/proc/driver/nvidia/version", "utf8"));
    return `, although the kernel has NVIDIA's module${version ? ` ${version[1]}` : ""}`;
  } catch {
    return "";
  }
}
