// npm run build: everything up to dist/layerscale. Arguments go to build.ts (abi | native | cuda | compile | check | all).
import { join } from "node:path";
import { root } from "./lib/paths.mjs";
import { die, run } from "./lib/run.mjs";
import { checkCompilers, ensureBun } from "./lib/toolchain.mjs";

export async function build(...tasks) {
  const bun = await ensureBun();
  checkCompilers();
  await run(bun, [join(root, "build.ts"), ...(tasks.length ? tasks : ["all"])], { cwd: root });
  return bun;
}

if (process.argv[1] === new URL(import.meta.url).pathname) await build(...process.argv.slice(2)).catch((error) => die(error.message));
