/** The frontend's side of the request plane without a frontend: what the worker alone adds to a token's way. */
import { readdirSync, readFileSync } from "node:fs";
import { connect } from "node:net";
import { join } from "node:path";
import { encodeFrame } from "../../src/dynamo/request-plane/frame-codec.ts";
import { encodeTwoPart, TwoPartDecoder } from "../../src/dynamo/request-plane/two-part.ts";

export interface DirectResult {
  /** When each token's frame arrived, in order. */
  arrivals: number[];
}

const LIMIT_MS = 60_000;

/** "ip:port" and path of the worker's generate endpoint, from its instance record. */
function address(kv: string): { host: string; port: number; path: string } {
  const folder = join(kv, "v1/instances");
  for (const name of readdirSync(folder)) {
    const { endpoint, transport } = JSON.parse(readFileSync(join(folder, name), "utf8")) as { endpoint: string; transport: { tcp: string } };
    const [, host, port, path] = /^(.*):(\d+)\/(.*)$/.exec(transport.tcp) ?? [];
    if (endpoint === "generate") return { host: host!, port: Number(port), path: path! };
  }
  throw new Error(`no instance record of an endpoint "generate" in ${folder}`);
}

/** Runs all prompts at once, straight on the worker. */
export async function direct(kv: string, prompts: number[][], maxTokens: number): Promise<DirectResult[]> {
  const { host, port, path } = address(kv);
  const received: Received[] = [];
  const { promise: done, resolve, reject } = Promise.withResolvers<void>();
  let open = prompts.length;
  const server = Bun.listen<Received>({
    hostname: "127.0.0.1",
    port: 0,
    socket: {
      open(socket) {
        socket.data = { times: [], chunks: [] };
        received.push(socket.data);
      },
      data(socket, chunk) {
        socket.data.times.push(performance.now());
        socket.data.chunks.push(Buffer.from(chunk));
      },
      close() {
        if (--open === 0) resolve();
      },
    },
  });
  const requests = connect({ host, port, noDelay: true });
  const timer = setTimeout(() => reject(new Error(`no answer within ${LIMIT_MS} ms`)), LIMIT_MS);
  try {
    requests.on("error", (error) => reject(error));
    prompts.forEach((prompt, index) => {
      const control = {
        id: `direct-${index}`, request_type: "single_in", response_type: "many_out", payload_codec: "json",
        connection_info: { transport: "tcp_server", info: JSON.stringify({ address: `127.0.0.1:${server.port}`, subject: String(index), context: `direct-${index}`, stream_type: "response" }) },
      };
      const body = { token_ids: prompt, stop_conditions: { max_tokens: maxTokens, ignore_eos: true }, sampling_options: { temperature: 0 }, output_options: {}, eos_token_ids: [] };
      requests.write(encodeFrame({ path, headers: {}, payload: encodeTwoPart(Buffer.from(JSON.stringify(control)), Buffer.from(JSON.stringify(body))) }));
    });
    await done;
  } finally {
    clearTimeout(timer);
    requests.destroy();
    server.stop(true);
  }
  const results = prompts.map((): DirectResult => ({ arrivals: [] }));
  for (const { index, arrivals } of received.map(parse)) results[index]!.arrivals = arrivals;
  return results;
}

/** What one answer's connection brought, parsed when all is over so that reading costs as little as it can. */
interface Received {
  times: number[];
  chunks: Buffer[];
}

/** The subject, and when each token came. */
function parse({ times, chunks }: Received): { index: number; arrivals: number[] } {
  const decoder = new TwoPartDecoder(1 << 20);
  const arrivals: number[] = [];
  let index = -1;
  chunks.forEach((chunk, i) => {
    for (const { header, data } of decoder.push(chunk)) {
      if (index < 0) index = Number((JSON.parse(header.toString()) as { subject: string }).subject);
      else if (data.length > 0) {
        const ids = (JSON.parse(data.toString()) as { data?: { data?: { token_ids: number[] } } }).data?.data?.token_ids;
        if (ids !== undefined) arrivals.push(...Array<number>(ids.length).fill(times[i]!));
      }
    }
  });
  return { index, arrivals };
}
