/** TLS and mutual TLS between the real frontend and the worker: requests one way, answers the other. */
import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { Certificates, hasOpenssl } from "../../support/certificates.ts";
import { hasNats, NatsServer } from "../../support/nats-server.ts";
import { launch, required } from "../../support/launch.ts";
import { Deployment, LIMIT_MS, NAME, readEvents } from "./support.ts";

const TEST_MS = 3 * LIMIT_MS;
const exact = { ignore_eos: true };

describe.skipIf(!hasOpenssl)("TLS on the request plane", () => {
  let made: Certificates;
  let frontend: Record<string, string>;
  let worker: Record<string, string>;
  let mutual: { frontend: Record<string, string>; worker: Record<string, string> };
  beforeAll(() => {
    made = new Certificates();
    const side = (name: string) => {
      const { cert, key } = made.sign(name);
      const server = { DYN_TCP_TLS_CERT_PATH: cert, DYN_TCP_TLS_KEY_PATH: key, DYN_TCP_TLS_CA_CERT_PATH: made.ca };
      return { plain: server, mutual: { ...server, DYN_TCP_TLS_CLIENT_CA_CERT_PATH: made.ca, DYN_TCP_TLS_CLIENT_CERT_PATH: cert, DYN_TCP_TLS_CLIENT_KEY_PATH: key } };
    };
    const [a, b] = [side("frontend"), side("worker")];
    frontend = a.plain;
    worker = b.plain;
    mutual = { frontend: a.mutual, worker: b.mutual };
  });
  afterAll(() => made?.[Symbol.dispose]());

  /** Requests, a stream that is left, and that both directions were encrypted. */
  const serves = async (d: Deployment, env: Record<string, string>) => {
    const process = await d.worker([], { env });
    const unary = await d.ask("completions", "Once upon a time", { max_tokens: 8, ...exact });
    const stream = await d.ask("completions", "Once upon a time", { max_tokens: 8, stream: true, ...exact });
    expect([unary.status, unary.usage?.completion_tokens, stream.text, stream.done]).toEqual([200, 8, unary.text, true]);
    const leave = new AbortController();
    await readEvents(await d.request("completions", "The sea is", { max_tokens: 4000, stream: true, ...exact }, leave.signal), 3);
    leave.abort();
    await process.idle();
    expect(await process.metric("dynamo_component_cancellation_total")).toBe(1);
    return process;
  };

  test("certificates of both sides are verified; a worker without a trusted one is not served", async () => {
    await using d = await Deployment.start("round-robin", [], undefined, { frontend });
    await (await serves(d, worker)).kill();
    await using foreign = new Certificates();
    const stranger = foreign.sign("stranger");
    const other = await d.worker([], { served: false, env: { ...worker, DYN_TCP_TLS_CERT_PATH: stranger.cert, DYN_TCP_TLS_KEY_PATH: stranger.key } });
    for (let i = 0; i < 3; i++) expect((await d.ask("completions", "a", { max_tokens: 1 })).status).toBeGreaterThanOrEqual(500);
    expect(await other.metric("dynamo_component_requests_total")).toBe(0);
  }, TEST_MS);

  test("mutual TLS: both sides show certificates", async () => {
    await using d = await Deployment.start("round-robin", [], undefined, { frontend: mutual.frontend });
    await serves(d, mutual.worker);
  }, TEST_MS);

  test("half a pair ends the start with exit code 2 and its name, before the model is loaded", async () => {
    await using process = launch(["dynamo", "--model", required("LAYERSCALE_TEST_GGUF"), "--served-model-name", NAME], { env: { DYN_DISCOVERY_BACKEND: "mem", DYN_TCP_TLS_CERT_PATH: worker.DYN_TCP_TLS_CERT_PATH! } });
    expect([await process.exit(LIMIT_MS), process.stderr]).toEqual([2, expect.stringContaining("DYN_TCP_TLS_KEY_PATH")]);
  }, TEST_MS);

  test("only answers over TLS, and only requests", async () => {
    const { DYN_TCP_TLS_CA_CERT_PATH: ca, ...identity } = frontend;
    {
      await using d = await Deployment.start("round-robin", [], undefined, { frontend: identity });
      await serves(d, { DYN_TCP_TLS_CA_CERT_PATH: ca! });
    }
    await using d = await Deployment.start("round-robin", [], undefined, { frontend: { DYN_TCP_TLS_CA_CERT_PATH: ca! } });
    const { DYN_TCP_TLS_CA_CERT_PATH: _trust, ...own } = worker;
    await serves(d, own);
  }, TEST_MS);

  test.skipIf(!hasNats)("requests over NATS with TLS, answers over TLS", async () => {
    const { cert, key } = made.sign("nats");
    await using nats = await NatsServer.start(`tls { cert_file: "${cert}", key_file: "${key}", ca_file: "${made.ca}", verify: true }`);
    const own = made.sign("member");
    const all = {
      DYN_REQUEST_PLANE: "nats", DYN_EVENT_PLANE: "nats", NATS_SERVER: `tls://127.0.0.1:${nats.port}`, NATS_TLS_CA_CERT_PATH: made.ca, NATS_TLS_CLIENT_CERT_PATH: own.cert, NATS_TLS_CLIENT_KEY_PATH: own.key,
    };
    await using d = await Deployment.start("kv", [], undefined, { all, frontend });
    await serves(d, { DYN_TCP_TLS_CA_CERT_PATH: made.ca });
  }, TEST_MS);
});
