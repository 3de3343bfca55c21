import { expect, test } from "bun:test";
import { join } from "node:path";
import { ls_config, ls_pool_stats_t, symbols } from "../../../src/engine/native/abi.gen.ts";
import { packConfig } from "../../../src/engine/native/ffi-backend.ts";
import { fakeOptions, tinySpec } from "../../support/fake-engine.ts";

const ROOT = join(import.meta.dir, "../../..");

test("the bindings match native/layerscale.h", () => {
  const check = Bun.spawnSync([process.execPath, join(ROOT, "scripts/abi-gen.ts"), "--check"], { cwd: ROOT });
  expect(check.stderr.toString()).toBe("");
  expect(check.exitCode).toBe(0);
});

test("offsets and sizes are those of the C compiler", () => {
  const structs = { ls_config, ls_pool_stats_t };
  const lines = Object.entries(structs).flatMap(([name, { size, fields }]) => [
    `_Static_assert(sizeof(${name}) == ${size}, "size of ${name}");`,
    ...Object.entries(fields).map(([field, { offset }]) => `_Static_assert(offsetof(${name}, ${field}) == ${offset}, "${name}.${field}");`),
  ]);
  const source = `#include <stddef.h>\n#include "layerscale.h"\n${lines.join("\n")}\n`;
  const compiled = Bun.spawnSync(["cc", "-x", "c", "-fsyntax-only", "-I", join(ROOT, "native"), "-"], { stdin: Buffer.from(source) });
  expect(compiled.stderr.toString()).toBe("");
  expect(compiled.exitCode).toBe(0);
});

test("every function of the header is bound", async () => {
  const headers = await Promise.all(["layerscale.h", "layerscale_transfer.h"].map((name) => Bun.file(join(ROOT, "native", name)).text()));
  const header = headers.join("\n").replace(/\/\*[\s\S]*?\*\//g, "");
  const declared = [...header.matchAll(/\b(ls_\w+)\s*\(/g)].map((match) => match[1]!);
  expect(Object.keys(symbols).toSorted()).toEqual(declared.toSorted());
});

test("ls_config carries every option", () => {
  const view = new DataView(packConfig(fakeOptions({ kvCacheDtype: "bf16", threads: 3, spec: { ...tinySpec, qkNorm: true, rope: { ...tinySpec.rope, style: "interleaved", scale: 2 } } }), 77).buffer as ArrayBuffer);
  const word = (field: keyof typeof ls_config.fields): number => view.getUint32(ls_config.fields[field].offset, true);
  expect([word("struct_size"), word("hidden"), word("kv_heads"), word("vocab"), word("rope_style"), word("qk_norm"), word("qkv_bias"), word("tied_embeddings")]).toEqual([96, 64, 2, 1000, 1, 1, 0, 1]);
  expect([word("max_context"), word("max_seqs"), word("max_batch_tokens"), word("kv_dtype"), word("prefix_cache"), word("threads")]).toEqual([512, 8, 77, 2, 1, 3]);
  expect(view.getFloat32(ls_config.fields.attn_scale.offset, true)).toBe(0.25);
  expect(view.getFloat32(ls_config.fields.rope_scale.offset, true)).toBe(2);
});
