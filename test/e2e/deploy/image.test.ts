/** The assembled image: what is in it, and its entrypoint under everything that an engine may do to a container. */
import { beforeAll, describe, expect, test } from "bun:test";
import { existsSync, lstatSync, mkdtempSync, readdirSync, readFileSync, readlinkSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { basename, dirname, join } from "node:path";
import { Container, containers, type ContainerOptions, Network, ROOTFS } from "../../support/container.ts";
import { eventually, Launched, program, required } from "../../support/launch.ts";
import { smolVariant } from "../../support/smol-variants.ts";

const LIMIT_MS = 120_000;
const licensed = () => ({ LAYERSCALE_LICENSE_KEY: required("LAYERSCALE_LICENSE_KEY") });

describe.skipIf(!existsSync(ROOTFS))("the image's files", () => {
  const mode = (path: string) => (lstatSync(join(ROOTFS, path)).mode & 0o7777).toString(8);
  const all = (folder = ""): string[] => readdirSync(join(ROOTFS, folder), { withFileTypes: true }).flatMap((entry) => (entry.isDirectory() ? all(`${folder}/${entry.name}`) : [`${folder}/${entry.name}`]));

  test("are the executable, its libraries, certificates and accounts: no shell, no interpreter", () => {
    expect(all().sort()).toEqual([
      "/app/layerscale-loader", ...readdirSync(join(ROOTFS, "app")).filter((name) => name.endsWith(".so")).map((name) => `/app/${name}`),
      "/etc/group", "/etc/nsswitch.conf", "/etc/passwd", "/etc/ssl/certs/ca-certificates.crt", "/lib", "/lib64",
      ...["ld-linux-x86-64.so.2"].map((name) => `/usr/lib64/${name}`), ...["libc.so.6", "libdl.so.2", "libm.so.6", "libpthread.so.0", "librt.so.1"].map((name) => `/usr/lib/x86_64-linux-gnu/${name}`),
    ].sort());
    expect([readlinkSync(join(ROOTFS, "lib")), readlinkSync(join(ROOTFS, "lib64"))]).toEqual(["usr/lib", "usr/lib64"]);
    expect(existsSync(join(ROOTFS, "app/liblayerscale_cpu.so"))).toBe(true);
  });
  test("have the right modes, and nothing is writable for all but /tmp", () => {
    expect([mode("app/layerscale-loader"), mode("tmp"), mode("root"), mode("etc/passwd")]).toEqual(["755", "1777", "700", "644"]);
    const open = ["/", ...all()].filter((path) => !lstatSync(join(ROOTFS, path)).isSymbolicLink() && (lstatSync(join(ROOTFS, path)).mode & 0o002) !== 0);
    expect(open).toEqual([]);
  });
  test("the loader is the executable of the build, byte for byte, and the list of files says so", () => {
    const hash = (path: string) => new Bun.CryptoHasher("sha256").update(readFileSync(path)).digest("hex");
    const built = hash(required("LAYERSCALE_TEST_EXECUTABLE"));
    expect(hash(join(ROOTFS, "app/layerscale-loader"))).toBe(built);
    const listed = readFileSync(`${ROOTFS}.files`, "utf8").trim().split("\n").map((line) => line.split("  "));
    expect(listed.map(([sha256, , , , path]) => [path, sha256])).toEqual(listed.map(([, , , , path]) => [path!, hash(join(ROOTFS, path!))]));
  });
});

describe.skipIf(!containers || !existsSync(ROOTFS))("the image's entrypoint", () => {
  /** Answer of a container that ends by itself. */
  async function ended(args: readonly string[], options: ContainerOptions = {}): Promise<[number, string, string]> {
    await using container = Container.run(args, options);
    return [await container.process.exit(LIMIT_MS), container.process.stdout, container.process.stderr];
  }
  let model = "";
  beforeAll(async () => {
    model = await smolVariant("hf-bf16");
  }, 2 * LIMIT_MS);

  /** Without log lines, which bear the time. */
  const words = (text: string) => text.split("\n").filter((line) => !line.startsWith("{")).join("\n");
  test("behaves as layerscale: with `dynamo` first it is the worker, with anything else the server", async () => {
    for (const args of [["--version"], ["--help"], ["serve", "--help"], ["dynamo", "--help"], ["dynamo"], [], ["--modle", "x"], ["dynamo", "--port", "1"], ["worker"], ["--model", "dynamo"], ["--model", "/nowhere"], ["--help", "dynamo"]]) {
      const env = { ...licensed(), LAYERSCALE_PORT: "0", DYN_DISCOVERY_BACKEND: "mem", HF_HUB_OFFLINE: "1" };
      await using outside = Launched.command([...program(), ...args], { env: { ...env, LAYERSCALE_HOST: "0.0.0.0" }, cwd: "/" });
      const expected = [await outside.exit(LIMIT_MS), outside.stdout, words(outside.stderr)];
      const [code, stdout, stderr] = await ended(args, { env });
      expect([args, code, stdout, words(stderr)]).toEqual([args, ...expected]);
    }
    expect((await ended(["dynamo", "--help"], { env: licensed() }))[1]).toMatch(/Engine options[\s\S]*Worker options/);
  }, 2 * LIMIT_MS);

  test("asks for the licence before anything else, help included", async () => {
    for (const args of [["dynamo", "--help"], ["--help"], ["dynamo", "--nonsense"], [], ["dynamo", "--model", "/models/x"]]) {
      const [code, stdout, stderr] = await ended(args);
      expect([args, code, stdout, stderr.startsWith("license: no key given")]).toEqual([args, 78, "", true]);
    }
    const [code, , stderr] = await ended(["dynamo", "--help"], { env: { LAYERSCALE_LICENSE_KEY: "LSK-x.y" } });
    expect([code, stderr.startsWith("license: ")]).toEqual([78, true]);
  }, LIMIT_MS);

  const surroundings: [string, ContainerOptions][] = [
    ["as it comes", {}],
    ["as another user, without capabilities", { user: 10001 }],
    ["as a user whom nobody knows", { user: 4711 }],
    ["with a read-only root and no /tmp", { readOnly: true, tmp: "missing" }],
    ["with a read-only root, a noexec /tmp and another user", { readOnly: true, tmp: "noexec", user: 10001 }],
  ];
  for (const [name, options] of surroundings)
    test(`serves ${name}; a published port reaches it`, async () => {
      await using network = await Network.start();
      await using container = Container.run(["--model", "/models/smol", "--max-total-tokens", "2048"], { ...options, network: network.pid, env: licensed(), volumes: { [model]: "/models/smol:ro" } });
      const status = readFileSync(`/proc/${await container.pid()}/status`, "utf8");
      expect(/^NSpid:\s+\d+\s+1$/m.test(status)).toBe(true);
      expect(/^Uid:\s+(\d+)/m.exec(status)![1]).toBe(String(options.user ?? 0));
      if (options.user) expect(/^Cap(?:Prm|Eff):\s+(\w+)$/m.exec(status)![1]).toMatch(/^0+$/);
      await container.process.log("ready", LIMIT_MS);
      const answer = await network.curl(`http://${Network.address}:8080/v1/completions`, "-H", "Content-Type: application/json", "-d", JSON.stringify({ prompt: "a", max_tokens: 3, temperature: 0 }));
      expect(answer.status).toBe(200);
      // The copy inside the executable was not needed: the library lies beside it.
      const maps = readFileSync(`/proc/${await container.pid()}/maps`, "utf8");
      expect(maps).toContain("/app/liblayerscale_cpu.so");
      await container.signal("SIGTERM");
      expect(await container.process.exit(LIMIT_MS)).toBe(0);
    }, 2 * LIMIT_MS);

  /** The signal at each step that can be seen from outside; every time the container must end by itself. */
  const worker = ["dynamo", "--model", "/models/smol", "--max-total-tokens", "2048"];
  const server = ["--model", "/models/smol", "--max-total-tokens", "2048"];
  const catches = (pid: number) => (BigInt(`0x${/^SigCgt:\s+(\w+)$/m.exec(readFileSync(`/proc/${pid}/status`, "utf8"))![1]}`) >> 14n) & 1n;
  const mapped = (pid: number, text: string) => readFileSync(`/proc/${pid}/maps`, "utf8").includes(text);
  type Stage = [string, (container: Container) => Promise<unknown>];
  const caught: Stage = ["as soon as it is caught", async (container) => {
    const pid = await container.pid();
    await eventually(() => catches(pid) === 1n, "SIGTERM is caught", LIMIT_MS);
  }];
  const library: Stage = ["when the native library is loaded", async (container) => {
    const pid = await container.pid();
    await eventually(() => mapped(pid, "liblayerscale_cpu.so"), "the library is loaded", LIMIT_MS);
  }];
  const weights: Stage = ["when the weights are mapped", async (container) => {
    const pid = await container.pid();
    await eventually(() => mapped(pid, "model.safetensors"), "the weights are mapped", LIMIT_MS);
  }];
  const logged = (message: string): Stage => [`at "${message}"`, (container) => container.process.log(message, LIMIT_MS)];
  for (const [command, args, stages] of [
    ["dynamo", worker, [caught, logged("system server listens"), logged("worker starts"), library, weights, logged("worker ready")]],
    ["serve", server, [caught, logged("listening"), library, weights, logged("ready")]],
  ] as const)
    for (const [stage, reached] of stages)
      test(`process 1 heeds SIGTERM: ${command}, ${stage}`, async () => {
        const kv = mkdtempSync(join(tmpdir(), "layerscale-image-"));
        try {
          await using container = Container.run(args, {
            env: { ...licensed(), DYN_DISCOVERY_BACKEND: "file", DYN_FILE_KV: "/kv", DYN_SYSTEM_PORT: "9090", DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS: "0" },
            volumes: { [kv]: "/kv", [model]: "/models/smol:ro" },
          });
          await reached(container);
          await container.signal("SIGTERM");
          expect([await container.process.exit(LIMIT_MS), container.process.stderr.includes("panic")]).toEqual([0, false]);
          for (const bucket of ["instances", "mdc"]) expect(existsSync(join(kv, "v1", bucket)) ? readdirSync(join(kv, "v1", bucket)) : []).toEqual([]);
        } finally {
          rmSync(kv, { recursive: true, force: true });
        }
      }, 2 * LIMIT_MS);

  test("what a GGUF's card needs is written to a cache; where nothing can be written, one line says so", async () => {
    const env = { ...licensed(), DYN_DISCOVERY_BACKEND: "mem", DYN_SYSTEM_PORT: "9090" };
    const gguf = required("LAYERSCALE_TEST_GGUF");
    const args = ["dynamo", "--model", `/models/${basename(gguf)}`, "--max-total-tokens", "2048"];
    const volumes = { [dirname(gguf)]: "/models:ro" };
    const [code, , stderr] = await ended(args, { readOnly: true, tmp: "missing", env, volumes });
    expect([code, stderr.trim().split("\n").at(-1)]).toEqual([1, expect.stringMatching(/^error: .*the cache directory cannot be written .*read-only file system/)]);
    await using container = Container.run(args, { readOnly: true, tmp: "noexec", env, volumes });
    await container.process.log("worker ready", LIMIT_MS);
  }, 2 * LIMIT_MS);
});
