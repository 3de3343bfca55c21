/** A plain float64 forward pass over a LoadedModel: slow, obvious, independent of the native library. For tiny models only. */
import { OpenFile } from "../../src/model/files.ts";
import type { LoadedModel } from "../../src/model/model.ts";
import { type RoleName, tensorId } from "../../src/model/roles.ts";
import { dequantize } from "../../scripts/models/quantize.ts";

type Vector = Float64Array;

export class ReferenceModel {
  private readonly weights = new Map<number, { values: Float32Array; rows: number; cols: number }>();

  constructor(private readonly model: LoadedModel) {
    const files = model.weights.files.map((file) => OpenFile.open(file.path));
    for (const tensor of model.weights.tensors) {
      const bytes = files[tensor.file]!.read(tensor.offset, tensor.bytes, tensor.name);
      this.weights.set(tensor.id, { values: dequantize(bytes, tensor.dtype, tensor.rows * tensor.cols), rows: tensor.rows, cols: tensor.cols });
    }
    for (const file of files) file.close();
  }

  /** Natural log-probabilities over the vocabulary at every position: (tokens, vocab). */
  logprobs(tokens: readonly number[]): Vector[] {
    const { spec } = this.model;
    let hidden = tokens.map((token) => this.row("embedding", 0, token));
    for (let layer = 0; layer < spec.layers; layer++) {
      const attention = this.attention(layer, hidden.map((x) => this.rmsNorm(x, "attnNorm", layer)));
      hidden = hidden.map((x, t) => add(x, attention[t]!));
      hidden = hidden.map((x) => {
        const input = this.rmsNorm(x, "ffnNorm", layer);
        const gate = this.linear("gate", layer, input);
        const up = this.linear("up", layer, input);
        return add(x, this.linear("down", layer, gate.map((g, i) => (g / (1 + Math.exp(-g))) * up[i]!)));
      });
    }
    return hidden.map((x) => logSoftmax(this.linear(spec.tiedEmbeddings ? "embedding" : "lmHead", 0, this.rmsNorm(x, "finalNorm", 0))));
  }

  private tensor(role: RoleName, layer: number) {
    const tensor = this.weights.get(tensorId(role, layer));
    if (!tensor) throw new Error(`no ${role} in layer ${layer}`);
    return tensor;
  }

  private row(role: RoleName, layer: number, index: number): Vector {
    const { values, cols } = this.tensor(role, layer);
    return Float64Array.from(values.subarray(index * cols, (index + 1) * cols));
  }

  private linear(role: RoleName, layer: number, x: Vector, bias?: RoleName): Vector {
    const { values, rows, cols } = this.tensor(role, layer);
    const y = bias ? this.row(bias, layer, 0) : new Float64Array(rows);
    for (let r = 0; r < rows; r++) for (let c = 0; c < cols; c++) y[r]! += values[r * cols + c]! * x[c]!;
    return y;
  }

  private rmsNorm(x: Vector, role: RoleName, layer: number): Vector {
    const weight = this.tensor(role, layer).values;
    const scale = 1 / Math.sqrt(x.reduce((sum, v) => sum + v * v, 0) / x.length + this.model.spec.rmsEps);
    return x.map((v, i) => v * scale * weight[i]!);
  }

  private rotate(x: Vector, position: number): Vector {
    const { rope, headDim } = this.model.spec;
    const out = new Float64Array(headDim);
    for (let i = 0; i < headDim / 2; i++) {
      const [a, b] = rope.style === "half" ? [i, i + headDim / 2] : [2 * i, 2 * i + 1];
      const angle = position * rope.invFreq[i]!;
      const cos = Math.cos(angle) * rope.scale;
      const sin = Math.sin(angle) * rope.scale;
      out[a] = x[a]! * cos - x[b]! * sin;
      out[b] = x[b]! * cos + x[a]! * sin;
    }
    return out;
  }

  /** inputs: (tokens, hidden), causal. */
  private attention(layer: number, inputs: Vector[]): Vector[] {
    const { heads, kvHeads, headDim, qkvBias, oBias, qkNorm } = this.model.spec;
    const split = (y: Vector) => Array.from({ length: y.length / headDim }, (_, h) => y.slice(h * headDim, (h + 1) * headDim));
    const project = (role: RoleName, bias: RoleName) => inputs.map((x) => split(this.linear(role, layer, x, qkvBias ? bias : undefined)));
    const place = (rows: Vector[][], norm: RoleName) =>
      rows.map((row, t) => row.map((head) => this.rotate(qkNorm ? this.rmsNorm(head, norm, layer) : head, t)));
    const q = place(project("q", "qBias"), "qNorm");
    const k = place(project("k", "kBias"), "kNorm");
    const v = project("v", "vBias");
    return inputs.map((_, t) => {
      const joined = new Float64Array(heads * headDim);
      for (let h = 0; h < heads; h++) {
        const group = Math.floor(h / (heads / kvHeads));
        const scores = Float64Array.from({ length: t + 1 }, (_, s) => q[t]![h]!.reduce((sum, x, i) => sum + x * k[s]![group]![i]!, 0) / Math.sqrt(headDim));
        const weights = logSoftmax(scores).map(Math.exp);
        for (let s = 0; s <= t; s++) for (let i = 0; i < headDim; i++) joined[h * headDim + i]! += weights[s]! * v[s]![group]![i]!;
      }
      return this.linear("o", layer, joined, oBias ? "oBias" : undefined);
    });
  }
}

function add(a: Vector, b: Vector): Vector {
  return a.map((x, i) => x + b[i]!);
}

function logSoftmax(x: Vector): Vector {
  const max = x.reduce((a, b) => Math.max(a, b));
  const log = max + Math.log(x.reduce((sum, v) => sum + Math.exp(v - max), 0));
  return x.map((v) => v - log);
}
