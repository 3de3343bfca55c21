/** Starts the program as users do, as a process of its own, and ends it by its pid. */
import { join } from "node:path";

export interface LaunchOptions {
  /** Variables besides PATH, HOME and the temporary directory; nothing else of this process is inherited. */
  env?: Record<string, string>;
  cwd?: string;
}

export type LogLine = Record<string, unknown> & { message: string };

/** The program under test: the built executable, or the sources when no build is named. */
export function program(): string[] {
  const executable = process.env.LAYERSCALE_TEST_EXECUTABLE;
  return executable ? [executable] : [process.execPath, join(import.meta.dir, "../../src/main.ts")];
}

/** A variable that the test runner sets. */
export function required(name: string): string {
  const value = process.env[name];
  if (!value) throw new Error(`${name} is not set; run the tests with npm test`);
  return value;
}

const INHERITED = ["PATH", "HOME", "TMPDIR", "LAYERSCALE_NATIVE_LIB", "LAYERSCALE_CPU_ISA"];

export function baseEnvironment(): Record<string, string> {
  return Object.fromEntries(INHERITED.flatMap((name) => (process.env[name] === undefined ? [] : [[name, process.env[name] as string]])));
}

/** Polls a condition until it gives something truthy. @throws Error naming what never came */
export async function eventually<T>(condition: () => T | Promise<T>, what: string, ms = 30_000): Promise<NonNullable<T>> {
  const deadline = performance.now() + ms;
  for (;;) {
    const value = await condition();
    if (value) return value as NonNullable<T>;
    if (performance.now() > deadline) throw new Error(`${what}: not within ${ms} ms`);
    await Bun.sleep(10);
  }
}

export class Launched implements AsyncDisposable {
  stdout = "";
  stderr = "";
  private readonly done: Promise<unknown>;

  private constructor(private readonly child: Bun.Subprocess<"ignore", "pipe", "pipe">) {
    const take = async (stream: ReadableStream<Uint8Array>, add: (text: string) => void) => {
      const decoder = new TextDecoder();
      for await (const chunk of stream) add(decoder.decode(chunk, { stream: true }));
    };
    this.done = Promise.all([take(child.stdout, (text) => (this.stdout += text)), take(child.stderr, (text) => (this.stderr += text))]);
  }

  /** Runs any command. */
  static command(command: readonly string[], options: LaunchOptions = {}): Launched {
    const child = Bun.spawn([...command], {
      stdin: "ignore", stdout: "pipe", stderr: "pipe",
      env: { ...baseEnvironment(), ...options.env },
      ...(options.cwd !== undefined && { cwd: options.cwd }),
    });
    return new Launched(child);
  }

  get pid(): number {
    return this.child.pid;
  }

  get running(): boolean {
    return this.child.exitCode === null && this.child.signalCode === null;
  }

  /** Lines of stderr that are JSON objects. */
  get logs(): LogLine[] {
    return this.stderr.split("\n").flatMap((line) => {
      try {
        return line.startsWith("{") ? [JSON.parse(line) as LogLine] : [];
      } catch {
        return [];
      }
    });
  }

  /** The first log line with this message. @throws Error with the output when the process ends or the time is over */
  async log(message: string, ms = 60_000): Promise<LogLine> {
    try {
      return await eventually(
        () => {
          const line = this.logs.find((candidate) => candidate.message === message);
          if (!line && !this.running) throw new Error(`the process ended with ${this.child.exitCode ?? this.child.signalCode}`);
          return line;
        },
        `log line "${message}"`,
        ms,
      );
    } catch (error) {
      throw new Error(`${(error as Error).message}\nstdout: ${this.stdout.slice(-2000)}\nstderr: ${this.stderr.slice(-4000)}`);
    }
  }

  signal(name: NodeJS.Signals): void {
    if (this.running) process.kill(this.child.pid, name);
  }

  /** Exit code (128 + signal number when it was killed), with all output read. */
  async exit(ms = 40_000): Promise<number> {
    const late = Promise.withResolvers<null>();
    const timer = setTimeout(() => late.resolve(null), ms);
    const code = await Promise.race([this.child.exited, late.promise]);
    clearTimeout(timer);
    if (code === null) throw new Error(`still running after ${ms} ms\nstderr: ${this.stderr.slice(-4000)}`);
    await this.done;
    return code;
  }

  /** Ends the process however it can. */
  async [Symbol.asyncDispose](): Promise<void> {
    this.signal("SIGTERM");
    await this.exit(10_000).catch(async () => {
      this.signal("SIGKILL");
      await this.exit(10_000);
    });
  }
}

/** Runs the program with these arguments and the community licence key. */
export function launch(args: readonly string[], options: LaunchOptions = {}): Launched {
  return Launched.command([...program(), ...args], { ...options, env: { LAYERSCALE_LICENSE_KEY: required("LAYERSCALE_LICENSE_KEY"), ...options.env } });
}
