import { writeFileSync } from "node:fs";
import type { ModelSpec, WeightPlan, WeightTensor } from "../../src/config/model-spec.ts";
import { ls_role } from "../../src/engine/native/abi.gen.ts";

/** Random f32 weights for a spec, in one file at `path`: a model that says nothing sensible, always the same. */
export function tinyWeights(spec: ModelSpec, path: string, seed = 1): WeightPlan {
  const { hidden, heads, kvHeads, headDim, intermediate, vocab } = spec;
  const shapes: [id: number, name: string, rows: number, cols: number][] = [
    [ls_role.LS_ROLE_EMBEDDING, "embedding", vocab, hidden],
    [ls_role.LS_ROLE_FINAL_NORM, "final_norm", 1, hidden],
  ];
  for (let layer = 0; layer < spec.layers; layer++) {
    const add = (role: number, name: string, rows: number, cols: number): void => void shapes.push([layer * 256 + role, `layer ${layer} ${name}`, rows, cols]);
    add(ls_role.LS_ROLE_ATTN_NORM, "attn_norm", 1, hidden);
    add(ls_role.LS_ROLE_Q, "q", heads * headDim, hidden);
    add(ls_role.LS_ROLE_K, "k", kvHeads * headDim, hidden);
    add(ls_role.LS_ROLE_V, "v", kvHeads * headDim, hidden);
    add(ls_role.LS_ROLE_O, "o", hidden, heads * headDim);
    add(ls_role.LS_ROLE_FFN_NORM, "ffn_norm", 1, hidden);
    add(ls_role.LS_ROLE_GATE, "gate", intermediate, hidden);
    add(ls_role.LS_ROLE_UP, "up", intermediate, hidden);
    add(ls_role.LS_ROLE_DOWN, "down", hidden, intermediate);
  }
  let state = seed >>> 0;
  const values = new Float32Array(shapes.reduce((sum, [, , rows, cols]) => sum + rows * cols, 0));
  for (let index = 0; index < values.length; index++) {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
    values[index] = (state / 2 ** 32 - 0.5) * 0.5;
  }
  const tensors: WeightTensor[] = [];
  let offset = 0;
  for (const [id, name, rows, cols] of shapes) {
    if (rows === 1) values.fill(1, offset / 4, offset / 4 + cols); // norms
    tensors.push({ id, name, file: 0, offset, bytes: rows * cols * 4, dtype: "f32", rows, cols });
    offset += rows * cols * 4;
  }
  writeFileSync(path, new Uint8Array(values.buffer));
  return { files: [{ path, bytes: offset }], tensors };
}
