import { afterAll, describe, expect, test } from "bun:test";
import { chmodSync, mkdirSync, mkdtempSync, readFileSync, rmSync, symlinkSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join, relative } from "node:path";
import { openModel } from "../../../src/model/model.ts";
import { MAX_HEAD_DIM, MAX_LAYERS, ROLE, tensorId } from "../../../src/model/roles.ts";
import { TINY_CHAT_TEMPLATE } from "../../support/tiny-tokenizer.ts";
import { TINY_MODELS, tinyModel, writeTinyHf } from "../../support/models.ts";
import { expectRefusal, refusal } from "../../support/model-errors.ts";

const scratch = mkdtempSync(join(tmpdir(), "layerscale-hf-"));
afterAll(() => rmSync(scratch, { recursive: true }));
let count = 0;
const fresh = (name = "tiny-llama") => writeTinyHf(join(scratch, `${name}-${count++}`), tinyModel(name));
const writeJson = (directory: string, name: string, value: unknown) => writeFileSync(join(directory, name), JSON.stringify(value));
const readJson = (directory: string, name: string) => JSON.parse(readFileSync(join(directory, name), "utf8")) as Record<string, unknown>;

test("roles and limits are those of the native header", () => {
  const header = readFileSync(join(import.meta.dir, "../../../native/layerscale.h"), "utf8");
  const roles: [string, number][] = [...header.matchAll(/LS_ROLE_(\w+) = (\d+)/g)].map(([, name, value]) => [name!.toLowerCase().replace(/_(\w)/g, (_, c: string) => c.toUpperCase()), Number(value)]);
  expect(Object.fromEntries(roles)).toEqual(ROLE);
  expect(header).toContain(`#define LS_MAX_LAYERS ${MAX_LAYERS}`);
  expect(header).toContain(`#define LS_MAX_HEAD_DIM ${MAX_HEAD_DIM}`);
  expect(tensorId("down", 3)).toBe(3 * 256 + 30);
});

describe("paths", () => {
  test("what is no model is refused", async () => {
    const words = /not a model directory or \.gguf file/;
    await expectRefusal("HuggingFaceTB/SmolLM2-135M-Instruct", "HuggingFaceTB/SmolLM2-135M-Instruct", "", words);
    const text = join(scratch, "notes.txt");
    writeFileSync(text, "hello");
    await expectRefusal(text, text, "", words);
    await expectRefusal(join(scratch, "absent.gguf"), "absent.gguf", "", words);
    expect((await refusal("a\0b")).message).toMatch(words);
    expect((await refusal("")).message).toMatch(words);
  });
  test("an empty directory", async () => {
    const empty = join(scratch, "empty");
    mkdirSync(empty);
    await expectRefusal(empty, "config.json", "", /missing/);
  });
  test("a fifo or a directory in place of a file is said to be one, and is not opened", async () => {
    const directory = fresh();
    rmSync(join(directory, "config.json"));
    mkdirSync(join(directory, "config.json"));
    await expectRefusal(directory, "config.json", "", /config\.json: a directory, expected a regular file/);
    rmSync(join(directory, "config.json"), { recursive: true });
    expect(Bun.spawnSync(["mkfifo", join(directory, "config.json")]).success).toBe(true);
    await expectRefusal(directory, "config.json", "", /config\.json: a fifo, expected a regular file/);
    const other = fresh();
    rmSync(join(other, "tokenizer.json"));
    expect(Bun.spawnSync(["mkfifo", join(other, "tokenizer.json")]).success).toBe(true);
    await expectRefusal(other, "tokenizer.json", "", /tokenizer\.json: a fifo, expected a regular file/);
  });
  test("relative paths and trailing slashes", async () => {
    const directory = fresh();
    const model = await openModel(relative(process.cwd(), directory) + "/");
    expect(model.path).toBe(directory);
    expect(model.name).toBe(directory.split("/").at(-1)!);
  });
  test("a snapshot of the hub's cache, weights and settings being links", async () => {
    const snapshot = join(scratch, "models--Acme--Tiny-1/snapshots/0123abcd");
    mkdirSync(join(snapshot, ".."), { recursive: true });
    symlinkSync(fresh(), snapshot);
    expect((await openModel(snapshot)).name).toBe("Acme/Tiny-1");
  });
});

describe("weights", () => {
  for (const tiny of TINY_MODELS)
    test(`${tiny.name}: every tensor once, inside its file`, async () => {
      const model = await openModel(fresh(tiny.name));
      expect(model.dtype).toBe(tiny.dtype);
      expect(model.format).toBe("hf");
      expect(model.weights.files.length).toBe(tiny.shards);
      const ids = model.weights.tensors.map((tensor) => tensor.id);
      expect(new Set(ids).size).toBe(ids.length);
      for (const tensor of model.weights.tensors) {
        const file = model.weights.files[tensor.file]!;
        expect(tensor.offset + tensor.bytes).toBeLessThanOrEqual(file.bytes);
        expect(tensor.bytes).toBe(tensor.rows * tensor.cols * (tiny.dtype === "f32" ? 4 : 2));
        // The slice of the file that the plan names is where the header put this tensor.
        expect(readFileSync(file.path).length).toBe(file.bytes);
      }
      expect(() => structuredClone({ spec: model.spec, weights: model.weights })).not.toThrow();
    });
  test("f16 and mixed dtypes", async () => {
    const tiny = { ...tinyModel("tiny-llama"), dtype: "f16" as const };
    const model = await openModel(writeTinyHf(join(scratch, "half"), tiny));
    expect(model.dtype).toBe("f16");
  });
});

