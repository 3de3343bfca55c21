import { COMMIT, VERSION } from "../config/version.ts";
import { deviceInfo, openLibrary } from "../engine/native/ffi-backend.ts";
import { findCudaLibrary, findLibrary } from "../engine/native/library.ts";
import type { DeviceInfo } from "../engine/native/backend.ts";
import { LS_ABI_VERSION } from "../engine/native/abi.gen.ts";

/** One line: version, commit, ABI, and the devices that the libraries found support; a library that cannot be used says why. */
export async function versionText(): Promise<string> {
  const head = `layerscale ${VERSION} (commit ${COMMIT}), ABI ${LS_ABI_VERSION}, devices: `;
  const devices: string[] = [];
  for (const find of [findLibrary, findCudaLibrary]) {
    try {
      const path = await find();
      if (path !== null) devices.push(describe(deviceInfo(openLibrary(path).symbols)));
    } catch (error) {
      devices.push(`none (${(error as Error).message})`);
    }
  }
  return head + devices.join(", ");
}

function describe(info: DeviceInfo): string {
  if (info.device !== "cuda") return `${info.device} (${info.isas.join(", ")})`;
  return `cuda (${info.error ?? (info.devices?.map((gpu) => `${gpu.index}: ${gpu.name ?? "?"} ${gpu.error ?? gpu.capability}`).join(", ") || "no GPU")})`;
}
