import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { chmodSync, copyFileSync, cpSync, mkdirSync, mkdtempSync, readdirSync, readFileSync, rmSync, symlinkSync, truncateSync, utimesSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { EtcdServer, hasEtcd } from "../../support/etcd-server.ts";
import { HubServer } from "../../support/hub-server.ts";
import { Launched, program, required } from "../../support/launch.ts";
import { tinyModel, writeTinyHf } from "../../support/models.ts";
import { hasNats, NatsServer } from "../../support/nats-server.ts";

const EXPIRED =
  "LSK-eyJpZCI6ImV4cGlyZWQtZXhhbXBsZSIsInRpZXIiOiJwcm8iLCJzZXNzaW9ucyI6NjQsImlhdCI6IjIwMjUtMDEtMDEiLCJleHAiOiIyMDI1LTEyLTMxIn0.6NGPRNi2pHY_I-wlPtgZY9CYoHZKRbnJ25ttneWFePkFg7F74849uezORsjq_WZuHqcgkpHyI_p17S1qjiVEDw";

let home: string;
let model: string;
beforeAll(() => {
  home = mkdtempSync(join(tmpdir(), "layerscale-doctor-"));
  model = writeTinyHf(join(home, "model"), tinyModel("tiny-llama-linear"));
});
afterAll(() => rmSync(home, { recursive: true, force: true }));

type Env = Record<string, string>;
interface Finding {
  id: string;
  status: string;
  detail: string;
  fix: string | null;
}

/** Where nothing is wrong. */
const well = (): Env => ({
  HOME: home, LAYERSCALE_LICENSE_KEY: required("LAYERSCALE_LICENSE_KEY"), DYN_DISCOVERY_BACKEND: "file", DYN_FILE_KV: join(home, "kv"), DYN_TCP_RPC_HOST: "127.0.0.1", DYN_SYSTEM_PORT: "0", DYN_SYSTEM_HOST: "127.0.0.1",
  HF_HUB_OFFLINE: "1",
});

async function doctor(args: readonly string[], env: Env): Promise<{ code: number; out: string; err: string }> {
  await using process = Launched.command([...program(), "doctor", ...args], { env, cwd: home });
  const code = await process.exit();
  return { code, out: process.stdout, err: process.stderr };
}

async function findings(args: readonly string[], env: Env): Promise<{ code: number; checks: Finding[]; bad: string[] }> {
  const { code, out } = await doctor([...args, "--json"], env);
  const { ok, checks } = JSON.parse(out) as { ok: boolean; checks: Finding[] };
  expect(ok).toBe(code === 0);
  return { code, checks, bad: checks.filter(({ status }) => status === "failed").map(({ id }) => id) };
}

/** A copy of the model with something wrong in it. */
let copies = 0;
function damaged(change: (directory: string) => void): string {
  const directory = join(home, `model-${copies++}`);
  cpSync(model, directory, { recursive: true });
  change(directory);
  return directory;
}
const edit = (directory: string, file: string, change: (json: Record<string, any>) => void) => {
  const json = JSON.parse(readFileSync(join(directory, file), "utf8")) as Record<string, any>;
  change(json);
  writeFileSync(join(directory, file), JSON.stringify(json));
};

/** A server that answers every request with the same text, and may be elsewhere in time. */
function answering(answer: (path: string, body: any) => unknown, date = new Date()) {
  const server = Bun.serve({
    hostname: "127.0.0.1", port: 0,
    fetch: async (request) => {
      const text = await request.text();
      const body = answer(new URL(request.url).pathname, text ? JSON.parse(text) : null);
      return body instanceof Response ? body : Response.json(body, { headers: { date: date.toUTCString() } });
    },
  });
  return { port: server.port!, url: `http://127.0.0.1:${server.port}`, [Symbol.asyncDispose]: () => server.stop(true) };
}

describe("where nothing is wrong", () => {
  test.each([["dynamo", []], ["serve", ["--port", "0"]]])("doctor %s says so, once per check, and ends with 0", async (command, extra) => {
    const { code, checks } = await findings([command, "--model", model, "--ctx", "256", ...extra], well());
    expect(checks.filter(({ status }) => status !== "ok" && status !== "skipped")).toEqual([]);
    expect(code).toBe(0);
    expect(new Set(checks.map(({ id }) => id)).size).toBe(checks.length);
    for (const id of ["license", "native-library", "instruction-set", "model", "model-files", "tokenizer", "chat-template", "context"]) expect(checks.find((finding) => finding.id === id)?.status).toBe("ok");
  });

  test("it is text for people, lists every check in its help, and leaves nothing behind", async () => {
    mkdirSync(join(home, "kv-there/v1/instances"), { recursive: true });
    const before = readdirSync(home, { recursive: true }).length;
    const { code, out, err } = await doctor(["--model", model, "--ctx", "256"], { ...well(), DYN_FILE_KV: join(home, "kv-there") });
    expect([code, err]).toEqual([0, ""]);
    expect(out).toMatch(/^layerscale [\d.]+ doctor, for layerscale dynamo\n/);
    expect(out).toMatch(/\nok {4}license +community/);
    expect(out.trimEnd().split("\n").at(-1)).toMatch(/^\d+ ok, 0 warning, 0 failed, \d+ skipped$/);
    expect(readdirSync(home, { recursive: true }).length).toBe(before);
    const help = await doctor(["--help"], {});
    expect(help.code).toBe(0);
    for (const line of out.split("\n").slice(1, -2)) {
      const [, id] = /^(?:ok|warn|FAIL|-) +([a-z-]+)/.exec(line) ?? [];
      if (id !== undefined) expect(help.out).toContain(`  ${id} `);
    }
  });

  test("without a key it runs, and names what is wrong with one", async () => {
    const { LAYERSCALE_LICENSE_KEY: _, ...env } = well();
    const { code, bad, checks } = await findings(["--model", model], env);
    expect([code, bad]).toEqual([1, ["license"]]);
    expect(checks.find(({ id }) => id === "license")?.detail).toContain("no key given");
    expect(checks.find(({ id }) => id === "context")?.status).toBe("ok");
  });

  test.skipIf(!hasEtcd)("etcd: keys are written, and taken away", async () => {
    await using etcd = await EtcdServer.start();
    await etcd.secure("worker", "right");
    const env = { ...well(), DYN_DISCOVERY_BACKEND: "etcd", ETCD_ENDPOINTS: etcd.url, ETCD_AUTH_USERNAME: "worker", POD_IP: "127.0.0.1" };
    const { bad, checks } = await findings([], { ...env, ETCD_AUTH_PASSWORD: "right" });
    expect(bad).toEqual([]);
    expect(checks.find(({ id }) => id === "clock")).toMatchObject({ status: "ok" });
    expect([await etcd.keys(), await etcd.leases()]).toEqual([[], []]);
    const refused = await findings([], { ...env, ETCD_AUTH_PASSWORD: "wrong" });
    expect([refused.code, refused.bad]).toEqual([1, ["discovery"]]);
    expect(refused.checks.find(({ id }) => id === "discovery")?.detail).toContain('ETCD_AUTH_USERNAME, ETCD_AUTH_PASSWORD: user "worker" is not accepted');
  });

  test.skipIf(!hasNats)("nats-server that answers, and one that refuses the login", async () => {
    await using nats = await NatsServer.start('authorization { token: "right" }');
    const env = { ...well(), DYN_REQUEST_PLANE: "nats", NATS_SERVER: nats.url };
    expect((await findings([], { ...env, NATS_AUTH_TOKEN: "right" })).bad).toEqual([]);
    const refused = await findings([], { ...env, NATS_AUTH_TOKEN: "wrong" });
    expect([refused.code, refused.bad]).toEqual([1, ["nats"]]);
  });
});

describe("what is wrong is named by its check", () => {
  const ask = (args: () => string[], env: () => Env = () => ({})) => ({ args, env });
  const cases: [string, string, RegExp, { args: () => string[]; env: () => Env }][] = [
    ["an expired licence", "license", /expired on 2025-12-31/, ask(() => [], () => ({ LAYERSCALE_LICENSE_KEY: EXPIRED }))],
    ["a path that does not exist", "model", /"\.\/absent" does not exist/, ask(() => ["--model", "./absent"])],
    ["a repo that is not in the cache, without the hub", "model", /HF_HUB_OFFLINE is set/, ask(() => ["--model", "acme/absent"])],
    ["a shard that is missing", "model-files", /names model-00002-of-00002\.safetensors, which is not in the directory/, ask(() => ["--model", damaged((directory) => rmSync(join(directory, "model-00002-of-00002.safetensors")))])],
    ["a file that was cut", "model-files", /reach beyond the .* data bytes/, ask(() => ["--model", damaged((directory) => truncateSync(join(directory, "model-00001-of-00002.safetensors"), 5000))])],
    ["an architecture that is not served", "model-files", /MambaForCausalLM/, ask(() => ["--model", damaged((directory) => edit(directory, "config.json", (json) => (json.architectures = ["MambaForCausalLM"])))])],
    ["a template that is none", "chat-template", /chat template: /, ask(() => ["--model", damaged((directory) => edit(directory, "tokenizer_config.json", (json) => (json.chat_template = "{% for %}")))])],
    ["a template of the operator that cannot be read", "chat-template", /--custom-jinja-template \/ DYN_CUSTOM_JINJA_TEMPLATE: cannot read/, ask(() => ["--model", model, "--custom-jinja-template", "absent.jinja"])],
    ["a template that says nothing", "chat-template", /renders a conversation without its text/, ask(() => {
      writeFileSync(join(home, "mute.jinja"), "hello");
      return ["--model", model, "--custom-jinja-template", join(home, "mute.jinja")];
    })],
    ["a model with recurrent layers in a split role", "disaggregation", /recurrent layers beside attention/, ask(() => ["--disaggregation-mode", "prefill", "--model", damaged((directory) => edit(directory, "config.json", (json) => (json.linear_num_key_heads = 2)))])],
    ["memory for no context", "context", /too little memory for one sequence/, ask(() => ["--model", model, "--gpu-memory-utilization", "0.000001"])],
    ["a tool parser nobody knows", "tool-parser", /knows no parser "hermess"/, ask(() => ["--dyn-tool-call-parser", "hermess"])],
    ["a reasoning parser nobody knows", "reasoning-parser", /knows no parser "deepseek"/, ask(() => ["--dyn-reasoning-parser", "deepseek"])],
    ["a GPU that is not there", "gpu", /--device cuda/, ask(() => ["--device", "cuda"])],
    ["a native library that is none", "native-library", /LAYERSCALE_NATIVE_LIB/, ask(() => [], () => ({ LAYERSCALE_NATIVE_LIB: join(home, "absent.so") }))],
    ["an instruction set nobody has", "instruction-set", /LAYERSCALE_CPU_ISA=sse9/, ask(() => [], () => ({ LAYERSCALE_CPU_ISA: "sse9" }))],
    ["POD_IP as a name", "pod-ip", /POD_IP: expected an IP address, got "my-pod"/, ask(() => [], () => ({ POD_IP: "my-pod" }))],
    ["POD_IP of another machine", "pod-ip", /POD_IP: no interface of this machine has 203\.0\.113\.7/, ask(() => [], () => ({ POD_IP: "203.0.113.7" }))],
    ["a file where the discovery directory should be", "discovery", /DYN_FILE_KV: .* is no directory/, ask(() => [], () => {
      writeFileSync(join(home, "kv-file"), "");
      return { DYN_FILE_KV: join(home, "kv-file") };
    })],
    ["a link to nowhere where the discovery directory should be", "discovery", /DYN_FILE_KV: .* is a link that leads nowhere/, ask(() => [], () => {
      symlinkSync("nowhere", join(home, "kv-link"));
      return { DYN_FILE_KV: join(home, "kv-link") };
    })],
    ["a place where nothing can be made", "discovery-rights", /^ENOENT: /, ask(() => [], () => ({ DYN_FILE_KV: "/proc/kv" }))],
    ["etcd that is not there", "discovery", /127\.0\.0\.1:1/, ask(() => [], () => ({ DYN_DISCOVERY_BACKEND: "etcd", ETCD_ENDPOINTS: "http://127.0.0.1:1" }))],
    ["nats-server that is not there", "nats", /NATS_SERVER: cannot connect to/, ask(() => [], () => ({ DYN_EVENT_PLANE: "nats", NATS_SERVER: "nats://127.0.0.1:1" }))],
    ["Kubernetes without a pod's name", "discovery", /POD_NAME is not set/, ask(() => [], () => ({ DYN_DISCOVERY_BACKEND: "kubernetes" }))],
    ["a certificate that is not there", "request-tls", /DYN_TCP_TLS_CERT_PATH/, ask(() => [], () => ({ DYN_TCP_TLS_CERT_PATH: join(home, "absent.pem"), DYN_TCP_TLS_KEY_PATH: join(home, "absent.key") }))],
    ["one port for two servers", "system-port", /are both 45678/, ask(() => [], () => ({ DYN_SYSTEM_PORT: "45678", DYN_TCP_RPC_PORT: "45678" }))],
  ];
  test.each(cases)("%s: %s", async (_what, id, detail, { args, env }) => {
    const { code, checks, bad } = await findings(["dynamo", ...args()], { ...well(), ...env() });
    expect([code, bad]).toEqual([1, [id]]);
    expect(checks.find((finding) => finding.id === id)?.detail).toMatch(detail);
  });

  test("ports in use: request-port, system-port, http-port", async () => {
    await using held = answering(() => ({}));
    const port = String(held.port);
    expect((await findings(["dynamo"], { ...well(), DYN_TCP_RPC_PORT: port })).bad).toEqual(["request-port"]);
    expect((await findings(["dynamo"], { ...well(), DYN_SYSTEM_PORT: port })).bad).toEqual(["system-port"]);
    expect((await findings(["serve", "--port", port], well())).bad).toEqual(["http-port"]);
  });

  test.skipIf(process.getuid?.() !== 0 || program().length > 1)("a discovery directory that this user may not write: discovery-rights", async () => {
    const kv = join(home, "kv-foreign");
    mkdirSync(kv);
    chmodSync(kv, 0o755);
    chmodSync(home, 0o755);
    // Where the other user may reach it.
    const executable = join(home, "layerscale");
    copyFileSync(program()[0]!, executable);
    const lines = `import os,sys
os.setgid(65534); os.setuid(65534)
os.execvpe(sys.argv[1], sys.argv[1:], os.environ)`;
    await using process = Launched.command([required("LAYERSCALE_TEST_PYTHON"), "-c", lines, executable, "doctor", "--json"], { env: { ...well(), HOME: "/nonexistent", TMPDIR: "/tmp", DYN_FILE_KV: kv }, cwd: "/" });
    await process.exit();
    const { checks } = JSON.parse(process.stdout) as { checks: Finding[] };
    expect(checks.filter(({ status }) => status === "failed").map(({ id, detail }) => [id, detail])).toEqual([["discovery-rights", expect.stringContaining("permission denied")]]);
  });

  test("a nats-server of an odd version, and a password in an address: one JSON object, without the password", async () => {
    const odd = Bun.listen({ hostname: "127.0.0.1", port: 0, socket: { open: (socket) => void socket.write('INFO {"server_id":"x","version":"2.10","max_payload":1048576,"headers":true}\r\n'), data: () => {} } });
    try {
      expect((await findings(["dynamo"], { ...well(), DYN_REQUEST_PLANE: "nats", NATS_SERVER: `nats://127.0.0.1:${odd.port}` })).bad).toEqual(["nats"]);
    } finally {
      odd.stop(true);
    }
    const { out, err } = await doctor(["dynamo", "--json"], { ...well(), DYN_DISCOVERY_BACKEND: "etcd", ETCD_ENDPOINTS: "http://root:sesame@127.0.0.1:1" });
    expect(JSON.parse(out).checks.find(({ id }: Finding) => id === "discovery")).toMatchObject({ status: "failed", detail: expect.stringContaining("ETCD_ENDPOINTS: expected addresses without a user name and password") });
    expect(out + err).not.toContain("sesame");
  });

  test("a clock that is off: clock", async () => {
    const etcd = (path: string) => (path === "/v3/lease/grant" ? { ID: "7" } : path === "/v3/maintenance/status" ? { version: "3.5.0" } : {});
    await using late = answering(etcd, new Date(Date.now() - 10 * 60_000));
    const env = (url: string) => ({ ...well(), DYN_DISCOVERY_BACKEND: "etcd", ETCD_ENDPOINTS: url, POD_IP: "127.0.0.1" });
    const { bad, checks } = await findings([], env(late.url));
    expect(bad).toEqual(["clock"]);
    expect(checks.find(({ id }) => id === "clock")?.detail).toMatch(/is (599|600)\.\d s ahead of that of http/);
    await using soon = answering(etcd, new Date(Date.now() + 20_000));
    expect((await findings([], env(soon.url))).checks.find(({ id }) => id === "clock")).toMatchObject({ status: "warning", detail: expect.stringContaining("behind") });
  });

  test("rights that a service account lacks, or a cluster without Dynamo's resources: discovery-rights, discovery", async () => {
    const reviews: string[] = [];
    const cluster = (denied: string) => (path: string, body: any) => {
      if (path === "/apis/nvidia.com/v1alpha1") return { resources: [{ name: "dynamoworkermetadatas" }] };
      const { verb, resource } = body.spec.resourceAttributes as { verb: string; resource: string };
      reviews.push(`${verb} ${resource}`);
      return { status: { allowed: `${verb} ${resource}` !== denied } };
    };
    const env = (url: string) => {
      const config = join(home, "kubeconfig");
      writeFileSync(config, JSON.stringify({ clusters: [{ name: "c", cluster: { server: url } }], contexts: [{ name: "x", context: { cluster: "c", user: "u" } }], users: [{ name: "u", user: { token: "t" } }], "current-context": "x" }));
      return { ...well(), DYN_DISCOVERY_BACKEND: "kubernetes", KUBECONFIG: config, POD_NAME: "worker-0", POD_UID: "u-1", POD_NAMESPACE: "serving", POD_IP: "127.0.0.1" };
    };
    await using good = answering(cluster(""));
    expect((await findings([], env(good.url))).bad).toEqual([]);
    expect(reviews.length).toBe(9);
    await using poor = answering(cluster("patch dynamoworkermetadatas"));
    const { bad, checks } = await findings([], env(poor.url));
    expect(bad).toEqual(["discovery-rights"]);
    expect(checks.find(({ id }) => id === "discovery-rights")?.detail).toBe("the service account may not patch dynamoworkermetadatas.nvidia.com in serving");
    await using bare = answering(() => new Response("404 page not found", { status: 404 }));
    const absent = await findings([], env(bare.url));
    expect(absent.bad).toEqual(["discovery"]);
    expect(absent.checks.find(({ id }) => id === "discovery")?.detail).toContain("install Dynamo's custom resource definitions");
  });

  test("a repo: how much is to be downloaded, that it is gated, that it does not fit: model", async () => {
    await using hub = await HubServer.start();
    const env = { ...well(), HF_HUB_OFFLINE: "0", HF_ENDPOINT: hub.url, HF_HOME: join(home, "hf") };
    hub.addDirectory("acme/tiny", model);
    hub.add("acme/gated", { "config.json": "{}" }, { readers: [], gated: true });
    const { code, checks } = await findings(["--model", "acme/tiny"], env);
    expect(code).toBe(0);
    expect(checks.find(({ id }) => id === "model")?.detail).toMatch(/has it: \d+ kB in 7 files are to be downloaded, .* are free in/);
    expect(checks.find(({ id }) => id === "model-files")).toMatchObject({ status: "skipped", detail: "the model is not in the cache yet" });
    expect(hub.paths("GET").filter((path) => path.includes("/resolve/"))).toEqual([]);
    expect((await findings(["--model", "acme/gated"], env)).bad).toEqual(["model"]);
    hub.fault = ({ method, path }, response) => method === "HEAD" && path.endsWith("config.json") && !!response.writeHead(200, { ETag: '"x"', "X-Linked-Size": "900000000000000" }).end();
    const full = await findings(["--model", "acme/tiny"], env);
    expect(full.bad).toEqual(["model"]);
    expect(full.checks.find(({ id }) => id === "model")?.detail).toContain("are still to be downloaded, but only");
  });

  test("records that others have left do not look alive", async () => {
    const kv = join(home, "kv-old");
    mkdirSync(join(kv, "v1/instances"), { recursive: true });
    writeFileSync(join(kv, "v1/instances/new"), "{}");
    writeFileSync(join(kv, "v1/instances/old"), "{}");
    utimesSync(join(kv, "v1/instances/old"), new Date(0), new Date(0));
    expect((await findings([], { ...well(), DYN_FILE_KV: kv })).checks.find(({ id }) => id === "discovery")?.detail).toBe(`${kv}: 1 live records`);
  });

  test("flags and variables that cannot be read end with 2: config", async () => {
    for (const [args, env, words] of [[["--ctx", "x"], {}, "--ctx: expected an integer"], [["--modle", "x"], {}, "did you mean --model"], [[], { DYN_SYSTEM_PORT: "abc" }, "DYN_SYSTEM_PORT: expected"]] as const) {
      const { code, out, err } = await doctor(["dynamo", ...args, "--json"], { ...well(), ...env });
      expect([code, err]).toEqual([2, expect.stringContaining(words)]);
      expect(JSON.parse(out)).toMatchObject({ ok: false, checks: [{ id: "config", status: "failed", detail: expect.stringContaining(words) }] });
    }
    expect(await doctor(["--json=1"], well())).toMatchObject({ code: 2, err: "error: --json=1: --json takes no value\n" });
    expect((await findings([], { ...well(), DYN_LORA_ENABLED: "true" })).bad).toEqual(["config"]);
  });
});

test("the names of parsers are those of the frontend", async () => {
  const { TOOL_PARSERS, REASONING_PARSERS } = await import("../../../src/doctor/parsers.ts");
  const code = "import json, dynamo._core as c; print(json.dumps([sorted(c.get_tool_parser_names()), sorted(c.get_reasoning_parser_names())]))";
  await using python = Launched.command([required("LAYERSCALE_TEST_PYTHON"), "-c", code]);
  await python.exit(60_000);
  expect(JSON.parse(python.stdout.trim().split("\n").at(-1)!)).toEqual([[...TOOL_PARSERS].sort(), [...REASONING_PARSERS].sort()]);
});
