import { deviceInfo, openLibrary } from "../../src/engine/native/ffi-backend.ts";
import { findLibrary } from "../../src/engine/native/library.ts";
import type { EngineOptions } from "../../src/engine/types.ts";

/** Options of the library that is found (LAYERSCALE_NATIVE_LIB, else the CPU's), and whether its kernels are simulated, which takes a hundred times as long. */
export async function nativeDevice(): Promise<{ options: Pick<EngineOptions, "libraryPath" | "kvCacheDtype" | "gpu">; simulated: boolean }> {
  const libraryPath = await findLibrary();
  const info = deviceInfo(openLibrary(libraryPath).symbols);
  if (info.device !== "cuda") return { options: { libraryPath, kvCacheDtype: "f32", gpu: null }, simulated: false };
  return { options: { libraryPath, kvCacheDtype: "bf16", gpu: { index: 0, ranks: 1 } }, simulated: info.devices?.[0]?.name === "simulated device" };
}
