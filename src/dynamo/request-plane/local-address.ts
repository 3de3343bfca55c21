import { networkInterfaces } from "node:os";

/** The address to advertise when none is given: first routable IPv4, then IPv6, then loopback. */
export function localAddress(interfaces = networkInterfaces()): string {
  const all = Object.values(interfaces).flatMap((list) => list ?? []).filter((item) => !item.internal);
  const v4 = all.find((item) => item.family === "IPv4" && !item.address.startsWith("169.254."));
  const v6 = all.find((item) => item.family === "IPv6" && !item.address.toLowerCase().startsWith("fe80:"));
  return v4?.address ?? v6?.address ?? "127.0.0.1";
}