describe("settings", () => {
  test("eos ids: generation_config, then config, then tokenizer_config", async () => {
    const directory = fresh();
    expect((await openModel(directory)).generation.eosTokenIds).toEqual([259, 256]);
    rmSync(join(directory, "generation_config.json"));
    expect((await openModel(directory)).generation.eosTokenIds).toEqual([259]);
    const { eos_token_id: _, ...config } = readJson(directory, "config.json");
    writeJson(directory, "config.json", { ...config, text_config: { eos_token_id: [258, 258] } });
    expect((await openModel(directory)).generation.eosTokenIds).toEqual([258]);
    writeJson(directory, "config.json", config);
    expect((await openModel(directory)).generation.eosTokenIds).toEqual([259]);
    writeJson(directory, "tokenizer_config.json", { ...readJson(directory, "tokenizer_config.json"), eos_token: { content: "<|endoftext|>" } });
    expect((await openModel(directory)).generation.eosTokenIds).toEqual([256]);
    writeJson(directory, "tokenizer_config.json", { eos_token: "<none>" });
    await expectRefusal(directory, "tokenizer_config.json", "eos_token", /<none>/);
    writeJson(directory, "tokenizer_config.json", {});
    expect((await openModel(directory)).generation.eosTokenIds).toEqual([]);
  });
  test("sampling defaults, absent or null meaning silent", async () => {
    const directory = fresh();
    const generation = async (value: unknown) => {
      writeJson(directory, "generation_config.json", value);
      return (await openModel(directory)).generation;
    };
    expect(await generation({ temperature: 0.6, top_p: 0.95, eos_token_id: 1 })).toEqual({ temperature: 0.6, topP: 0.95, eosTokenIds: [1] });
    expect(await generation({ temperature: null, top_p: null })).toMatchObject({ temperature: null, topP: null });
    for (const [field, value] of [["temperature", "hot"], ["temperature", -1], ["top_p", 0], ["top_p", 1.5], ["eos_token_id", 384], ["eos_token_id", [1, -1]], ["eos_token_id", "2"]] as const) {
      writeJson(directory, "generation_config.json", { [field]: value });
      await expectRefusal(directory, "generation_config.json", field);
    }
  });
});

describe("tokenizer and template", () => {
  test("stored padding and truncation are dropped (A9)", async () => {
    const directory = fresh();
    const stored = { padding: { strategy: { Fixed: 512 } }, truncation: { max_length: 16 } };
    writeJson(directory, "tokenizer.json", { ...readJson(directory, "tokenizer.json"), ...stored });
    expect((await openModel(directory)).assets.tokenizerJson).toMatchObject({ padding: null, truncation: null });
  });
  test("the template: file, config string, named list, none", async () => {
    const directory = fresh();
    const template = async (value?: unknown) => {
      if (value !== undefined) writeJson(directory, "tokenizer_config.json", { chat_template: value });
      return (await openModel(directory)).assets.chatTemplate;
    };
    expect(await template()).toBe(TINY_CHAT_TEMPLATE);
    expect(await template([{ name: "rag", template: "a" }, { name: "default", template: "b" }])).toBe("b");
    expect(await template(null)).toBe(null);
    writeJson(directory, "chat_template.json", { chat_template: "legacy" });
    expect(await template()).toBe("legacy");
    expect(await template("config")).toBe("config");
    writeFileSync(join(directory, "chat_template.jinja"), "file\n");
    const model = await openModel(directory);
    expect(model.assets.chatTemplate).toBe("file\n");
    expect(model.assets.files()!.chatTemplate).toBe(join(directory, "chat_template.jinja"));
    rmSync(join(directory, "chat_template.jinja"));
    rmSync(join(directory, "chat_template.json"));
    writeJson(directory, "tokenizer_config.json", { chat_template: [{ name: "rag", template: "a" }] });
    await expectRefusal(directory, "tokenizer_config.json", "chat_template", /default/);
  });
  test("card files are the directory's own", async () => {
    const directory = fresh();
    const { assets } = await openModel(directory);
    const files = {
      config: join(directory, "config.json"), tokenizer: join(directory, "tokenizer.json"), tokenizerConfig: join(directory, "tokenizer_config.json"),
      chatTemplate: null, generationConfig: join(directory, "generation_config.json"),
    };
    expect(assets.files()).toEqual(files);
    expect(assets.materialize(join(scratch, "unused"))).toEqual(files);
  });
  test("without tokenizer_config.json an empty one is written elsewhere", async () => {
    const directory = fresh();
    rmSync(join(directory, "tokenizer_config.json"));
    const { assets } = await openModel(directory);
    expect(assets.files()).toBe(null);
    const files = assets.materialize(join(scratch, "cards"));
    expect(files.config).toBe(join(directory, "config.json"));
    expect(files.tokenizerConfig).toStartWith(join(scratch, "cards"));
    expect(JSON.parse(readFileSync(files.tokenizerConfig, "utf8"))).toEqual({});
  });
  test("no tokenizer.json", async () => {
    const directory = fresh();
    rmSync(join(directory, "tokenizer.json"));
    await expectRefusal(directory, "tokenizer.json", "", /missing/);
    writeJson(directory, "tokenizer.json", { version: "1.0" });
    await expectRefusal(directory, "tokenizer.json", "model");
  });
  test.skipIf(process.getuid?.() === 0)("a file that may not be read", async () => {
    const directory = fresh();
    chmodSync(join(directory, "config.json"), 0);
    expect((await refusal(directory)).message).toContain("cannot be opened");
  });
});
