import { describe, expect, test } from "bun:test";
import { dynamoConfig, dynamoHelp } from "../../../src/cli/dynamo.ts";
import { serveConfig, serveHelp } from "../../../src/cli/serve.ts";
import { readDynamoEnvironment } from "../../../src/config/env.ts";
import { UsageError } from "../../../src/config/flags.ts";
import type { License } from "../../../src/license/license.ts";

const license: License = { id: "t", tier: "t", maxSessions: null, maxCtx: 4096, issued: "2026-01-01", expires: null };
const serve = (argv: string[], env = {}) => serveConfig(argv, env, license, "LSK-k");
const dynamo = (argv: string[], env = {}) => dynamoConfig(["--model", "m", ...argv], env, license, "LSK-k");

function usage(body: () => unknown): string {
  try {
    body();
  } catch (error) {
    if (error instanceof UsageError) return error.message;
    throw error;
  }
  throw new Error("accepted");
}

describe("engine options", () => {
  test("defaults", () => {
    expect(serve(["--model", "m"])).toMatchObject({ host: "127.0.0.1", port: 8080, apiKey: false, engine: { model: "m", ctx: null, maxNumSeqs: 256, kvCacheDtype: "auto", prefixCache: true, licenseMaxCtx: 4096 } });
  });
  test.each([
    [["--ctx", "0"], "--ctx", "0"],
    [["--ctx", "1e3"], "--ctx", "1e3"],
    [["--max-num-seqs", "many"], "--max-num-seqs", "many"],
    [["--gpu-memory-utilization", "1.5"], "--gpu-memory-utilization", "1.5"],
    [["--gpu-memory-utilization", "0"], "--gpu-memory-utilization", "0"],
    [["--kv-cache-dtype", "int3"], "--kv-cache-dtype", "int3"],
    [["--device", "tpu"], "--device", "tpu"],
    [["--device", "cuda:"], "--device", "cuda:"],
    [["--device", "cuda:-1"], "--device", "cuda:-1"],
    [["--tp", "0"], "--tp", "0"],
    [["--tp", "65"], "--tp", "65"],
    [["--speculative-algorithm", "EAGLE"], "--speculative-algorithm", "EAGLE"],
    [["--port", "70000"], "--port", "70000"],
    [["--host", "é"], "--host", "é"],
    [["--host", "999.1.1.1"], "--host", "999.1.1.1"],
    [["--host", "a b"], "--host", "a b"],
    [["--host", "1.2.3"], "--host", "1.2.3"],
    [["--chunked-prefill-size", "-1"], "--chunked-prefill-size", "-1"],
  ])("%p is refused with its name and value", (argv, name, value) => {
    const text = usage(() => serve(["--model", "m", ...argv]));
    expect(text).toContain(name);
    expect(text).toContain(`"${value}"`);
  });
  test("devices", () => {
    for (const [given, device] of [["auto", { kind: "auto" }], ["CPU", { kind: "cpu" }], ["cuda", { kind: "cuda", index: null }], ["cuda:3", { kind: "cuda", index: 3 }]] as const)
      expect(serve(["--model", "m", "--device", given]).engine.device).toEqual(device);
    expect(serve(["--model", "m"]).engine).toMatchObject({ device: { kind: "auto" }, tp: null });
    expect(serve(["--model", "m", "--tp", "2", "--kv-cache-dtype", "fp8_e4m3"]).engine).toMatchObject({ tp: 2, kvCacheDtype: "fp8_e4m3" });
  });
  test("hosts: addresses, bracketed ones and names", () => {
    for (const [given, used] of [["127.0.0.1", "127.0.0.1"], ["::1", "::1"], ["[::1]", "::1"], ["localhost", "localhost"], ["node-7.example.com", "node-7.example.com"], ["0.0.0.0", "0.0.0.0"]] as const)
      expect(serve(["--model", "m", "--host", given]).host).toBe(used);
    expect(usage(() => serve(["--model", "m"], { LAYERSCALE_HOST: "ü" }))).toContain('LAYERSCALE_HOST: expected an IP address or a name of this machine, got "ü"');
  });
  test("a model is required", () => expect(usage(() => serve([]))).toContain("--model"));
  test("an unknown option names the nearest", () => expect(usage(() => serve(["--max-num-seq", "4"]))).toContain("--max-num-seqs"));
  test("serve knows no Dynamo flag and reads no DYN_ variable", () => {
    expect(usage(() => serve(["--model", "m", "--namespace", "x"]))).toContain("--namespace");
    expect(serve(["--model", "m"], { DYN_NAMESPACE: "!!", DYN_SYSTEM_PORT: "x" }).engine.model).toBe("m");
    expect(serveHelp()).not.toContain("DYN_");
  });
});

