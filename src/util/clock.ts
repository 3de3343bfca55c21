/** Milliseconds of the system's monotonic clock. The same zero in every thread, unlike performance.now(). */
export function monotonicMs(): number {
  return Number(process.hrtime.bigint() / 1000n) / 1000;
}
