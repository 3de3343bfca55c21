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
    [["--kv-cache-dtype", "fp8_e4m3"], "--kv-cache-dtype", "fp8_e4m3"],
    [["--device", "tpu"], "--device", "tpu"],
    [["--device", "cuda"], "--device", "cuda"],
    [["--tp", "2"], "--tp", "2"],
    [["--speculative-algorithm", "EAGLE"], "--speculative-algorithm", "EAGLE"],
    [["--port", "70000"], "--port", "70000"],
    [["--chunked-prefill-size", "-1"], "--chunked-prefill-size", "-1"],
  ])("%p is refused with its name and value", (argv, name, value) => {
    const text = usage(() => serve(["--model", "m", ...argv]));
    expect(text).toContain(name);
    expect(text).toContain(`"${value}"`);
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
  test("encode is refused with its reason", () => expect(usage(() => dynamo(["--disaggregation-mode", "encode"]))).toContain("no separate encoder"));
  test("a bad value from a variable names the variable", () => {
    expect(usage(() => dynamo([], { DYN_ENDPOINT_TYPES: "chat,foo" }))).toContain("DYN_ENDPOINT_TYPES");
    expect(usage(() => dynamo([], { DYN_SYSTEM_PORT: "90x0" }))).toBe('DYN_SYSTEM_PORT: expected an integer from -1 to 65535, got "90x0"');
    expect(usage(() => dynamo([], { DYN_DISCOVERY_BACKEND: "consul" }))).toContain("DYN_DISCOVERY_BACKEND");
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
