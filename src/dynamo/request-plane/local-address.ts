import { networkInterfaces } from "node:os";

const WILDCARDS = ["0.0.0.0", "::", "0:0:0:0:0:0:0:0"];

/** A given address as one that others can reach: without brackets, and for "all addresses", which says nothing to another host, this host's own. */
export function reachableAddress(given: string, own: () => string = localAddress): string {
  const bare = given.replace(/^\[(.*)\]$/, "$1");
  return WILDCARDS.includes(bare) ? own() : bare;
}

/** Whether connections can be made to it at all: 224.0.0.0/4, 255.255.255.255 and ff00::/8 name groups. */
export function isGroupAddress(address: string): boolean {
  return /^(22[4-9]|23\d)\./.test(address) || address === "255.255.255.255" || /^ff[0-9a-f]{2}:/i.test(address);
}

/** The address to advertise when none is given: first routable IPv4, then IPv6, then loopback. */
export function localAddress(interfaces = networkInterfaces()): string {
  const all = Object.values(interfaces).flatMap((list) => list ?? []).filter((item) => !item.internal);
  const v4 = all.find((item) => item.family === "IPv4" && !item.address.startsWith("169.254."));
  const v6 = all.find((item) => item.family === "IPv6" && !item.address.toLowerCase().startsWith("fe80:"));
  return v4?.address ?? v6?.address ?? "127.0.0.1";
}
