import { createServer, isIPv6, type Server, type Socket } from "node:net";
import { logger } from "../../telemetry/log.ts";
import { type ControlHeader, ControlHeaderError, parseControlHeader } from "./control-header.ts";
import { encodeAck, FrameDecoder, FrameError, type RequestFrame } from "./frame-codec.ts";
import { decodeTwoPart } from "./two-part.ts";

/** A request that was acknowledged. */
export interface IncomingRequest {
  control: ControlHeader;
  headers: Record<string, string>;
  /** Encoded as control.codec says. */
  body: Buffer;
  /** Bytes of the two-part message. */
  bytes: number;
  /** performance.now() when its last byte arrived. */
  receivedAt: number;
}

/** Either takes the request, or says why not now; must not throw and not wait. */
export type Endpoint = (request: IncomingRequest) => { refused: string } | void;

/** A peer that stops in the middle of a frame, or does not read its acknowledgements, is cut off after this time. */
const STALL_MS = 30_000;
/** Unread acknowledgements that a peer may leave, in bytes. */
const ACK_BACKLOG = 1 << 20;

const log = logger("layerscale::dynamo::request_plane");

/** The worker's listening side of Dynamo's TCP request plane: frames in, one acknowledgement per frame in the same order. */
export class TcpRequestPlane {
  readonly #endpoints = new Map<string, Endpoint>();
  readonly #connections = new Set<Socket>();
  readonly #server: Server;

  private constructor(
    server: Server,
    readonly host: string,
    readonly port: number,
    readonly maxMessageSize: number,
  ) {
    this.#server = server;
    server.on("connection", (socket) => this.#serve(socket));
    server.on("error", (error) => log.error("request plane listener failed", { error }));
  }

  /** @param host an IP literal. @throws Error of the socket when the address cannot be bound */
  static async listen(options: { host: string; port: number; maxMessageSize: number }): Promise<TcpRequestPlane> {
    const server = createServer({ noDelay: true });
    await new Promise<void>((resolve, reject) => {
      server.once("error", reject);
      server.listen(options.port, options.host, () => {
        server.off("error", reject);
        resolve();
      });
    });
    const bound = server.address();
    if (bound === null || typeof bound === "string") throw new Error("the request plane has no port");
    return new TcpRequestPlane(server, options.host, bound.port, options.maxMessageSize);
  }

  /** What an instance record advertises for a path: "ip:port/path". */
  address(path: string): string {
    return `${isIPv6(this.host) ? `[${this.host}]` : this.host}:${this.port}/${path}`;
  }
  register(path: string, endpoint: Endpoint): void {
    this.#endpoints.set(path, endpoint);
  }
  unregister(path: string): void {
    this.#endpoints.delete(path);
  }
  /** Stops listening and closes every connection. */
  close(): void {
    this.#server.close();
    for (const socket of this.#connections) socket.destroy();
  }

  #serve(socket: Socket): void {
    const decoder = new FrameDecoder(this.maxMessageSize);
    this.#connections.add(socket);
    socket.on("close", () => this.#connections.delete(socket));
    socket.on("error", (error) => log.debug("request connection failed", { error, peer: socket.remoteAddress }));
    socket.on("timeout", () => {
      if (decoder.pending === 0 && socket.writableLength === 0) return;
      log.warn("request connection stalled", { peer: socket.remoteAddress, pendingBytes: decoder.pending, unreadBytes: socket.writableLength });
      socket.destroy();
    });
    socket.setTimeout(STALL_MS);
    socket.on("drain", () => socket.resume());
    socket.on("data", (chunk: Buffer) => {
      if (socket.destroyed) return;
      try {
        for (const frame of decoder.push(chunk)) this.#accept(frame, socket);
      } catch (error) {
        // Whatever it is, it costs this connection and nothing else: acknowledgements may be out of order now.
        const at = error instanceof FrameError ? "warn" : "error";
        log[at]("request connection closed: not a request frame", { error, peer: socket.remoteAddress });
        socket.destroy();
        return;
      }
      if (socket.writableLength > ACK_BACKLOG) socket.pause();
    });
  }

  /** Acks match requests by order alone, so exactly one is written per frame, before any work. */
  #accept(frame: RequestFrame, socket: Socket): void {
    const receivedAt = performance.now();
    const endpoint = this.#endpoints.get(frame.path);
    let refusal: string | null = null;
    if (!endpoint) refusal = `unknown endpoint ${frame.path.slice(0, 200)}`;
    else {
      const { header, data } = decodeTwoPart(frame.payload);
      try {
        refusal = endpoint({ control: parseControlHeader(header), headers: frame.headers, body: data, bytes: frame.payload.length, receivedAt })?.refused ?? null;
      } catch (error) {
        if (!(error instanceof ControlHeaderError)) throw error;
        refusal = `malformed request: ${error.message}`;
      }
    }
    if (refusal !== null) log.warn("request not accepted", { reason: refusal, peer: socket.remoteAddress });
    // Any other text counts as accepted and would leave the client waiting; this prefix fails fast.
    socket.write(encodeAck(refusal === null ? "" : `Server unavailable: ${refusal}`));
  }
}
