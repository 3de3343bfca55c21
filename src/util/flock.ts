import { dlopen, read } from "bun:ffi";
import { closeSync, constants, fstatSync, openSync, statSync } from "node:fs";

const LOCK_EX = 2;
const LOCK_NB = 4;
const LOCK_UN = 8;
const EAGAIN = 11;
/** Between looks at a lock that another process holds. */
const POLL_MS = 50;

const load = () => dlopen("libc.so.6", { flock: { args: ["i32", "i32"], returns: "i32" }, __errno_location: { args: [], returns: "ptr" } }).symbols;
let libc: ReturnType<typeof load> | null = null;

/** "taken" by another descriptor; "unsupported": the file system, or this machine, has no such locks. */
function tryLock(fd: number): "held" | "taken" | "unsupported" {
  try {
    libc ??= load();
    if (libc.flock(fd, LOCK_EX | LOCK_NB) === 0) return "held";
    const errno = libc.__errno_location();
    return errno !== null && read.i32(errno, 0) === EAGAIN ? "taken" : "unsupported";
  } catch {
    return "unsupported";
  }
}

/** The file may have been replaced between open and lock: then others lock the new one. */
function isStill(fd: number, path: string): boolean {
  try {
    return fstatSync(fd).ino === statSync(path).ino;
  } catch {
    return false;
  }
}

/**
 * An advisory lock between processes: flock(2) on a file that stays. Ends with the process, however that ends. Where there are no such locks it is no
 * lock, so whoever uses it must be correct without.
 */
export class FileLock {
  private constructor(private readonly fd: number) {}

  /**
   * Waits until the lock is free.
   * @param onWait called once when another process holds it
   * @throws Error of the file system; the signal's reason when it is raised
   */
  static async acquire(path: string, signal: AbortSignal, onWait: () => void = () => {}): Promise<FileLock> {
    for (let told = false; ; ) {
      signal.throwIfAborted();
      const fd = openSync(path, constants.O_RDWR | constants.O_CREAT, 0o664);
      const state = tryLock(fd);
      if (state === "unsupported" || (state === "held" && isStill(fd, path))) return new FileLock(fd);
      closeSync(fd);
      if (state === "held") continue;
      if (!told) onWait();
      told = true;
      await Bun.sleep(POLL_MS);
    }
  }

  release(): void {
    libc?.flock(this.fd, LOCK_UN);
    closeSync(this.fd);
  }
}
