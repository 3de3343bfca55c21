/**
 * The assembled image started as a container engine starts it: process 1 of its own PID namespace, its own mounts, the image's environment
 * and entrypoint. Namespaces and chroot stand for the engine; /proc, /dev and the mounts are what an engine brings.
 */
import { mkdtempSync, readdirSync, readFileSync, rmSync } from "node:fs";
import { join } from "node:path";
import { eventually, Launched } from "./launch.ts";

export const ROOTFS = process.env.LAYERSCALE_TEST_ROOTFS ?? join(import.meta.dir, "../../build/image/rootfs");
const folder = join(ROOTFS, "..");

/** Namespaces need root, here as in an engine's daemon. */
export const containers = process.getuid?.() === 0 && Bun.spawnSync(["unshare", "--mount", "--pid", "--net", "--fork", "true"], { stderr: "ignore" }).exitCode === 0;

const image = (): { ENV: Record<string, string>; ENTRYPOINT: string[] } => JSON.parse(readFileSync(`${ROOTFS}.json`, "utf8"));

export interface ContainerOptions {
  env?: Record<string, string>;
  /** Host path → path inside, read-only where it ends in `:ro`. */
  volumes?: Record<string, string>;
  /** `--user UID:GID`; root otherwise. No capabilities and no way to gain any, as a restricted pod. */
  user?: number;
  /** `--read-only` */
  readOnly?: boolean;
  /** What /tmp is: the image's own, a mount without the right to execute, or nothing at all. */
  tmp?: "own" | "noexec" | "missing";
  /** Process in whose network namespace it runs (`--network container:`); without it, one of its own with loopback only. */
  network?: number | "host";
  umask?: string;
  /** Another entrypoint (`command` of a pod). */
  entrypoint?: string[];
}

/** Mount points are made, what is not wanted goes, and the program replaces the shell: it is process 1. $R is the container's root. */
function script({ volumes = {}, user = 0, readOnly = false, tmp = "own", network, umask }: ContainerOptions): string {
  const lines = [
    "set -e",
    'mount --bind "$R" "$R"',
    'mount -t proc -o nosuid,nodev,noexec proc "$R/proc"',
    'mount -t tmpfs -o mode=755 tmpfs "$R/dev"',
    'for d in null zero random urandom; do touch "$R/dev/$d"; mount --bind "/dev/$d" "$R/dev/$d"; done',
    'mkdir "$R/dev/shm"; mount -t tmpfs -o mode=1777 tmpfs "$R/dev/shm"',
    "printf '127.0.0.1 localhost\\n' > \"$R/etc/hosts\"",
  ];
  for (const [from, target] of Object.entries(volumes)) {
    const [, to, ro] = /^(.*?)(:ro)?$/.exec(target)!;
    lines.push(`mkdir -p "$R${to}"`, `mount --bind '${from}' "$R${to}"`);
    if (ro) lines.push(`mount -o remount,bind,ro "$R${to}"`);
  }
  if (tmp === "noexec") lines.push('mount -t tmpfs -o noexec,nosuid,mode=1777 tmpfs "$R/tmp"');
  if (tmp === "missing") lines.push('rm -rf "$R/tmp"');
  if (readOnly) lines.push('mount -o remount,bind,ro "$R"');
  if (network === undefined) lines.push("ip link set lo up");
  if (umask !== undefined) lines.push(`umask ${umask}`);
  const restricted = user === 0 ? "" : "setpriv --no-new-privs --inh-caps=-all ";
  lines.push(`exec ${restricted}chroot ${user === 0 ? "" : `--userspec=${user}:${user} --groups=${user} `}"$R" "$@"`);
  return lines.join("\n");
}

export class Container implements AsyncDisposable {
  private constructor(
    readonly process: Launched,
    readonly root: string,
  ) {}

