import { connect } from "node:net";

export interface RawAnswer {
  text: string;
  /** The server ended the connection. */
  closed: boolean;
}

/**
 * Writes bytes to a socket and collects what comes back until the server closes or `enough` is satisfied.
 * Write errors are no failure: a server may refuse before it has read everything.
 */
export function rawRequest(port: number, parts: Iterable<string | Uint8Array>, enough: (text: string) => boolean = () => false, ms = 15_000): Promise<RawAnswer> {
  return new Promise((resolve, reject) => {
    const socket = connect({ host: "127.0.0.1", port });
    const chunks: Buffer[] = [];
    const finish = (closed: boolean) => {
      clearTimeout(timer);
      socket.destroy();
      resolve({ text: Buffer.concat(chunks).toString("latin1"), closed });
    };
    const timer = setTimeout(() => {
      socket.destroy();
      reject(new Error(`no end of the answer within ${ms} ms: ${Buffer.concat(chunks).toString("latin1").slice(0, 300)}`));
    }, ms);
    socket.on("data", (data: Buffer) => {
      chunks.push(data);
      if (enough(Buffer.concat(chunks).toString("latin1"))) finish(false);
    });
    let resume = () => {};
    socket.on("drain", () => resume());
    socket.on("error", () => {});
    socket.on("close", () => {
      resume();
      finish(true);
    });
    socket.on("connect", async () => {
      for (const part of parts) {
        if (socket.destroyed) return;
        if (!socket.write(part)) await new Promise<void>((next) => (resume = next));
      }
    });
  });
}

export const post = (path: string, headers: string): string => `POST ${path} HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\n${headers}\r\n`;
