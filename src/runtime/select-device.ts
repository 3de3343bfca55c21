import { existsSync, readdirSync } from "node:fs";
import type { EngineConfig } from "../config/engine-config.ts";
import type { DeviceInfo } from "../engine/native/backend.ts";
import { deviceInfo, openLibrary } from "../engine/native/ffi-backend.ts";
import { findCudaLibrary, findLibrary, forcedLibrary } from "../engine/native/library.ts";
import { chooseDevice, type DeviceChoice, type Probe } from "./device.ts";

/** The device, and the library that drives it. */
export type SelectedDevice = { device: DeviceChoice; libraryPath: string; info: DeviceInfo };

/** What the kernel shows of NVIDIA GPUs: their nodes (containers get those they may use) or the driver's list. */
export function nvidiaHardware(exists: (path: string) => boolean = existsSync, list: (path: string) => string[] = readdirSync): boolean {
  const entries = (path: string): string[] => (exists(path) ? list(path) : []);
  return entries("/dev").some((name) => /^nvidia\d+$/.test(name)) || (exists("/dev/nvidiactl") && entries("/proc/driver/nvidia/gpus").length > 0);
}

/** Looks for libraries and GPUs. No device memory is taken. */
export async function probeDevices(): Promise<Probe & { cudaPath: string | null }> {
  const forced = forcedLibrary();
  if (forced !== null) {
    const info = deviceInfo(openLibrary(forced).symbols);
    const cuda = info.device === "cuda";
    return { cuda: cuda ? info : null, noCuda: "LAYERSCALE_NATIVE_LIB names a library for the CPU", hardware: false, forced: cuda ? "cuda" : "cpu", cudaPath: cuda ? forced : null };
  }
  const hardware = nvidiaHardware();
  let noCuda = "this program has no CUDA library (liblayerscale_cuda.so beside the executable)";
  let cudaPath: string | null = null;
  try {
    cudaPath = await findCudaLibrary();
    if (cudaPath !== null) return { cuda: deviceInfo(openLibrary(cudaPath).symbols), noCuda: "", hardware, forced: null, cudaPath };
  } catch (error) {
    noCuda = error instanceof Error ? error.message : String(error);
  }
  return { cuda: null, noCuda, hardware, forced: null, cudaPath };
}

/**
 * The device that the flags and this machine give. Called before a model is opened, and again when the engine is loaded.
 * @throws UsageError, EngineError: see chooseDevice
 */
export async function selectDevice(config: Pick<EngineConfig, "device" | "tp" | "kvCacheDtype">): Promise<SelectedDevice> {
  // Nothing needs to be looked for: a machine without a working driver must be able to use its CPU.
  if (config.device.kind === "cpu" && forcedLibrary() === null) return cpu(chooseDevice(config, { cuda: null, noCuda: "", hardware: false, forced: null }));
  const probe = await probeDevices();
  const device = chooseDevice(config, probe);
  return device.kind === "cuda" && probe.cudaPath !== null && probe.cuda !== null ? { device, libraryPath: probe.cudaPath, info: probe.cuda } : cpu(device);
}

async function cpu(device: DeviceChoice): Promise<SelectedDevice> {
  const libraryPath = await findLibrary();
  return { device, libraryPath, info: deviceInfo(openLibrary(libraryPath).symbols) };
}
