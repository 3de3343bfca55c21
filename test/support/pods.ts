/** Pods of one node: each with a network namespace and an address of its own, joined by a bridge, and the API server on its loopback. */
import { rmSync } from "node:fs";
import { connect, createServer, type Server } from "node:net";
import { join } from "node:path";
import { eventually, Launched } from "./launch.ts";

/** Runs inside a pod's namespace: what arrives at the API server's port goes through a socket file to the one outside. */
const FORWARD = `const { createServer, connect } = require("node:net");
createServer((client) => { const out = connect(process.env.SOCKET); client.pipe(out).pipe(client); for (const end of [client, out]) end.on("error", () => { client.destroy(); out.destroy(); }); })
  .listen(Number(process.env.PORT), "127.0.0.1", () => console.log("forwards"));`;

/** A namespace that lives as long as its holder. */
async function holder(setup: string): Promise<Launched> {
  const process = Launched.command(["unshare", "--net", "sh", "-c", `${setup} && echo up && exec sleep 3600`]);
  await eventually(() => {
    if (!process.running) throw new Error(`no network: ${process.stderr}`);
    return process.stdout.includes("up");
  }, "the network is up");
  return process;
}

export class PodNetwork {
  constructor(
    private readonly space: Launched,
    private readonly forward: Launched,
    readonly address: string,
  ) {}
  get pid(): number {
    return this.space.pid;
  }
  inside(command: readonly string[]): string[] {
    return ["nsenter", "--net", `--target=${this.pid}`, ...command];
  }
  /** A request from inside the pod. */
  async curl(...args: string[]): Promise<{ status: number; text: string }> {
    const child = Bun.spawn(this.inside(["curl", "-sS", "--max-time", "60", "-w", "\n%{http_code}", ...args]), { stdout: "pipe", stderr: "ignore" });
    const out = await new Response(child.stdout).text();
    await child.exited;
    const end = out.lastIndexOf("\n");
    return { status: Number(out.slice(end + 1)), text: out.slice(0, end) };
  }
  async close(): Promise<void> {
    for (const process of [this.forward, this.space]) {
      process.signal("SIGKILL");
      await process.exit();
    }
  }
}

export class Node implements AsyncDisposable {
  readonly #pods: PodNetwork[] = [];
  private constructor(
    private readonly bridge: Launched,
    private readonly relay: Server,
    private readonly socket: string,
    private readonly apiPort: number,
  ) {}

  /** @param folder where the socket file goes */
  static async start(folder: string, apiPort: number): Promise<Node> {
    const socket = join(folder, "api.socket");
    const relay = createServer((client) => {
      const out = connect(apiPort, "127.0.0.1");
      client.pipe(out).pipe(client);
      for (const end of [client, out])
        end.on("error", () => {
          client.destroy();
          out.destroy();
        });
    });
    await new Promise<void>((resolve) => relay.listen(socket, resolve));
    return new Node(await holder("ip link add br0 type bridge && ip link set br0 up"), relay, socket, apiPort);
  }

  async pod(): Promise<PodNetwork> {
    const number = this.#pods.length + 10;
    const address = `10.214.0.${number}`;
    // The pair's other end appears in the bridge's namespace.
    const space = await holder(
      `ip link set lo up && ip link add eth0 type veth peer name veth${number} netns ${this.bridge.pid} && ip addr add ${address}/24 dev eth0 && ip link set eth0 up && ip route add default dev eth0`,
    );
    const joined = Bun.spawnSync(["nsenter", "--net", `--target=${this.bridge.pid}`, "sh", "-c", `ip link set veth${number} master br0 && ip link set veth${number} up`]);
    if (joined.exitCode !== 0) throw new Error(joined.stderr.toString());
    const forward = Launched.command(["nsenter", "--net", `--target=${space.pid}`, process.execPath, "-e", FORWARD], { env: { SOCKET: this.socket, PORT: String(this.apiPort) } });
    await eventually(() => {
      if (!forward.running) throw new Error(`no way to the API server: ${forward.stderr}`);
      return forward.stdout.includes("forwards");
    }, "the API server is forwarded");
    const pod = new PodNetwork(space, forward, address);
    this.#pods.push(pod);
    return pod;
  }

  async [Symbol.asyncDispose](): Promise<void> {
    for (const pod of this.#pods) await pod.close();
    this.bridge.signal("SIGKILL");
    await this.bridge.exit();
    this.relay.close();
    rmSync(this.socket, { force: true });
  }
}
