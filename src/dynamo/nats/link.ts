import { connect, type ConnectionOptions, type Msg, type NatsConnection, type Subscription } from "@nats-io/transport-node";
import { logger } from "../../telemetry/log.ts";
import { PlaneError } from "../request-plane/request-plane.ts";
import { within } from "../../util/within.ts";
import type { NatsOptions } from "./options.ts";

/** A server that is not there at the start gets this long. */
export const START_MS = 10_000;
const CONNECT_MS = 3_000;
/** Between attempts: from the first to the second value, doubling; for ever. */
const RETRY_MS = [100, 4_000] as const;
/** A server that is silent for two of these is gone. */
const PING_MS = 10_000;
/** Unsubscribing, and the last bytes, may take this long at a stop. */
const DRAIN_MS = 2_000;
/** Published but not yet known to have reached the server. What exceeds it is dropped. */
const MAX_UNCONFIRMED = 16 << 20;

const log = logger("layerscale::dynamo::nats");

/** A subscription that outlives connections. */
interface Listener {
  subject: string;
  queue: string | undefined;
  deliver: (message: Msg) => void;
  subscription: Subscription | null;
}

/**
 * A connection to nats-server that comes back by itself, for ever, with its subscriptions. Nothing is kept for the time without
 * a server: what is published then is lost, as it is for everyone who does not listen at that moment.
 */
export class NatsLink {
  readonly #listeners = new Set<Listener>();
  #connection!: NatsConnection;
  #connected = false;
  #closed = false;
  /** performance.now() of the last loss; the pause between attempts grows with the time since. */
  #lostAt = 0;
  #unconfirmed = 0;
  #confirming = false;
  /** Called after each return of the server, subscriptions included. */
  onReturn: () => void = () => {};

  private constructor(readonly options: NatsOptions) {}

  /** @throws PlaneError naming NATS_SERVER, or the login's variables, after a bounded time */
  static async open(options: NatsOptions, startMs = START_MS): Promise<NatsLink> {
    const self = new NatsLink(options);
    const end = performance.now() + startMs;
    for (let pause = RETRY_MS[0] as number; ; pause = Math.min(pause * 2, 1_000)) {
      try {
        self.#adopt(await connect(self.#connectOptions(false)));
        return self;
      } catch (error) {
        const { name, message } = error as Error;
        if (/authori[sz]ation|authenticat/i.test(`${name} ${message}`)) throw new PlaneError(`${options.authSource}: nats-server at ${options.server} refuses the login: ${message}`);
        if (performance.now() + pause >= end) throw new PlaneError(`NATS_SERVER: cannot connect to ${options.server} within ${startMs / 1000} s: ${message}`);
        await new Promise((resolve) => setTimeout(resolve, pause));
      }
    }
  }

  /** Largest payload the server takes. */
  get maxPayload(): number {
    return this.#connection.info?.max_payload ?? 1 << 20;
  }
  get connected(): boolean {
    return this.#connected;
  }

