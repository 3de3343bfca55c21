import { mkdtempSync, readdirSync, readFileSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { HubServer } from "../../support/hub-server.ts";
import { launch, Launched, type LaunchOptions, required } from "../../support/launch.ts";
import { tinyModel, writeTinyHf } from "../../support/models.ts";

export const TINY = "acme/tiny";
export const SMOL = "acme/smol-gguf";

/** A hub with a tiny model directory and a real GGUF, and an empty HF_HOME. */
export class Hub implements AsyncDisposable {
  private constructor(readonly server: HubServer, readonly home: string) {}

  static async start(): Promise<Hub> {
    const home = mkdtempSync(join(tmpdir(), "layerscale-e2e-hub-"));
    const server = await HubServer.start();
    server.addDirectory(TINY, writeTinyHf(join(home, "model"), tinyModel("tiny-llama-linear")));
    server.add(SMOL, { "README.md": "x", "smol.Q4_1.gguf": readFileSync(required("LAYERSCALE_TEST_GGUF")) });
    return new Hub(server, home);
  }

  get env(): Record<string, string> {
    return { HOME: this.home, HF_HOME: join(this.home, "hf"), HF_ENDPOINT: this.server.url };
  }

  get cache(): string {
    return join(this.home, "hf/hub");
  }

  serve(model: string, options: LaunchOptions = {}): Launched {
    return launch(["serve", "--model", model, "--port", "0", "--max-total-tokens", "256", "--ctx", "256"], { ...options, env: { ...this.env, ...options.env } });
  }

  /** huggingface_hub over the same cache. */
  async python(command: string, repo: string, env: Record<string, string> = {}): Promise<Record<string, any>> {
    await using process = Launched.command([required("LAYERSCALE_TEST_PYTHON"), join(import.meta.dir, "hub_cache.py"), command, repo], { env: { ...this.env, HF_HUB_DISABLE_TELEMETRY: "1", HF_HUB_DISABLE_UPDATE_CHECK: "1", ...env } });
    const code = await process.exit(100_000);
    if (code !== 0) throw new Error(`python ended with ${code}: ${process.stderr.slice(-3000)}`);
    return JSON.parse(process.stdout.trim().split("\n").at(-1)!) as Record<string, any>;
  }

  /** Names of the files of a repo whose bytes below a path are not those of the hub. */
  differing(repo: string, path: string, names = readdirSync(path)): string[] {
    return names.filter((name) => !this.server.repos.get(repo)!.files.get(name)!.bytes.equals(readFileSync(join(path, name))));
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.server[Symbol.asyncDispose]();
    rmSync(this.home, { recursive: true, force: true });
  }
}

/** Lines of stderr that are no log lines. */
export const errorLines = (process: Launched): string[] => process.stderr.split("\n").filter((line) => line !== "" && !line.startsWith("{"));
