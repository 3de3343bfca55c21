/** A model name as part of a path: lower case, one "_" per foreign character, none in front. "Qwen/Qwen3-8B" -> "qwen_qwen3-8b". */
export function slug(name: string): string {
  return Array.from(name.toLowerCase(), (char) => (/^[a-z0-9_-]$/.test(char) ? char : "_")).join("").replace(/^_+/, "");
}
