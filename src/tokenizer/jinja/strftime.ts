const DAYS = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];
const MONTHS = ["January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November", "December"];

const two = (n: number) => String(n).padStart(2, "0");

function dayOfYear(date: Date): number {
  return Math.round((Date.UTC(date.getFullYear(), date.getMonth(), date.getDate()) - Date.UTC(date.getFullYear(), 0, 1)) / 86_400_000) + 1;
}

/** datetime.strftime of a local time in the C locale, with glibc's `-` (no padding): the directives templates use. */
export function strftime(date: Date, format: string): string {
  const hour12 = date.getHours() % 12 || 12;
  const weekday = date.getDay();
  const directives: Record<string, () => string> = {
    a: () => DAYS[weekday]!.slice(0, 3),
    A: () => DAYS[weekday]!,
    w: () => String(weekday),
    u: () => String(weekday || 7),
    d: () => two(date.getDate()),
    e: () => String(date.getDate()).padStart(2, " "),
    b: () => MONTHS[date.getMonth()]!.slice(0, 3),
    h: () => MONTHS[date.getMonth()]!.slice(0, 3),
    B: () => MONTHS[date.getMonth()]!,
    m: () => two(date.getMonth() + 1),
    y: () => two(date.getFullYear() % 100),
    Y: () => String(date.getFullYear()),
    H: () => two(date.getHours()),
    I: () => two(hour12),
    p: () => (date.getHours() < 12 ? "AM" : "PM"),
    M: () => two(date.getMinutes()),
    S: () => two(date.getSeconds()),
    f: () => String(date.getMilliseconds()).padStart(3, "0") + "000",
    j: () => String(dayOfYear(date)).padStart(3, "0"),
    U: () => two(Math.floor((dayOfYear(date) + 6 - weekday) / 7)),
    W: () => two(Math.floor((dayOfYear(date) + 6 - ((weekday + 6) % 7)) / 7)),
    F: () => strftime(date, "%Y-%m-%d"),
    T: () => strftime(date, "%H:%M:%S"),
    R: () => strftime(date, "%H:%M"),
    D: () => strftime(date, "%m/%d/%y"),
    x: () => strftime(date, "%m/%d/%y"),
    X: () => strftime(date, "%H:%M:%S"),
    c: () => strftime(date, "%a %b %e %H:%M:%S %Y"),
    n: () => "\n",
    t: () => "\t",
    // Naive times have no zone.
    z: () => "",
    Z: () => "",
    "%": () => "%",
  };
  return format.replace(/%(-?)([a-zA-Z%])/g, (all, unpadded: string, name: string) => {
    const value = directives[name]?.();
    if (value === undefined) return all;
    return unpadded ? value.replace(/^[0 ]+(?=.)/, "") : value;
  });
}