describe("dynamo options", () => {
  test("the flag beats the variable, the variable the default", () => {
    expect(dynamo([]).worker.namespace).toBe("dynamo");
    expect(dynamo([], { DYN_NAMESPACE: "a" }).worker.namespace).toBe("a");
    expect(dynamo(["--namespace", "b"], { DYN_NAMESPACE: "a" }).worker.namespace).toBe("b");
    expect(dynamo([], { DYN_NAMESPACE: "" }).worker.namespace).toBe("dynamo");
  });
  test.each(["UPPER", "a b", "", "n".repeat(65), "a/b"])("namespace %p is refused before anything is loaded", (name) => {
    expect(usage(() => dynamo(["--namespace", name]))).toContain("--namespace");
  });
  test.each(["a/b", "..", "x y", "UPPER", "é"])("namespace suffix %p is refused like a namespace", (suffix) => {
    expect(usage(() => dynamo([], { DYN_NAMESPACE_WORKER_SUFFIX: suffix }))).toBe(`DYN_NAMESPACE_WORKER_SUFFIX: expected up to 64 lower-case letters, digits, - and _, got "${suffix}"`);
  });
  test("encode is refused with its reason", () => expect(usage(() => dynamo(["--disaggregation-mode", "encode"]))).toContain("no separate encoder"));
  test("a bad value from a variable names the variable", () => {
    expect(usage(() => dynamo([], { DYN_ENDPOINT_TYPES: "chat,foo" }))).toContain("DYN_ENDPOINT_TYPES");
    expect(usage(() => dynamo([], { DYN_SYSTEM_PORT: "90x0" }))).toBe('DYN_SYSTEM_PORT: expected an integer from -1 to 65535, got "90x0"');
    expect(usage(() => dynamo([], { DYN_DISCOVERY_BACKEND: "consul" }))).toContain("DYN_DISCOVERY_BACKEND");
  });
  const OPTIONS: [flag: string, variable: string, key: keyof ReturnType<typeof dynamo>["worker"], value: string, parsed: unknown, other: string, bad: string | null][] = [
    ["disaggregation-mode", "DYN_DISAGGREGATION_MODE", "disaggregationMode", "decode", "decode", "prefill", "split"],
    ["namespace", "DYN_NAMESPACE", "namespace", "ns", "ns", "other", "N S"],
    ["component", "DYN_COMPONENT", "component", "comp", "comp", "other", "a.b"],
    ["endpoint", "DYN_ENDPOINT", "endpoint", "gen", "gen", "other", "a/b"],
    ["endpoint-types", "DYN_ENDPOINT_TYPES", "endpointTypes", "completions", ["completions"], "chat", "images"],
    ["custom-jinja-template", "DYN_CUSTOM_JINJA_TEMPLATE", "customJinjaTemplate", "/t.jinja", "/t.jinja", "/o.jinja", null],
    ["dyn-tool-call-parser", "DYN_TOOL_CALL_PARSER", "toolCallParser", "hermes", "hermes", "qwen25", null],
    ["dyn-reasoning-parser", "DYN_REASONING_PARSER", "reasoningParser", "qwen3", "qwen3", "basic", null],
    ["exclude-tools-when-tool-choice-none", "DYN_EXCLUDE_TOOLS_WHEN_TOOL_CHOICE_NONE", "excludeToolsWhenToolChoiceNone", "false", false, "true", "maybe"],
  ];
  test.each(OPTIONS)("--%s: from the flag, from %s, the flag wins, a bad value names both ways", (flag, variable, key, value, parsed, other, bad) => {
    expect(dynamo([`--${flag}`, value]).worker[key] as unknown).toEqual(parsed);
    expect(dynamo([], { [variable]: value }).worker[key] as unknown).toEqual(parsed);
    expect(dynamo([`--${flag}`, value], { [variable]: other }).worker[key] as unknown).toEqual(parsed);
    expect(dynamoHelp()).toContain(`--${flag}`);
    expect(dynamoHelp()).toContain(variable);
    if (bad === null) return;
    expect(usage(() => dynamo([`--${flag}`, bad]))).toMatch(new RegExp(`^--${flag}.*got ${JSON.stringify(bad)}`));
    expect(usage(() => dynamo([], { [variable]: bad }))).toMatch(new RegExp(`${variable}.*got ${JSON.stringify(bad)}`));
  });
  test("--enable-rl and its variable", () => {
    const system = { DYN_SYSTEM_PORT: "0" };
    expect([dynamo([], system).worker.enableRl, dynamo(["--enable-rl"], system).worker.enableRl, dynamo([], { ...system, DYN_ENABLE_RL: "1" }).worker.enableRl, dynamo([], { ...system, DYN_ENABLE_RL: "off" }).worker.enableRl]).toEqual([false, true, true, false]);
    expect(usage(() => dynamo([], { DYN_ENABLE_RL: "perhaps" }))).toContain('DYN_ENABLE_RL: expected true or false, got "perhaps"');
  });
  test("aggregated is another word for agg", () => expect(dynamo(["--disaggregation-mode", "aggregated"]).worker.disaggregationMode).toBe("agg"));
  test.each([
    ["DYN_SYSTEM_HEALTH_PATH", "health"], ["DYN_SYSTEM_LIVE_PATH", "/a b"], ["DYN_SYSTEM_STARTING_HEALTH_STATUS", "green"], ["DYN_SYSTEM_USE_ENDPOINT_HEALTH_STATUS", "generate"], ["DYN_SYSTEM_USE_ENDPOINT_HEALTH_STATUS", "[1]"],
    ["DYN_HEALTH_CHECK_ENABLED", "sometimes"], ["DYN_CANARY_WAIT_TIME", "0"], ["DYN_HEALTH_CHECK_REQUEST_TIMEOUT", "3s"], ["DYN_ENGINE_REQUEST_LIMIT", "0"], ["DYN_DYNAMO_REQUEST_QUEUE_LIMIT", "-1"], ["DYN_RL_ENDPOINT", "a/b"],
    ["DYN_LOG", "loud"], ["DYN_LOG", "info,a=b"], ["DYN_LORA_ENABLED", "2"], ["DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS", "soon"], ["DYN_REQUEST_PLANE", "udp"],
  ])("%s = %p is refused with its name and value", (variable, value) => {
    const text = usage(() => dynamo([], { [variable]: value }));
    expect(text).toStartWith(`${variable}: expected `);
    expect(text).toContain(`got "${value}"`);
  });
  test("every variable is in the help", () => {
    const help = dynamoHelp();
    for (const name of ["DYN_HEALTH_CHECK_ENABLED", "DYN_CANARY_WAIT_TIME", "DYN_HEALTH_CHECK_REQUEST_TIMEOUT", "DYN_HEALTH_CHECK_PAYLOAD", "DYN_SYSTEM_STARTING_HEALTH_STATUS", "DYN_SYSTEM_USE_ENDPOINT_HEALTH_STATUS", "DYN_RL_ENDPOINT", "DYN_LOG", "DYN_ENGINE_REQUEST_LIMIT", "DYN_STABLE_ROUTING_ID", "NATS_SERVER", "DYN_FILE_KV", "DYN_REQUEST_PLANE", "DYN_SYSTEM_PORT"])
      expect(help).toContain(name);
    expect(help).toContain("encode is refused");
  });
  test("--api-key is accepted without effect", () => expect(dynamo(["--api-key"]).worker).toEqual(dynamo([]).worker));
  test("off values of the system port", () => {
    expect(readDynamoEnvironment({}).systemPort).toBeNull();
    expect(readDynamoEnvironment({ DYN_SYSTEM_PORT: "-1" }).systemPort).toBeNull();
    expect(readDynamoEnvironment({ DYN_SYSTEM_PORT: "0" }).systemPort).toBe(0);
  });
  test("help shows both groups and every variable", () => {
    const help = dynamoHelp();
    for (const word of ["Engine options", "Worker options", "--speculative-algorithm", "--enable-rl", "DYN_ENABLE_RL", "DYN_DISCOVERY_BACKEND", "ETCD_ENDPOINTS", "POD_IP", "--api-key"]) expect(help).toContain(word);
  });
});
