/**
 * First key that occurs twice in one object, at nesting depth 1 or 2, of a text that JSON.parse has accepted; null when there is none.
 * JSON.parse keeps the last of equal keys silently, so two tensors of one name would hide each other.
 */
export function duplicateKey(text: string): string | null {
  /** Keys of the open object at depth 1 and 2; arrays hold null. */
  const seen: (Set<string> | null)[] = [];
  let depth = 0;
  let expectKey = false;
  for (let i = 0; i < text.length; i++) {
    switch (text.charCodeAt(i)) {
      case 0x7b /* { */:
        depth++;
        if (depth <= 2) seen[depth] = new Set();
        expectKey = true;
        break;
      case 0x5b /* [ */:
        depth++;
        if (depth <= 2) seen[depth] = null;
        expectKey = false;
        break;
      case 0x7d /* } */:
      case 0x5d /* ] */:
        depth--;
        expectKey = false;
        break;
      case 0x2c /* , */:
        expectKey = depth <= 2 && seen[depth] != null;
        break;
      case 0x22 /* " */: {
        const start = i++;
        while (text.charCodeAt(i) !== 0x22) i += text.charCodeAt(i) === 0x5c /* \ */ ? 2 : 1;
        const keys = depth <= 2 ? seen[depth] : null;
        if (expectKey && keys) {
          const raw = text.slice(start, i + 1);
          const key = raw.includes("\\") ? (JSON.parse(raw) as string) : raw.slice(1, -1);
          if (keys.has(key)) return key;
          keys.add(key);
        }
        expectKey = false;
        break;
      }
    }
  }
  return null;
}
