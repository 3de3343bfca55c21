import { logger } from "../../telemetry/log.ts";

const log = logger("layerscale::model::hub");
/** Between looks; a bar is drawn each time, a line is written every LINE_TICKS-th. */
const TICK_MS = 250;
const LINE_TICKS = 20;
/** The rate is that of the last seconds: it follows the line, and still holds an eye. */
const WINDOW_MS = 10_000;
const BAR = 24;

export interface ProgressOutput {
  /** Draws over itself on a terminal; null = log lines. */
  terminal: ((text: string) => void) | null;
  /** Milliseconds of a steady clock. */
  now: () => number;
}

/** "1.5 GB" */
export function bytesText(bytes: number): string {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  for (; bytes >= 999.5 && unit < units.length - 1; unit++) bytes /= 1000;
  return `${unit === 0 ? bytes : bytes.toFixed(bytes < 10 ? 2 : bytes < 100 ? 1 : 0)} ${units[unit]}`;
}

/** "1:02:03", "2:03" */
export function durationText(seconds: number): string {
  const whole = Math.round(seconds);
  const pad = (n: number) => String(n).padStart(2, "0");
  const [hours, minutes] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60];
  return hours > 0 ? `${hours}:${pad(minutes)}:${pad(whole % 60)}` : `${minutes}:${pad(whole % 60)}`;
}

/** How far a download is, how fast, and how long it will still take. */
export class Progress {
  private done = 0;
  /** Of those, what came over the network in this run: the rate is made of it alone. */
  private received = 0;
  private ticks = 0;
  private readonly samples: { at: number; received: number }[] = [];
  private timer: ReturnType<typeof setInterval> | null = null;

  constructor(
    private readonly repo: string,
    private readonly total: number,
    private readonly files: number,
    private readonly output: ProgressOutput,
  ) {}

  start(): void {
    this.samples.push({ at: this.output.now(), received: 0 });
    log.info("download starts", { repo: this.repo, files: this.files, bytesTotal: this.total });
    this.timer = setInterval(() => this.tick(), TICK_MS);
    this.timer.unref();
  }

  /** @param old the bytes were there before, or are given up: they tell nothing about the line */
  add(bytes: number, old = false): void {
    this.done += bytes;
    if (!old) this.received += bytes;
  }

  /** @param complete false when it ends before all is there */
  stop(complete: boolean): void {
    if (this.timer === null) return;
    clearInterval(this.timer);
    this.timer = null;
    this.output.terminal?.("\r\x1b[K");
    log.info(complete ? "download complete" : "download stopped", { repo: this.repo, bytes: this.done, bytesTotal: this.total, bytesReceived: this.received, seconds: Math.round(this.output.now() - this.samples[0]!.at) / 1000 });
  }

  /** What a line says now. secondsLeft null = nothing comes. */
  state(): { bytes: number; bytesTotal: number; bytesPerSecond: number; secondsLeft: number | null } {
    const now = this.output.now();
    const first = this.samples.find(({ at }) => now - at <= WINDOW_MS) ?? this.samples.at(-1) ?? { at: now, received: 0 };
    const rate = now > first.at ? ((this.received - first.received) * 1000) / (now - first.at) : 0;
    return { bytes: this.done, bytesTotal: this.total, bytesPerSecond: Math.round(rate), secondsLeft: rate > 0 ? Math.ceil((this.total - this.done) / rate) : null };
  }

  tick(): void {
    const state = this.state();
    const now = this.output.now();
    this.samples.push({ at: now, received: this.received });
    // The first sample stays: it is the start.
    while (this.samples.length > 2 && now - this.samples[1]!.at > WINDOW_MS) this.samples.splice(1, 1);
    if (this.output.terminal) this.output.terminal(`\r\x1b[K${this.bar(state)}`);
    else if (++this.ticks % LINE_TICKS === 0) log.info("downloading", { repo: this.repo, ...state });
  }

  private bar({ bytes, bytesTotal, bytesPerSecond, secondsLeft }: ReturnType<Progress["state"]>): string {
    const share = bytesTotal === 0 ? 1 : Math.min(bytes / bytesTotal, 1);
    const full = Math.floor(share * BAR);
    const left = secondsLeft === null ? "--:--" : durationText(secondsLeft);
    return `${this.repo} [${"#".repeat(full)}${"-".repeat(BAR - full)}] ${Math.floor(share * 100)}% ${bytesText(bytes)} of ${bytesText(bytesTotal)}, ${bytesText(bytesPerSecond)}/s, ${left} left`;
  }
}
