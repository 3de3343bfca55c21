import { connect as connectTcp, createServer as createTcpServer, isIP, type Server, type Socket } from "node:net";
import { connect as connectTls, createServer as createTlsServer } from "node:tls";
import type { DynamoEnvironment } from "../../config/engine-config.ts";
import { UsageError } from "../../config/flags.ts";
import { logger } from "../../telemetry/log.ts";
import { pair, TlsFiles } from "./tls-files.ts";

const log = logger("layerscale::dynamo::request_plane");
const stale = (error: unknown) => log.warn("DYN_TCP_TLS_*: new files do not load, the old ones stay in use", { error });

/** How the listener proves who it is, and whom it serves. */
export interface ListenerTls {
  files: TlsFiles;
  /** Frontends must show a certificate that the ca file has signed. */
  mutual: boolean;
  handshakeMs: number;
}

/** How dialled answers check the frontend, and what they show it. */
export interface DialTls {
  files: TlsFiles;
  insecure: boolean;
  /** null = the address that is dialled. */
  serverName: string | null;
  handshakeMs: number;
}

/** DYN_TCP_TLS_* as Dynamo 1.5 reads them; the two directions are switched on separately. @throws UsageError naming the variable */
export function tcpTls(environment: DynamoEnvironment): { listener: ListenerTls | null; dial: DialTls | null } {
  const { tcpTlsCert, tcpTlsKey, tcpTlsClientCa, tcpTlsCa, tcpTlsInsecure: insecure, tcpTlsServerName: serverName, tcpTlsClientCert, tcpTlsClientKey } = environment;
  const handshakeMs = environment.tcpTlsHandshakeSeconds * 1000;
  const server = { cert: ["DYN_TCP_TLS_CERT_PATH", tcpTlsCert], key: ["DYN_TCP_TLS_KEY_PATH", tcpTlsKey], ca: ["DYN_TCP_TLS_CLIENT_CA_CERT_PATH", tcpTlsClientCa] } as const;
  const client = { cert: ["DYN_TCP_TLS_CLIENT_CERT_PATH", tcpTlsClientCert], key: ["DYN_TCP_TLS_CLIENT_KEY_PATH", tcpTlsClientKey], ca: ["DYN_TCP_TLS_CA_CERT_PATH", tcpTlsCa] } as const;
  pair(server.cert, server.key);
  pair(client.cert, client.key);
  if (tcpTlsClientCa !== null && tcpTlsCert === null) throw new UsageError("DYN_TCP_TLS_CLIENT_CA_CERT_PATH: needs DYN_TCP_TLS_CERT_PATH and DYN_TCP_TLS_KEY_PATH");
  if (tcpTlsClientCert !== null && tcpTlsCa === null && !insecure) throw new UsageError("DYN_TCP_TLS_CLIENT_CERT_PATH: needs DYN_TCP_TLS_CA_CERT_PATH or DYN_TCP_TLS_INSECURE");
  const listener = tcpTlsCert === null ? null : { files: new TlsFiles(server, stale), mutual: tcpTlsClientCa !== null, handshakeMs };
  const dial = tcpTlsCa === null && !insecure ? null : { files: new TlsFiles(client, stale), insecure, serverName, handshakeMs };
  if (listener !== null && dial === null) log.warn("requests travel over TLS and answers do not: DYN_TCP_TLS_CA_CERT_PATH is not set");
  if (listener === null && dial !== null && environment.requestPlane === "tcp") log.warn("answers travel over TLS and requests do not: DYN_TCP_TLS_CERT_PATH is not set");
  if (insecure) log.warn("DYN_TCP_TLS_INSECURE: the frontend's certificate is not verified");
  return { listener, dial };
}

/** A listener that gives `serve` each connection it trusts. The files are looked at again as connections come in. */
export function createListener(tls: ListenerTls | null, serve: (socket: Socket) => void): Server {
  if (tls === null) return createTcpServer({ noDelay: true }, serve);
  const options = () => {
    const { context: _parsed, ...pem } = tls.files.current();
    return { ...pem, requestCert: tls.mutual, rejectUnauthorized: tls.mutual };
  };
  let used = tls.files.current();
  const server = createTlsServer({ ...options(), handshakeTimeout: tls.handshakeMs }, serve);
  server.on("connection", (socket: Socket) => {
    socket.setNoDelay(true);
    const now = tls.files.current();
    if (now === used) return;
    used = now;
    log.info("DYN_TCP_TLS_*: new certificate in use");
    server.setSecureContext(options());
  });
  server.on("tlsClientError", (error, socket) => {
    log.warn("request connection closed: no TLS handshake", { error, peer: socket.remoteAddress });
    socket.destroy();
  });
  return server;
}

/** A connection that is open, and trusted. @throws Error when it is not there in time */
export function dial(target: { host: string; port: number }, tls: DialTls | null, timeoutMs: number): Promise<Socket> {
  return new Promise((resolve, reject) => {
    const { host, port } = target;
    const name = tls?.serverName ?? host;
    const socket =
      tls === null
        ? connectTcp({ host, port, noDelay: true })
        : connectTls({ host, port, secureContext: tls.files.current().context, rejectUnauthorized: !tls.insecure, ...(isIP(name) ? {} : { servername: name }) });
    const failed = (error: Error) => {
      clearTimeout(timer);
      socket.destroy();
      reject(error);
    };
    const timer = setTimeout(() => failed(new Error(`no connection to ${host}:${port} within ${timeoutMs} ms`)), timeoutMs);
    socket.once("error", failed);
    socket.once("close", () => failed(new Error(`connection to ${host}:${port} closed before it was open`)));
    socket.once(tls === null ? "connect" : "secureConnect", () => {
      clearTimeout(timer);
      socket.removeAllListeners("close");
      socket.off("error", failed);
      socket.setNoDelay(true);
      resolve(socket);
    });
  });
}