  /** Resolves when the server knows. @returns how to stop. @throws PlaneError when the server refuses, or does not answer */
  async subscribe(subject: string, queue: string | undefined, deliver: (message: Msg) => void): Promise<() => Promise<void>> {
    const listener: Listener = { subject, queue, deliver, subscription: null };
    const refused = Promise.withResolvers<never>();
    refused.promise.catch(() => {});
    this.#attach(listener, refused.reject);
    try {
      await Promise.race([this.#flush(), refused.promise]);
    } catch (error) {
      listener.subscription?.unsubscribe();
      throw new PlaneError(`NATS_SERVER: cannot subscribe to ${subject}: ${(error as Error).message}`);
    }
    this.#listeners.add(listener);
    return async () => {
      this.#listeners.delete(listener);
      listener.subscription?.unsubscribe();
      if (this.#connected) await this.#flush().catch(() => {});
    };
  }

  /** Never waits. @returns false when it was dropped: no server, one that does not read, or too large for it */
  publish(subject: string, payload: Uint8Array): boolean {
    if (!this.#connected || this.#unconfirmed > MAX_UNCONFIRMED || payload.length > this.maxPayload) return false;
    try {
      this.#connection.publish(subject, payload);
    } catch (error) {
      log.debug("not published", { subject, error });
      return false;
    }
    this.#unconfirmed += payload.length;
    this.#confirm();
    return true;
  }

  /** Unsubscribes, sends what is left, and closes; bounded. */
  async close(): Promise<void> {
    if (this.#closed) return;
    this.#closed = true;
    this.#listeners.clear();
    const drained = this.#connected ? this.#connection.drain().catch(() => {}) : Promise.resolve();
    await within(drained, DRAIN_MS);
    await this.#connection.close().catch(() => {});
  }

  #connectOptions(again: boolean): ConnectionOptions {
    const { server, authenticator, tls } = this.options;
    return {
      servers: server, name: "layerscale", authenticator, timeout: CONNECT_MS, pingInterval: PING_MS, maxPingOut: 2, noAsyncTraces: true,
      reconnect: true, maxReconnectAttempts: -1, ignoreAuthErrorAbort: true, waitOnFirstConnect: again, reconnectDelayHandler: () => this.#pause(),
      ...(tls && { tls: tls as ConnectionOptions["tls"] }),
    };
  }

  /** The client asks many times; the answer depends on the time alone, so that attempts spread like a doubling pause. */
  #pause(): number {
    const gone = performance.now() - this.#lostAt;
    return Math.round(Math.min(RETRY_MS[1], Math.max(RETRY_MS[0], gone / 2)) * (0.75 + Math.random() / 2));
  }

  #adopt(connection: NatsConnection): void {
    this.#connection = connection;
    this.#connected = true;
    this.#unconfirmed = 0;
    void this.#watch(connection);
    void connection.closed().then((error) => {
      if (this.#closed || this.#connection !== connection) return;
      this.#lost(error);
      log.error("nats-server ended the connection, a new one is made", { server: this.options.server, error: error ?? undefined });
      void this.#replace();
    });
  }

  /** The client gives a connection up for some errors; this process does not. */
  async #replace(): Promise<void> {
    while (!this.#closed) {
      try {
        const connection = await connect(this.#connectOptions(true));
        if (this.#closed) return void connection.close();
        this.#adopt(connection);
        for (const listener of this.#listeners) this.#attach(listener, () => {});
        this.onReturn();
        return;
      } catch (error) {
        log.warn("no connection to nats-server", { server: this.options.server, error });
        await new Promise((resolve) => setTimeout(resolve, RETRY_MS[1]));
      }
    }
  }

  async #watch(connection: NatsConnection): Promise<void> {
    for await (const status of connection.status()) {
      if (status.type === "disconnect") this.#lost(null);
      else if (status.type === "reconnect") {
        this.#connected = true;
        this.#unconfirmed = 0;
        log.info("nats-server is back", { server: this.options.server, seconds: Math.round((performance.now() - this.#lostAt) / 1000) });
        this.onReturn();
      } else if (status.type === "error") log.warn("nats-server reports an error", { server: this.options.server, error: status.error });
    }
  }

  #lost(error: unknown): void {
    if (!this.#connected || this.#closed) return;
    this.#connected = false;
    this.#lostAt = performance.now();
    log.warn("nats-server is gone, trying again for ever", { server: this.options.server, ...(error ? { error } : {}) });
  }

  #attach(listener: Listener, refused: (error: Error) => void): void {
    const { subject, queue, deliver } = listener;
    const subscription = this.#connection.subscribe(subject, {
      ...(queue === undefined ? {} : { queue }),
      callback: (error, message) => {
        if (error) {
          refused(error);
          log.error("subscription failed", { subject, error });
          // Permissions may come back with another configuration of the server.
          setTimeout(() => this.#listeners.has(listener) && listener.subscription === subscription && !this.#closed && this.#attach(listener, () => {}), RETRY_MS[1]);
        } else deliver(message);
      },
    });
    listener.subscription = subscription;
  }

  async #flush(): Promise<void> {
    let timer: ReturnType<typeof setTimeout> | undefined;
    const late = new Promise<never>((_resolve, reject) => (timer = setTimeout(() => reject(new Error(`no answer within ${CONNECT_MS / 1000} s`)), CONNECT_MS)));
    await Promise.race([this.#connection.flush(), late]).finally(() => clearTimeout(timer));
  }

  /** The server's answer to a ping tells that all before it has arrived. */
  #confirm(): void {
    if (this.#confirming) return;
    this.#confirming = true;
    const connection = this.#connection;
    const before = this.#unconfirmed;
    connection.flush().then(
      () => {
        this.#confirming = false;
        if (connection !== this.#connection) return;
        this.#unconfirmed = Math.max(0, this.#unconfirmed - before);
        if (this.#unconfirmed > 0) this.#confirm();
      },
      () => (this.#confirming = false),
    );
  }
}
