/** Certificates of a test's own, made by openssl. */
import { copyFileSync, mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";

export const hasOpenssl = Bun.which("openssl") !== null;
const KEY = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"];

/** A certificate authority with what it signed, all PEM, in a folder that goes at disposal. */
export class Certificates implements Disposable {
  readonly folder = mkdtempSync(join(tmpdir(), "layerscale-certificates-"));

  constructor() {
    this.#openssl("req", "-x509", ...KEY, "-days", "2", "-keyout", this.path("ca.key"), "-out", this.path("ca.pem"), "-subj", "/CN=test authority");
  }

  path(name: string): string {
    return join(this.folder, name);
  }
  get ca(): string {
    return this.path("ca.pem");
  }

  /** A certificate for loopback and the name plane.test. */
  sign(name: string): { cert: string; key: string } {
    const [cert, key, request, extensions] = ["pem", "key", "csr", "ext"].map((end) => this.path(`${name}.${end}`)) as [string, string, string, string];
    writeFileSync(extensions, "subjectAltName=IP:127.0.0.1,IP:::1,DNS:localhost,DNS:plane.test\nbasicConstraints=CA:FALSE\n");
    this.#openssl("req", ...KEY, "-keyout", key, "-out", request, "-subj", `/CN=${name}`);
    this.#openssl("x509", "-req", "-in", request, "-CA", this.ca, "-CAkey", this.path("ca.key"), "-CAcreateserial", "-days", "2", "-out", cert, "-extfile", extensions);
    return { cert, key };
  }

  /** Puts another pair in place of one, as a renewal does. */
  replace(old: { cert: string; key: string }, by: { cert: string; key: string }): void {
    copyFileSync(by.key, old.key);
    copyFileSync(by.cert, old.cert);
  }

  #openssl(...args: string[]): void {
    const { exitCode, stderr } = Bun.spawnSync(["openssl", ...args], { stdin: "ignore", stdout: "ignore", stderr: "pipe" });
    if (exitCode !== 0) throw new Error(`openssl ${args[0]}: ${stderr.toString()}`);
  }

  [Symbol.dispose](): void {
    rmSync(this.folder, { recursive: true, force: true });
  }
}
