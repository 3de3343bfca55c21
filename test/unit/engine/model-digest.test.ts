import { expect, test } from "bun:test";
import { mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import type { WeightTensor } from "../../../src/config/model-spec.ts";
import { modelDigest } from "../../../src/engine/model-digest.ts";
import { tinySpec } from "../../support/fake-engine.ts";

test("the digest is that of configuration and weights: any of them changes it, the order of keys and the path do not", () => {
  const directory = mkdtempSync(join(tmpdir(), "layerscale-digest-"));
  const weights = (name: string, change: (bytes: Uint8Array) => void = () => {}, tensor: Partial<WeightTensor> = {}) => {
    const bytes = new Uint8Array(8192).map((_, index) => index % 251);
    change(bytes);
    const path = join(directory, name);
    writeFileSync(path, bytes);
    const whole: WeightTensor = { id: 1, name: "w", file: 0, offset: 4096, bytes: 4096, dtype: "f32", rows: 32, cols: 32, ...tensor };
    return { files: [{ path, bytes: 8192 }], tensors: [whole, { ...whole, id: 2, offset: 0, bytes: 100, rows: 1, cols: 25 }] };
  };
  const hex = (...args: Parameters<typeof modelDigest>) => Buffer.from(modelDigest(...args)).toString("hex");
  try {
    const base = hex(tinySpec, weights("a"));
    expect(base).toMatch(/^[0-9a-f]{64}$/);
    expect(hex(Object.fromEntries(Object.entries(tinySpec).toReversed()) as never, weights("b"))).toBe(base);
    const others = [
      hex({ ...tinySpec, rmsEps: 1e-6 }, weights("a")),
      hex({ ...tinySpec, rope: { ...tinySpec.rope, invFreq: [...tinySpec.rope.invFreq.slice(0, -1), 0.011] } }, weights("a")),
      hex(tinySpec, weights("c", (bytes) => (bytes[6144] = 0))),
      hex(tinySpec, weights("d", (bytes) => (bytes[50] = 0))),
      hex(tinySpec, weights("e", () => {}, { dtype: "bf16" })),
    ];
    expect(new Set([base, ...others]).size).toBe(6);
    expect(() => modelDigest(tinySpec, { ...weights("a"), files: [{ path: join(directory, "absent"), bytes: 1 }] })).toThrow("absent");
  } finally {
    rmSync(directory, { recursive: true });
  }
});
