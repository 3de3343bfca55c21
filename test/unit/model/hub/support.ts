import { afterAll, beforeAll } from "bun:test";
import { mkdtempSync, readdirSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import type { HubEnvironment } from "../../../../src/config/engine-config.ts";
import { readHubEnvironment } from "../../../../src/config/hub-env.ts";
import { fetchModel, type HubOptions } from "../../../../src/model/hub/hub.ts";
import { parseReference } from "../../../../src/model/hub/reference.ts";
import { setLogSink } from "../../../../src/telemetry/log.ts";
import { tinyModel, writeTinyHf } from "../../../support/models.ts";
import { HubServer } from "../../../support/hub-server.ts";

export const REPO = "acme/tiny";
/** One folder for the files of these tests, which share this module. */
export const scratch = mkdtempSync(join(tmpdir(), "layerscale-hub-"));
process.on("exit", () => rmSync(scratch, { recursive: true, force: true }));
/** Two shards, a few settings. */
export const MODEL = writeTinyHf(join(scratch, "model"), tinyModel("tiny-llama-linear"));
export const SHARDS = readdirSync(MODEL).filter((name) => name.endsWith(".safetensors")).sort();

/** Lines that were logged since the last look. */
export const logged: string[] = [];
export function keepLogs(): void {
  beforeAll(() => setLogSink((line) => void logged.push(line)));
  afterAll(() => setLogSink((line) => void process.stderr.write(line + "\n")));
}

let homes = 0;
/** A hub with one model, and an empty cache of its own. */
export async function hubAndCache(env: Partial<HubEnvironment> = {}) {
  const hub = await HubServer.start();
  const repo = hub.addDirectory(REPO, MODEL);
  const home = join(scratch, `hf-${homes++}`);
  const environment: HubEnvironment = { ...readHubEnvironment({ HOME: scratch, HF_HOME: home, HF_ENDPOINT: hub.url }), metadataSeconds: 5, stallSeconds: 5, ...env };
  const folder = join(environment.cacheDir, "models--acme--tiny");
  const fetched = (model = REPO, options: HubOptions = {}, changed: Partial<HubEnvironment> = {}) =>
    fetchModel(parseReference(model)!, { ...environment, ...changed }, { retry: { tries: 3, firstPauseMs: 1 }, ...options });
  return { hub, repo, environment, folder, fetched, blob: (etag: string) => join(folder, "blobs", etag), [Symbol.asyncDispose]: () => hub[Symbol.asyncDispose]() };
}

/** The one line that a download ends with. */
export async function refusal(download: Promise<string>): Promise<string> {
  const path = await download.catch((error: unknown) => error as Error);
  if (typeof path === "string") throw new Error(`expected a refusal, got ${path}`);
  if (!/^(HubError|ModelError)$/.test(path.name)) throw path;
  if (path.message.includes("\n")) throw new Error(`more than one line: ${path.message}`);
  return path.message;
}
