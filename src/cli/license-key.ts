/** The flag beats the variable; a flag without a value is a missing key. */
export function licenseKey(argv: readonly string[], env: Record<string, string | undefined>): { key: string | undefined; source: string } {
  const inline = argv.findLast((word) => word.startsWith("--license-key="));
  if (inline !== undefined) return { key: inline.slice("--license-key=".length), source: "--license-key" };
  const at = argv.lastIndexOf("--license-key");
  if (at >= 0) return { key: argv[at + 1]?.startsWith("--") ? undefined : argv[at + 1], source: "--license-key" };
  return { key: env.LAYERSCALE_LICENSE_KEY, source: "LAYERSCALE_LICENSE_KEY" };
}
