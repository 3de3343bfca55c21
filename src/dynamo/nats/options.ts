import type { DynamoEnvironment } from "../../config/engine-config.ts";
import { readFileSync } from "node:fs";
import { credsAuthenticator, nkeyAuthenticator, tokenAuthenticator, usernamePasswordAuthenticator, type Authenticator } from "@nats-io/transport-node";
import { UsageError } from "../../config/flags.ts";
import { pair, TlsFiles } from "../request-plane/tls-files.ts";

const DEFAULT_SERVER = "nats://localhost:4222";
const SCHEMES = ["nats:", "tls:"];
/** What Dynamo logs in with when nothing is set; a server without users ignores it. */
const DEFAULT_USER = "user";

export interface NatsOptions {
  /** Without credentials: for the client and for words. */
  server: string;
  authenticator: Authenticator;
  /** Which variables the login came from, for words. */
  authSource: string;
  /** null = as the server wants it. */
  tls: { caFile?: string; certFile?: string; keyFile?: string; rejectUnauthorized: boolean; host: string } | null;
}

/** NATS_* as Dynamo 1.5 reads them. @throws UsageError naming the variable */
export function natsOptions(environment: DynamoEnvironment): NatsOptions {
  const text = environment.natsServer ?? DEFAULT_SERVER;
  const url = URL.canParse(text) ? new URL(text) : null;
  if (url === null || !SCHEMES.includes(url.protocol) || url.hostname === "" || (url.pathname !== "" && url.pathname !== "/"))
    throw new UsageError(`NATS_SERVER: expected nats://host:port or tls://host:port, got "${text.replace(/\/\/[^/]*@/, "//…@")}"`);
  const { natsTlsCa, natsTlsCert, natsTlsKey, natsTlsInsecure: insecure } = environment;
  const [ca, cert, key] = [["NATS_TLS_CA_CERT_PATH", natsTlsCa], ["NATS_TLS_CLIENT_CERT_PATH", natsTlsCert], ["NATS_TLS_CLIENT_KEY_PATH", natsTlsKey]] as const;
  pair(cert, key);
  if (natsTlsCert !== null && natsTlsCa === null && !insecure) throw new UsageError("NATS_TLS_CLIENT_CERT_PATH: needs NATS_TLS_CA_CERT_PATH or NATS_TLS_INSECURE");
  const configured = natsTlsCa !== null || natsTlsCert !== null || insecure;
  const secure = url.protocol === "tls:";
  if (configured && !secure) throw new UsageError(`NATS_SERVER: expected tls://… beside the NATS_TLS_* variables, got "nats://${url.host}"`);
  // Only a check: the client reads them at every connection.
  if (secure) new TlsFiles({ ca, cert, key }, () => {});
  const files = { ...(natsTlsCa !== null && { caFile: natsTlsCa }), ...(natsTlsCert !== null && { certFile: natsTlsCert }), ...(natsTlsKey !== null && { keyFile: natsTlsKey }) };
  const tls = secure ? { ...files, rejectUnauthorized: !insecure, host: url.hostname.replace(/^\[(.*)\]$/, "$1") } : null;
  return { server: `${url.hostname}:${url.port || "4222"}`, ...login(environment, url), tls };
}

function login(environment: DynamoEnvironment, url: URL): Pick<NatsOptions, "authenticator" | "authSource"> {
  const { natsUsername, natsPassword, natsToken, natsNkey, natsCredentialsFile: path } = environment;
  if (natsUsername !== null && natsPassword !== null) return { authenticator: usernamePasswordAuthenticator(natsUsername, natsPassword), authSource: "NATS_AUTH_USERNAME, NATS_AUTH_PASSWORD" };
  if (natsUsername !== null || natsPassword !== null) pair(["NATS_AUTH_USERNAME", natsUsername], ["NATS_AUTH_PASSWORD", natsPassword === null ? null : "…"]);
  if (natsToken !== null) return { authenticator: tokenAuthenticator(natsToken), authSource: "NATS_AUTH_TOKEN" };
  if (natsNkey !== null) return { authenticator: checked("NATS_AUTH_NKEY", "a seed that starts with SU", nkeyAuthenticator(new TextEncoder().encode(natsNkey.trim()))), authSource: "NATS_AUTH_NKEY" };
  if (path !== null) {
    // Read at every login: such files are renewed.
    const read = () => {
      try {
        return readFileSync(path);
      } catch (error) {
        throw new UsageError(`NATS_AUTH_CREDENTIALS_FILE: cannot read "${path}": ${(error as Error).message}`);
      }
    };
    return { authenticator: checked("NATS_AUTH_CREDENTIALS_FILE", "a file with a JWT and an nkey seed", credsAuthenticator(read)), authSource: "NATS_AUTH_CREDENTIALS_FILE" };
  }
  if (url.username !== "") {
    const [name, password] = [decodeURIComponent(url.username), decodeURIComponent(url.password)];
    return { authenticator: password === "" ? tokenAuthenticator(name) : usernamePasswordAuthenticator(name, password), authSource: "NATS_SERVER" };
  }
  return { authenticator: usernamePasswordAuthenticator(DEFAULT_USER, DEFAULT_USER), authSource: "NATS_AUTH_* (none set)" };
}

/** Tries the login on a made-up challenge, so that nonsense is found before any connection. */
function checked(variable: string, expected: string, authenticator: Authenticator): Authenticator {
  try {
    authenticator("nonce");
  } catch (error) {
    throw error instanceof UsageError ? error : new UsageError(`${variable}: expected ${expected}: ${(error as Error).message}`);
  }
  return authenticator;
}
