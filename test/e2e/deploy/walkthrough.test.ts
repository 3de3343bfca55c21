/** The page's two walk-throughs with Docker, word for word but for the engine: workers in the image, the real frontend outside, one discovery directory. */
import { afterEach, beforeAll, beforeEach, describe, expect, test } from "bun:test";
import { chmodSync, chownSync, existsSync, mkdirSync, mkdtempSync, readdirSync, rmSync, statSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { Container, containers, type ContainerOptions, Network, ROOTFS } from "../../support/container.ts";
import { eventually, Launched, required } from "../../support/launch.ts";
import { smolVariant } from "../../support/smol-variants.ts";

const LIMIT_MS = 120_000;
/** Neither root nor the image's user. */
const FRONTEND_USER = 1234;
const NAME = "Qwen/Qwen3-8B";

describe.skipIf(!containers || !existsSync(ROOTFS))("walk-throughs in the image", () => {
  let model = "";
  let home = "";
  let kv = "";
  let network: Network;
  beforeAll(async () => {
    model = await smolVariant("hf-bf16");
  }, 2 * LIMIT_MS);
  beforeEach(async () => {
    home = mkdtempSync(join(tmpdir(), "layerscale-walk-"));
    chmodSync(home, 0o755);
    // mkdir -p /tmp/dynamo-kv && chmod a+rwX /tmp/dynamo-kv
    kv = join(home, "dynamo-kv");
    mkdirSync(kv);
    chmodSync(kv, 0o777);
    network = await Network.start();
  });
  afterEach(async () => {
    await network?.[Symbol.asyncDispose]();
    rmSync(home, { recursive: true, force: true });
  });

  /** docker run … layerscale/layerscale:latest dynamo --model … */
  const worker = (systemPort: number, args: readonly string[] = [], options: ContainerOptions = {}): Container =>
    Container.run(["dynamo", "--model", "/models/Qwen3-8B", "--served-model-name", NAME, ...args], {
      network: network.pid,
      ...options,
      env: { LAYERSCALE_LICENSE_KEY: required("LAYERSCALE_LICENSE_KEY"), DYN_DISCOVERY_BACKEND: "file", DYN_FILE_KV: "/kv", DYN_SYSTEM_PORT: String(systemPort), ...options.env },
      volumes: { [kv]: "/kv", [model]: "/models/Qwen3-8B:ro" },
    });

  /** python -m dynamo.frontend --http-port 8000 --router-mode kv, as a user of its own; the right to read every file stands for a Python that it may read. */
  function frontend(): Launched {
    const own = join(home, "frontend");
    mkdirSync(own);
    chownSync(own, FRONTEND_USER, FRONTEND_USER);
    const user = ["setpriv", `--reuid=${FRONTEND_USER}`, `--regid=${FRONTEND_USER}`, "--clear-groups", "--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"];
    return Launched.command(network.inside([...user, required("LAYERSCALE_TEST_PYTHON"), "-m", "dynamo.frontend", "--http-port", "8000", "--router-mode", "kv"]), {
      cwd: own,
      env: { DYN_DISCOVERY_BACKEND: "file", DYN_FILE_KV: kv, HOME: own, HF_HUB_OFFLINE: "1", PYTHONUNBUFFERED: "1" },
    });
  }
  const chat = (content: string) => ["http://127.0.0.1:8000/v1/chat/completions", "-H", "Content-Type: application/json", "-d", `{"model":"${NAME}","messages":[{"role":"user","content":"${content}"}],"max_tokens":64}`];
  async function answered(front: Launched, content = "hi"): Promise<any> {
    const answer = await eventually(async () => {
      if (!front.running) throw new Error(`the frontend ended: ${front.stderr.slice(-3000)}`);
      const reply = await network.curl(...chat(content));
      return reply.status === 200 ? reply : null;
    }, "the frontend answers", LIMIT_MS);
    const body = JSON.parse(answer.text);
    expect(body.choices[0].message.content.length).toBeGreaterThan(0);
    return body;
  }
  const files = () => ["instances", "mdc", "event_channels", "event_sources"].flatMap((bucket) => (existsSync(join(kv, "v1", bucket)) ? readdirSync(join(kv, "v1", bucket)).map((name) => join(kv, "v1", bucket, name)) : []));
  const owned = (uid: number) => files().filter((path) => statSync(path, { throwIfNoEntry: false })?.uid === uid);

  test("one worker, as root; the frontend of another user reads its files and may remove them", async () => {
    await using container = worker(9090);
    // 503 until the engine is loaded and warmed up, then 200.
    await container.process.log("system server listens", LIMIT_MS);
    await container.process.log("worker ready", LIMIT_MS);
    expect((await network.curl("http://127.0.0.1:9090/health")).status).toBe(200);
    expect((await network.curl("http://127.0.0.1:9090/live")).status).toBe(200);
    expect(owned(0).length).toBeGreaterThanOrEqual(2);
    for (const path of owned(0)) expect([path, statSync(path).mode & 0o444]).toEqual([path, 0o444]);
    for (const folder of ["", "v1", "v1/instances", "v1/mdc", "v1/event_channels", "v1/event_sources"]) expect([folder, statSync(join(kv, folder)).mode & 0o007]).toEqual([folder, 0o007]);
    await using front = frontend();
    await answered(front);
    const metrics = (await network.curl("http://127.0.0.1:9090/metrics")).text;
    expect(metrics.indexOf("layerscale_requests_total")).toBeGreaterThan(metrics.indexOf("dynamo_component_requests_total"));
    // docker stop -t 30: it leaves discovery, waits out the grace period, ends cleanly and leaves nothing behind.
    await container.signal("SIGTERM");
    expect(await container.process.exit(30_000)).toBe(0);
    expect(owned(0)).toEqual([]);
  }, 4 * LIMIT_MS);

  test("a killed worker's files are removed by the frontend of the other user", async () => {
    await using container = worker(9090);
    await container.process.log("worker ready", LIMIT_MS);
    await using front = frontend();
    await answered(front);
    await container.signal("SIGKILL");
    await container.process.exit(LIMIT_MS);
    expect(owned(0).length).toBeGreaterThanOrEqual(2);
    await eventually(() => owned(0).length === 0, "the frontend removes what has expired", LIMIT_MS);
    expect(front.running).toBe(true);
  }, 4 * LIMIT_MS);

  test("a strict umask, a read-only root and a user of its own change nothing of that", async () => {
    await using container = worker(9090, [], { umask: "077", user: 10001, readOnly: true, tmp: "missing" });
    await container.process.log("worker ready", LIMIT_MS);
    for (const path of owned(10001)) expect([path, statSync(path).mode & 0o444]).toEqual([path, 0o444]);
    expect(owned(10001).length).toBeGreaterThanOrEqual(2);
    await using front = frontend();
    await answered(front);
  }, 4 * LIMIT_MS);

  test("a prefill and a decode worker", async () => {
    await using prefill = worker(9091, ["--disaggregation-mode", "prefill"]);
    await using decode = worker(9092, ["--disaggregation-mode", "decode"]);
    for (const container of [prefill, decode]) await container.process.log("worker ready", LIMIT_MS);
    await using front = frontend();
    // The prompt's KV comes from the prefill worker, over the address of the default route, as soon as the frontend has found both.
    let cached = 0;
    let asked = 0;
    await eventually(async () => {
      // Another prompt each time: what is cached then has been transferred.
      cached = (await answered(front, `Tell me about the number ${asked++}, its divisors and its neighbours`)).usage.prompt_tokens_details.cached_tokens;
      return /^layerscale_kv_transfer_bytes_total\{direction="received"\} [1-9]/m.test((await network.curl("http://127.0.0.1:9092/metrics")).text);
    }, "KV is transferred", LIMIT_MS);
    expect(cached).toBeGreaterThan(0);
    for (const container of [decode, prefill]) await container.signal("SIGTERM");
    for (const container of [decode, prefill]) expect(await container.process.exit(30_000)).toBe(0);
    expect(owned(0)).toEqual([]);
  }, 4 * LIMIT_MS);
});
