import { readFileSync } from "node:fs";
import { networkInterfaces } from "node:os";
import { localAddress } from "../request-plane/local-address.ts";

type Interfaces = ReturnType<typeof networkInterfaces>;

const readText = (path: string): string => {
  try {
    return readFileSync(path, "utf8");
  } catch {
    return "";
  }
};

/** The interface of the default IPv4 route with the lowest metric; null = there is none. Columns: name, destination, gateway, flags, …, metric. */
function ipv4Interface(table: string): string | null {
  const routes = table.split("\n").slice(1).map((line) => line.trim().split(/\s+/)).filter((columns) => columns.length > 7 && columns[1] === "00000000" && columns[7] === "00000000");
  return routes.toSorted((a, b) => Number(a[6]) - Number(b[6]))[0]?.[0] ?? null;
}

/** As above for IPv6. Columns: destination, its prefix length, source, its prefix length, gateway, metric (hex), …, name. */
function ipv6Interface(table: string): string | null {
  const routes = table.split("\n").map((line) => line.trim().split(/\s+/)).filter((columns) => columns.length > 9 && /^0{32}$/.test(columns[0]!) && columns[1] === "00" && columns[9] !== "lo");
  return routes.toSorted((a, b) => parseInt(a[5]!, 16) - parseInt(b[5]!, 16))[0]?.[9] ?? null;
}

/** The address by which hosts beyond the default route see this one: IPv4, else IPv6; without a default route the first routable address. */
export function defaultRouteAddress(read: (path: string) => string = readText, interfaces: Interfaces = networkInterfaces()): string {
  const v4 = ipv4Interface(read("/proc/net/route"));
  const found4 = v4 === null ? undefined : interfaces[v4]?.find((item) => item.family === "IPv4");
  if (found4 !== undefined) return found4.address;
  const v6 = ipv6Interface(read("/proc/net/ipv6_route"));
  const found6 = v6 === null ? undefined : interfaces[v6]?.find((item) => item.family === "IPv6" && !item.address.toLowerCase().startsWith("fe80:"));
  return found6?.address ?? localAddress(interfaces);
}
