/** Variables that the executable reads itself, without a flag. For help and documentation; each is read where it is used. */
export const PROCESS_VARIABLES: readonly { name: string; shown: string; help: string }[] = [
  { name: "LAYERSCALE_CPU_ISA", shown: "the best available", help: "kernel variant: avx2 | avx512 | amx" },
  { name: "LAYERSCALE_NATIVE_LIB", shown: "the library inside the executable", help: "path of another native library" },
  { name: "LAYERSCALE_ALL_REDUCE", shown: "auto", help: "how GPUs of --tp add their parts: auto | peer (each other's memory) | nccl" },
  { name: "LAYERSCALE_NCCL_LIB", shown: "libnccl.so.2", help: "path of the NCCL library" },
  { name: "TMPDIR", shown: "/tmp", help: "where the embedded library is unpacked when it cannot be loaded in place" },
  { name: "XDG_CACHE_HOME", shown: "~/.cache", help: "below it, layerscale/ holds files for model cards that a model does not bring, and huggingface/ the hub's cache" },
  { name: "HTTPS_PROXY, HTTP_PROXY, NO_PROXY", shown: "none", help: "proxies to the hub and to the Kubernetes API server" },
  { name: "NODE_EXTRA_CA_CERTS", shown: "none", help: "PEM file of authorities to trust beside the built-in ones" },
];

export function processEnvironmentHelp(): string {
  const width = Math.max(...PROCESS_VARIABLES.map(({ name }) => name.length)) + 4;
  return PROCESS_VARIABLES.map(({ name, shown, help }) => `  ${name.padEnd(width - 2)}${help} [default ${shown}]`).join("\n");
}
