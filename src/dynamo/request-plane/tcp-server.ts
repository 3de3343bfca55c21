import { isIPv6, type Server, type Socket } from "node:net";
import { logger } from "../../telemetry/log.ts";
import { descriptorLimit } from "../../util/descriptors.ts";
import { type EndpointName, endpointPath, type Transport } from "../discovery/records.ts";
import { type Dial, dispatch } from "./dispatch.ts";
import { encodeAck, FrameDecoder, FrameError, type RequestFrame } from "./frame-codec.ts";
import type { Endpoint, RequestPlane } from "./request-plane.ts";
import { createListener, type ListenerTls } from "./tls.ts";

/** A peer that stops in the middle of a frame, or does not read its acknowledgements, is cut off after this time. */
const STALL_MS = 30_000;
/**
 * Half of the descriptors: a frontend has up to 100 connections. A connection beyond is closed at once, since a listener that finds no
 * descriptor left would keep a core busy until one comes back.
 */
const MAX_CONNECTIONS = descriptorLimit() >> 1;
/** Unfinished frames of all connections together, in largest frames: a frontend writes a frame at once, so a handful is never reached by one. */
const MAX_UNFINISHED = 8;
/** Unread acknowledgements that a peer may leave, in bytes. */
const ACK_BACKLOG = 1 << 20;

const log = logger("layerscale::dynamo::request_plane");

export interface TcpOptions {
  /** An IP literal. */
  host: string;
  /** 0 = any free port. */
  port: number;
  /** Bytes of a whole frame. */
  maxMessageSize: number;
  tls: ListenerTls | null;
  dial: Dial;
  maxConnections?: number;
}

/** The worker's listening side of Dynamo's TCP request plane: frames in, one acknowledgement per frame in the same order. */
export class TcpRequestPlane implements RequestPlane {
  readonly #endpoints = new Map<string, Endpoint>();
  readonly #connections = new Set<Socket>();
  /** Bytes of unfinished frames, all connections together. */
  #pending = 0;
  readonly #server: Server;
  #port = 0;
  #dropped = 0;

  private constructor(readonly options: TcpOptions) {
    this.#server = createListener(options.tls, (socket) => this.#serve(socket));
    this.#server.maxConnections = options.maxConnections ?? MAX_CONNECTIONS;
    this.#server.on("drop", () => {
      if (this.#dropped++ === 0) log.warn("request connections beyond the limit are closed", { limit: this.#server.maxConnections });
    });
  }

  /** @throws Error of the socket when the address cannot be bound */
  static async listen(options: TcpOptions): Promise<TcpRequestPlane> {
    const self = new TcpRequestPlane(options);
    const server = self.#server;
    await new Promise<void>((resolve, reject) => {
      server.once("error", reject);
      server.listen(options.port, options.host, () => {
        server.off("error", reject);
        resolve();
      });
    });
    const bound = server.address();
    if (bound === null || typeof bound === "string") throw new Error("the request plane has no port");
    server.on("error", (error) => log.error("request plane listener failed", { error }));
    self.#port = bound.port;
    return self;
  }

  get port(): number {
    return this.#port;
  }
  get host(): string {
    return this.options.host;
  }
  /** "ip:port/path"; the path is the routing key of each frame. */
  transport(name: EndpointName, instanceId: bigint): Transport {
    return { tcp: `${isIPv6(this.host) ? `[${this.host}]` : this.host}:${this.port}/${endpointPath(name, instanceId)}` };
  }
  async register(name: EndpointName, instanceId: bigint, endpoint: Endpoint): Promise<void> {
    this.#endpoints.set(endpointPath(name, instanceId), endpoint);
  }
  async unregister(name: EndpointName, instanceId: bigint): Promise<void> {
    this.#endpoints.delete(endpointPath(name, instanceId));
  }
  async close(): Promise<void> {
    this.#server.close();
    for (const socket of this.#connections) socket.destroy();
  }

  #serve(socket: Socket): void {
    const decoder = new FrameDecoder(this.options.maxMessageSize);
    this.#connections.add(socket);
    let pending = 0;
    const account = (bytes: number) => {
      this.#pending += bytes - pending;
      pending = bytes;
    };
    socket.on("close", () => {
      this.#connections.delete(socket);
      account(0);
    });
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
      account(decoder.pending);
      if (this.#pending > MAX_UNFINISHED * this.options.maxMessageSize) {
        log.warn("request connection closed: unfinished frames hold too much memory", { peer: socket.remoteAddress, pendingBytes: pending, allPendingBytes: this.#pending });
        socket.destroy();
        return;
      }
      if (socket.writableLength > ACK_BACKLOG) socket.pause();
    });
  }

  /** Acks match requests by order alone, so exactly one is written per frame, before any work. */
  #accept(frame: RequestFrame, socket: Socket): void {
    socket.write(encodeAck(dispatch({ ...frame, peer: socket.remoteAddress }, this.#endpoints.get(frame.path), this.options.dial)));
  }
}
