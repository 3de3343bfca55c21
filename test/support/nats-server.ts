/** A real nats-server of a test's own, on loopback, that can be killed and started again at the same address. */
import { mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { connect, createServer } from "node:net";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { eventually, Launched, required } from "./launch.ts";
import { freePort } from "./free-port.ts";

export const hasNats = Boolean(process.env.LAYERSCALE_TEST_NATS);

const listens = (port: number) =>
  new Promise<boolean>((resolve) => {
    const socket = connect(port, "127.0.0.1");
    // The first bytes of a server that serves are its INFO.
    socket.on("data", () => (socket.destroy(), resolve(true)));
    socket.on("error", () => resolve(false));
    socket.on("close", () => resolve(false));
  });

export class NatsServer implements AsyncDisposable {
  #process: Launched | null = null;
  readonly #home = mkdtempSync(join(tmpdir(), "layerscale-nats-"));

  private constructor(
    readonly port: number,
    public config: string,
  ) {}

  /** @param config lines of its configuration file, besides the address */
  static async start(config = ""): Promise<NatsServer> {
    const self = new NatsServer(await freePort(), config);
    await self.up();
    return self;
  }

  get url(): string {
    return `nats://127.0.0.1:${this.port}`;
  }
  get pid(): number {
    return this.#process!.pid;
  }
  get output(): string {
    return this.#process?.stderr ?? "";
  }

  async up(): Promise<void> {
    const file = join(this.#home, "nats.conf");
    writeFileSync(file, `listen: "127.0.0.1:${this.port}"\n${this.config}\n`);
    const process = (this.#process = Launched.command([required("LAYERSCALE_TEST_NATS"), "-c", file]));
    await eventually(() => {
      if (!process.running) throw new Error(`nats-server ended: ${process.stderr.slice(-1000)}`);
      return listens(this.port);
    }, "nats-server listens");
  }

  async kill(): Promise<void> {
    this.#process!.signal("SIGKILL");
    await this.#process!.exit();
  }
  signal(name: NodeJS.Signals): void {
    this.#process!.signal(name);
  }

  async [Symbol.asyncDispose](): Promise<void> {
    this.signal("SIGCONT");
    await this.kill();
    rmSync(this.#home, { recursive: true, force: true });
  }
}
