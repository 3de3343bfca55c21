/**
 * Whether a promise is done, well or not, within `ms` milliseconds and before `hurry` is aborted. It goes on either way; no timer and no
 * listener stays.
 */
export async function within(promise: Promise<unknown>, ms: number, hurry?: AbortSignal): Promise<boolean> {
  if (hurry?.aborted) return false;
  const late = Promise.withResolvers<false>();
  const giveUp = () => late.resolve(false);
  const timer = setTimeout(giveUp, ms);
  hurry?.addEventListener("abort", giveUp, { once: true });
  try {
    return await Promise.race([promise.then(() => true, () => true), late.promise]);
  } finally {
    clearTimeout(timer);
    hurry?.removeEventListener("abort", giveUp);
  }
}
