import { createServer, isIPv6, type Server, type Socket } from "node:net";
import { logger } from "../../telemetry/log.ts";
import { descriptorLimit } from "../../util/descriptors.ts";
import { ByteQueue } from "../request-plane/byte-queue.ts";

const MORE = 1;
const LONG = 2;
const COMMAND = 4;
const GREETING_BYTES = 64;
/** A subscriber sends only short frames. */
const MAX_FRAME_BYTES = 4096;
const MAX_SUBSCRIPTIONS = 64;
/** One connection for each router. */
const MAX_PEERS = Math.min(1024, descriptorLimit() >> 3);
/** A subscriber that leaves more than this unread loses whole messages; it notices by their ids. */
const MAX_BACKLOG_BYTES = 16 << 20;
const HANDSHAKE_MS = 10_000;

const log = logger("layerscale::dynamo::event_plane");

/** ZMTP 3.0, mechanism NULL. */
const GREETING = Buffer.alloc(GREETING_BYTES);
GREETING.set([0xff, 0, 0, 0, 0, 0, 0, 0, 1, 0x7f, 3, 0]);
GREETING.write("NULL", 12);
const READY = frame(Buffer.concat([Buffer.from("\x05READY\x0bSocket-Type"), Buffer.from([0, 0, 0, 3]), Buffer.from("PUB")]), COMMAND);

function frame(body: Uint8Array, flags: number): Buffer {
  const long = body.length > 255;
  const head = Buffer.allocUnsafe(long ? 9 : 2);
  head[0] = flags | (long ? LONG : 0);
  if (long) head.writeBigUInt64BE(BigInt(body.length), 1);
  else head[1] = body.length;
  return Buffer.concat([head, body]);
}

/** All parts of one message, ready to be written in one piece. */
export const encodeMessage = (parts: readonly Uint8Array[]): Buffer => Buffer.concat(parts.map((part, i) => frame(part, i < parts.length - 1 ? MORE : 0)));

class PeerError extends Error {}

/** One subscriber. */
class Peer {
  readonly #queue = new ByteQueue();
  readonly #subscriptions = new Set<string>();
  #greeted = false;
  dropped = 0;

  constructor(
    readonly socket: Socket,
    readonly onSubscribe: () => void,
  ) {
    socket.write(GREETING);
  }

  wants(topic: Buffer): boolean {
    const name = topic.toString("latin1");
    for (const prefix of this.#subscriptions) if (name.startsWith(prefix)) return true;
    return false;
  }

  /** @throws PeerError when the peer is not a ZMTP 3 subscriber */
  receive(chunk: Uint8Array): void {
    this.#queue.append(chunk);
    if (!this.#greeted && !this.#greet()) return;
    for (;;) {
      const bytes = this.#queue.peek();
      if (bytes.length < 2) return;
      const flags = bytes[0]!;
      const long = (flags & LONG) !== 0;
      if (long && bytes.length < 9) return;
      const length = long ? Number(bytes.readBigUInt64BE(1)) : bytes[1]!;
      if (length > MAX_FRAME_BYTES) throw new PeerError(`frame of ${length} bytes from a subscriber`);
      const start = long ? 9 : 2;
      if (bytes.length < start + length) return;
      if ((flags & COMMAND) === 0) this.#subscribe(bytes.subarray(start, start + length));
      this.#queue.consume(start + length);
    }
  }

  #greet(): boolean {
    if (this.#queue.length < GREETING_BYTES) return false;
    const bytes = this.#queue.peek();
    const mechanism = bytes.toString("latin1", 12, 32).replace(/\0+$/, "");
    if (bytes[0] !== 0xff || (bytes[9]! & 1) !== 1 || bytes[10]! < 3 || mechanism !== "NULL") throw new PeerError(`greeting of version ${bytes[10]}, mechanism "${mechanism}"`);
    this.#queue.consume(GREETING_BYTES);
    this.#greeted = true;
    this.socket.setTimeout(0);
    this.socket.write(READY);
    return true;
  }

  /** Under version 3.0 a subscription is a message: 01 or 00, then a prefix of topics. */
  #subscribe(body: Buffer): void {
    const prefix = body.toString("latin1", 1);
    if (body[0] === 0) this.#subscriptions.delete(prefix);
    else if (body[0] === 1) {
      if (this.#subscriptions.size >= MAX_SUBSCRIPTIONS) throw new PeerError(`more than ${MAX_SUBSCRIPTIONS} subscriptions`);
      this.#subscriptions.add(prefix);
      this.onSubscribe();
    }
  }
}

/** A ZeroMQ PUB socket: listens, and sends each message to the peers that subscribed to its first part. */
export class ZmtpPublisher {
  readonly #peers = new Set<Peer>();
  /** Called when a peer subscribes. */
  onSubscribe: () => void = () => {};

  private constructor(
    readonly server: Server,
    readonly host: string,
    readonly port: number,
  ) {
    server.on("connection", (socket) => this.#serve(socket));
    server.on("error", (error) => log.error("event listener failed", { error }));
  }

  /** @throws Error of the socket when the address cannot be bound */
  static async listen(host: string): Promise<ZmtpPublisher> {
    const server = createServer({ noDelay: true });
    server.maxConnections = MAX_PEERS;
    await new Promise<void>((resolve, reject) => {
      server.once("error", reject);
      server.listen(0, host, () => {
        server.off("error", reject);
        resolve();
      });
    });
    const bound = server.address();
    if (bound === null || typeof bound === "string") throw new Error("the event plane has no port");
    return new ZmtpPublisher(server, host, bound.port);
  }

  get endpoint(): string {
    return `tcp://${isIPv6(this.host) ? `[${this.host}]` : this.host}:${this.port}`;
  }

  /** Never waits; a peer that does not read loses the message. */
  send(parts: readonly Buffer[]): void {
    let message: Buffer | null = null;
    for (const peer of this.#peers) {
      if (!peer.wants(parts[0]!)) continue;
      if (peer.socket.writableLength > MAX_BACKLOG_BYTES) {
        if (peer.dropped++ === 0) log.warn("a subscriber does not keep up and loses events", { peer: peer.socket.remoteAddress });
        continue;
      }
      peer.socket.write((message ??= encodeMessage(parts)));
    }
  }

  close(): void {
    this.server.close();
    for (const peer of this.#peers) peer.socket.destroy();
  }

  #serve(socket: Socket): void {
    const peer = new Peer(socket, () => this.onSubscribe());
    this.#peers.add(peer);
    socket.setTimeout(HANDSHAKE_MS, () => socket.destroy());
    socket.on("close", () => this.#peers.delete(peer));
    socket.on("error", (error) => log.debug("subscriber connection failed", { error }));
    socket.on("data", (chunk: Buffer) => {
      try {
        peer.receive(chunk);
      } catch (error) {
        if (!(error instanceof PeerError)) throw error;
        log.warn("subscriber connection closed", { error, peer: socket.remoteAddress });
        socket.destroy();
      }
    });
  }
}
