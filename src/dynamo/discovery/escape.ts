/** Percent-encodes every UTF-8 byte that `keep` does not match. */
function escapeBytes(text: string, keep: RegExp): string {
  let out = "";
  for (const byte of Buffer.from(text)) {
    const char = String.fromCharCode(byte);
    out += byte < 0x80 && keep.test(char) ? char : `%${byte.toString(16).toUpperCase().padStart(2, "0")}`;
  }
  return out;
}

/** A whole key as a file name: "dynamo/backend" -> "dynamo%2Fbackend". */
export const escapeFileName = (key: string): string => escapeBytes(key, /[A-Za-z0-9]/);

/** One segment of an event path; "-" and "_" stay. */
export const escapeSegment = (segment: string): string => escapeBytes(segment, /[A-Za-z0-9_-]/);

/** Undoes either; null when it is not valid. */
export function unescapeKey(name: string): string | null {
  try {
    return decodeURIComponent(name);
  } catch {
    return null;
  }
}
