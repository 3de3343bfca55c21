import { COMMIT, VERSION } from "../config/version.ts";
import { deviceInfo, openLibrary } from "../engine/native/ffi-backend.ts";
import { findLibrary } from "../engine/native/library.ts";
import { LS_ABI_VERSION } from "../engine/native/abi.gen.ts";

/** One line: version, commit, ABI, and the devices that the libraries found support; a library that cannot be used says why. */
export async function versionText(): Promise<string> {
  const head = `layerscale ${VERSION} (commit ${COMMIT}), ABI ${LS_ABI_VERSION}, devices: `;
  try {
    const info = deviceInfo(openLibrary(await findLibrary()).symbols);
    return `${head}${info.device} (${info.isas.join(", ")})`;
  } catch (error) {
    return `${head}none (${(error as Error).message})`;
  }
}