  static run(args: readonly string[], options: ContainerOptions = {}): Container {
    const home = options.user === undefined || options.user === 0 ? "/root" : "/home/layerscale";
    const { ENV, ENTRYPOINT } = image();
    // Linked, not copied: a container's own files come and go with it, the image's are never written.
    const made = mkdtempSync(join(folder, "container-"));
    const root = join(made, "root");
    const copied = Bun.spawnSync(["cp", "-al", ROOTFS, root]);
    if (copied.exitCode !== 0) throw new Error(copied.stderr.toString());
    const inside = ["env", "-i", `R=${root}`, "PATH=/usr/sbin:/usr/bin:/sbin:/bin", "sh", "-c", script(options), "sh"];
    const variables = Object.entries({ PATH: "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", HOME: home, HOSTNAME: "container", ...ENV, ...options.env });
    // `env` of the host is not in the image, so the shell's own variables are the program's.
    inside.splice(2, 0, ...variables.filter(([name]) => name !== "PATH").map(([name, value]) => `${name}=${value}`));
    const network = typeof options.network === "number" ? ["nsenter", "--net", `--target=${options.network}`] : [];
    const command = [...network, "unshare", "--mount", "--propagation=private", "--pid", "--fork", "--kill-child", ...(options.network === undefined ? ["--net"] : []), ...inside, ...(options.entrypoint ?? ENTRYPOINT), ...args];
    return new Container(Launched.command(command), made);
  }

  /** The program's pid outside: the only child of unshare, once it has replaced shell and chroot. */
  async pid(): Promise<number> {
    const parent = this.process.pid;
    return eventually(() => {
      if (!this.process.running) throw new Error(`the container ended: ${this.process.stderr.slice(-2000)}`);
      const children = readdirSync(`/proc/${parent}/task`).flatMap((task) => readFileSync(`/proc/${parent}/task/${task}/children`, "utf8").trim().split(" ").filter(Boolean).map(Number));
      // Its name is that of the entrypoint.
      return children.find((child) => {
        try {
          return readFileSync(`/proc/${child}/comm`, "utf8").trim() === "layerscale-load";
        } catch {
          return false;
        }
      });
    }, "the entrypoint runs");
  }

  async signal(name: NodeJS.Signals): Promise<void> {
    process.kill(await this.pid(), name);
  }

  async [Symbol.asyncDispose](): Promise<void> {
    // Without process 1 the kernel ends the whole namespace.
    if (this.process.running) await this.pid().then((pid) => process.kill(pid, "SIGKILL"), () => this.process.signal("SIGKILL"));
    await this.process.exit(10_000);
    rmSync(this.root, { recursive: true, force: true });
  }
}

/** A network of its own with an address beside loopback, which several containers and programs share. */
export class Network implements AsyncDisposable {
  private constructor(private readonly holder: Launched) {}
  static readonly address = "10.213.0.2";

  static async start(): Promise<Network> {
    const setup = `ip link set lo up && ip link add eth0 type veth peer name eth1 && ip addr add ${Network.address}/24 dev eth0 && ip link set eth0 up && ip link set eth1 up && ip route add default dev eth0 && echo up && exec sleep 3600`;
    const holder = Launched.command(["unshare", "--net", "sh", "-c", setup]);
    await eventually(() => {
      if (!holder.running) throw new Error(`no network: ${holder.stderr}`);
      return holder.stdout.includes("up");
    }, "the network is up");
    return new Network(holder);
  }
  get pid(): number {
    return this.holder.pid;
  }
  /** A command inside it. */
  inside(command: readonly string[]): string[] {
    return ["nsenter", "--net", `--target=${this.pid}`, ...command];
  }
  /** The answer to a request from inside it. */
  async curl(...args: string[]): Promise<{ status: number; text: string }> {
    const child = Bun.spawn(this.inside(["curl", "-sS", "--max-time", "120", "-w", "\n%{http_code}", ...args]), { stdout: "pipe", stderr: "pipe" });
    const out = await new Response(child.stdout).text();
    await child.exited;
    const end = out.lastIndexOf("\n");
    return { status: Number(out.slice(end + 1)), text: out.slice(0, end) };
  }
  async [Symbol.asyncDispose](): Promise<void> {
    this.holder.signal("SIGKILL");
    await this.holder.exit();
  }
}
