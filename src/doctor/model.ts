import { readFileSync } from "node:fs";
import type { EngineConfig, WorkerOptions } from "../config/engine-config.ts";
import { refuseRecurrent } from "../dynamo/disaggregation/recurrent.ts";
import { checkTemplate } from "../dynamo/registration/custom-template.ts";
import { planPool } from "../engine/loader.ts";
import { probeModel } from "../model/hub/probe.ts";
import { bytesText } from "../model/hub/progress.ts";
import { parseReference } from "../model/hub/reference.ts";
import { type LoadedModel, openModel } from "../model/model.ts";
import { contextLimit, engineOptions } from "../runtime/load-engine.ts";
import { ChatTemplate } from "../tokenizer/chat-template.ts";
import { Tokenizer } from "../tokenizer/tokenizer.ts";
import { fail, type Findings, skip, warn } from "./findings.ts";
import type { SelectedDevice } from "../runtime/select-device.ts";

/** Round trips through all of a byte-level vocabulary's corners. */
const SAMPLE = "Hello, world! Größe 12,5 € 你好 🙂\n\tdef f(x): return x";

export interface ModelInput {
  /** --model was given. */
  given: boolean;
  engine: EngineConfig;
  /** null under serve. */
  worker: WorkerOptions | null;
}

export async function modelChecks(findings: Findings, { given, engine, worker }: ModelInput, machine: SelectedDevice | null): Promise<void> {
  let path: string | null = null;
  let model: LoadedModel | null = null;
  await findings.check("model", async () => {
    if (!given) throw skip("no --model given");
    const found = await locate(engine);
    ({ path } = found);
    return found.detail;
  }, "give a directory that exists or the id of a repo, see docs/models.md");
  if (path === null) {
    const why = given && findings.list.at(-1)!.status !== "failed" ? "the model is not in the cache yet" : "there is no model to look at";
    findings.skip(why, "model-files", "tokenizer", "disaggregation", "context");
    await findings.check("chat-template", () => template(null, worker, why));
    return;
  }
  await findings.check("disaggregation", () => {
    if (worker === null || worker.disaggregationMode === "agg") throw skip("the worker runs whole requests");
    refuseRecurrent({ worker }, path!);
    return `the model can be split; role ${worker.disaggregationMode}`;
  }, "serve this model with --disaggregation-mode agg");
  const readable = await findings.check("model-files", async () => {
    model = await openModel(path!);
    const { format, dtype, spec, weights } = model;
    return `${spec.architecture}, ${format}, ${weights.tensors.length} tensors in ${weights.files.length} files, mostly ${dtype}, context ${spec.maxContext}`;
  }, "fetch the files again, or choose a model that docs list as supported");
  if (!readable) {
    findings.skip("the model's files cannot be read", "tokenizer", "context");
    await findings.check("chat-template", () => template(null, worker, "the model's files cannot be read"));
    return;
  }
  const loaded = model as LoadedModel | null;
  await findings.check("tokenizer", () => tokenizer(loaded!));
  await findings.check("chat-template", () => template(loaded, worker, ""));
  await findings.check("context", () => context(engine, loaded!, machine));
}

/** Where a start would find the model. */
async function locate(engine: EngineConfig): Promise<{ path: string | null; detail: string }> {
  const reference = parseReference(engine.model);
  if (reference === null) return { path: engine.model, detail: `${engine.model} is a local path` };
  const probe = await probeModel(reference, engine.hub, new AbortController().signal);
  if (probe.path !== null) return { path: probe.path, detail: `in the hub's cache: ${probe.path}${probe.note === null ? "" : ` (${probe.note})`}` };
  const free = probe.freeBytes === null ? "" : `, ${bytesText(probe.freeBytes)} are free in ${engine.hub.cacheDir}`;
  return { path: null, detail: `${engine.hub.endpoint} has it: ${bytesText(probe.bytes)} in ${probe.files} files are to be downloaded${free}` };
}

function tokenizer(model: LoadedModel): string {
  const made = Tokenizer.create(model.assets.tokenizerJson, model.assets.tokenizerConfig);
  const ids = made.encode(SAMPLE, { addSpecialTokens: false });
  const back = made.decode(ids, { skipSpecialTokens: false });
  const wrong = ids.find((id) => id >= model.spec.vocab);
  if (wrong !== undefined) throw fail(`token ${wrong} is beyond the model's vocabulary of ${model.spec.vocab}`, "tokenizer.json belongs to another model");
  if (back !== SAMPLE) throw warn(`a sample text comes back changed: ${JSON.stringify(back.slice(0, 80))}`, "expected of lower-casing or normalising tokenizers; else tokenizer.json belongs to another model");
  return `${made.vocabSize} tokens; a sample text comes back unchanged`;
}

const TOOL = { type: "function", function: { name: "get_weather_probe", description: "The weather", parameters: { type: "object", properties: { city: { type: "string" } } } } };

/** @param absent why there is no model, for models that would bring the template */
function template(model: LoadedModel | null, worker: WorkerOptions | null, absent: string): string {
  const custom = worker?.customJinjaTemplate ?? null;
  checkTemplate(custom);
  const source = custom === null ? (model?.assets.chatTemplate ?? null) : readFileSync(custom, "utf8");
  if (model === null && source === null) throw skip(absent);
  const chat = worker === null || worker.endpointTypes.includes("chat");
  if (source === null) {
    if (!chat) return "the model has none; only completions are served";
    throw warn("the model has no chat template: chat requests will be refused", worker === null ? "use /v1/completions" : "give one with --custom-jinja-template, or serve --endpoint-types completions alone");
  }
  const made = ChatTemplate.create(source, model?.assets.tokenizerConfig ?? {});
  const messages = [{ role: "user", content: "A question for the doctor" }];
  const text = made.render({ messages, addGenerationPrompt: true });
  if (!text.includes("A question for the doctor")) throw fail("the template renders a conversation without its text", "the template is not one for chats");
  if (worker?.toolCallParser != null && !made.render({ messages, tools: [TOOL], addGenerationPrompt: true }).includes(TOOL.function.name))
    throw warn("the template leaves tools out, so --dyn-tool-call-parser will find no calls", "use a template with tools");
  return `${custom === null ? "the model's own" : custom}: renders ${text.length} characters for one message`;
}

function context(engine: EngineConfig, model: LoadedModel, machine: SelectedDevice | null): string {
  const wanted = contextLimit(engine, model);
  if (machine === null) throw skip("there is no device to plan its memory for");
  // What a GPU has left is known only when its weights and graphs are there: null.
  const plan = planPool(engineOptions(engine, model, machine, null));
  if (engine.ctx !== null && engine.ctx > wanted)
    throw warn(`--ctx ${engine.ctx} is cut to ${wanted}: ${model.spec.maxContext < engine.ctx ? `the model has ${model.spec.maxContext}` : `the licence allows ${engine.licenseMaxCtx}`}`, `give --ctx ${wanted} or less`);
  return plan === null ? `${wanted} tokens; the pool is planned from the GPU's memory at the start` : `${wanted} tokens fit; ${plan.memoryRule}`;
}
