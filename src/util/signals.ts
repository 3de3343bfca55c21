/** Resolves with the first SIGTERM or SIGINT; `hurry` fires on the second. Call `dispose` when the program no longer waits. */
export interface StopSignal {
  requested: Promise<NodeJS.Signals>;
  /** Aborted by the first signal. */
  asked: AbortSignal;
  /** Aborted by the second signal: stop waiting for anything. */
  hurry: AbortSignal;
  readonly received: boolean;
  dispose(): void;
}

const STOPPING = ["SIGTERM", "SIGINT"] as const;

/** Signals that came before anybody waited for one, oldest first; null when they have their default action. */
let early: NodeJS.Signals[] | null = null;
const remember = (signal: NodeJS.Signals) => void early?.push(signal);

/** From here on a signal is kept for onStopSignal(): the kernel drops one that process 1 does not catch, and nobody sends it again. */
export function keepStopSignals(): void {
  early = [];
  for (const name of STOPPING) process.on(name, remember);
}

/** For commands that do not wait for a signal: the default action again, also for what has come already. */
export function releaseStopSignals(): void {
  const [signal] = takeEarly();
  if (signal !== undefined) process.kill(process.pid, signal);
}

function takeEarly(): NodeJS.Signals[] {
  for (const name of STOPPING) process.off(name, remember);
  const taken = early ?? [];
  early = null;
  return taken;
}

/** Install before anything slow: as PID 1 a process has no default action for SIGTERM. */
export function onStopSignal(): StopSignal {
  const hurry = new AbortController();
  const asked = new AbortController();
  const { promise, resolve } = Promise.withResolvers<NodeJS.Signals>();
  let received = false;
  const handler = (signal: NodeJS.Signals) => {
    if (received) hurry.abort();
    received = true;
    resolve(signal);
    // After those who wait for the signal: work that this ends must not look like a failure to them.
    setImmediate(() => asked.abort(new Error(`stopped by ${signal}`)));
  };
  for (const name of STOPPING) process.on(name, handler);
  for (const signal of takeEarly()) handler(signal);
  return {
    requested: promise,
    asked: asked.signal,
    hurry: hurry.signal,
    get received() {
      return received;
    },
    dispose: () => {
      for (const name of STOPPING) process.off(name, handler);
    },
  };
}
