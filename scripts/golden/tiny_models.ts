/** Writes every tiny model of the golden data as a Hugging Face directory: bun scripts/golden/tiny_models.ts OUT */
import { join } from "node:path";
import { TINY_MODELS, writeTinyHf } from "../../test/support/models.ts";

const out = process.argv[2];
if (!out) {
  console.error("usage: bun scripts/golden/tiny_models.ts OUT");
  process.exit(2);
}
for (const model of TINY_MODELS) console.log(writeTinyHf(join(out, model.name), model));
