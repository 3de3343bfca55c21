import { afterAll, describe, expect, test } from "bun:test";
import { mkdirSync, mkdtempSync, rmSync, unlinkSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { inferAccess } from "../../../src/dynamo/discovery/kubernetes/access.ts";

const home = mkdtempSync(join(tmpdir(), "ls-kube-access-"));
afterAll(() => rmSync(home, { recursive: true, force: true }));
const PEM = "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----";
let files = 0;
function file(text: string, folder = home): string {
  mkdirSync(folder, { recursive: true });
  const path = join(folder, `file-${files++}`);
  writeFileSync(path, text);
  return path;
}
const none = { kubeconfig: null, kubernetesHost: null, kubernetesPort: 443 };
const from = (...paths: string[]) => inferAccess({ ...none, kubeconfig: paths.join(":") }, "/nonexistent", "/nonexistent");
const config = (cluster: string, user: string) => `
apiVersion: v1
kind: Config
current-context: x
contexts: [{name: x, context: {cluster: c, user: u}}]
clusters: [{name: c, cluster: {${cluster}}}]
users: [{name: u, user: {${user}}}]
`;

describe("service account", () => {
  const account = (token = "abc\n") => {
    const folder = mkdtempSync(join(home, "sa-"));
    writeFileSync(join(folder, "token"), token);
    writeFileSync(join(folder, "ca.crt"), PEM);
    return folder;
  };
  test("address from the variables, token and CA from files", () => {
    const access = inferAccess({ ...none, kubernetesHost: "10.0.0.1", kubernetesPort: 6443 }, account(), "/nonexistent");
    expect(access.server).toBe("https://10.0.0.1:6443");
    expect(access.credentials()).toEqual({ authorization: "Bearer abc", tls: { ca: PEM } });
    expect(inferAccess({ ...none, kubernetesHost: "fd00::1" }, account(), "/nonexistent").server).toBe("https://[fd00::1]:443");
  });
  test("a replaced token is used at once; a missing or empty file keeps the last one", () => {
    const folder = account("first");
    const { credentials } = inferAccess({ ...none, kubernetesHost: "h" }, folder, "/nonexistent");
    expect(credentials().authorization).toBe("Bearer first");
    writeFileSync(join(folder, "token"), "second");
    expect(credentials().authorization).toBe("Bearer second");
    writeFileSync(join(folder, "token"), "");
    expect(credentials().authorization).toBe("Bearer second");
    unlinkSync(join(folder, "token"));
    expect(credentials().authorization).toBe("Bearer second");
  });
  test("a file that was never there is named", () => {
    const folder = account();
    unlinkSync(join(folder, "ca.crt"));
    expect(() => inferAccess({ ...none, kubernetesHost: "h" }, folder, "/nonexistent").credentials()).toThrow(/service account CA: cannot read ".*ca\.crt"/);
    expect(() => inferAccess({ ...none, kubernetesHost: "h" }, account("\n"), "/nonexistent").credentials()).toThrow(/service account token: ".*token" is empty/);
  });
  test("no cluster at all", () => {
    expect(() => inferAccess(none, account(), "/nonexistent")).toThrow(/finds no cluster: neither KUBECONFIG/);
    expect(() => inferAccess({ ...none, kubernetesHost: "a b" }, account(), "/nonexistent")).toThrow(/KUBERNETES_SERVICE_HOST: expected a host, got "a b"/);
  });
  test("~/.kube/config goes before it, unless it cannot be used", () => {
    const user = mkdtempSync(join(home, "user-"));
    mkdirSync(join(user, ".kube"));
    writeFileSync(join(user, ".kube", "config"), config("server: 'https://own:1'", ""));
    expect(inferAccess({ ...none, kubernetesHost: "h" }, account(), user).server).toBe("https://own:1");
    writeFileSync(join(user, ".kube", "config"), "a: [");
    expect(inferAccess({ ...none, kubernetesHost: "h" }, account(), user).server).toBe("https://h:443");
    expect(() => inferAccess(none, account(), user)).toThrow(/cannot read ".*config"/);
  });
});

describe("kubeconfig", () => {
  test("token, CA and options of TLS", () => {
    const access = from(file(config(`server: "https://k:6443/", certificate-authority-data: ${Buffer.from(PEM).toString("base64")}, tls-server-name: kubernetes, proxy-url: "http://p:3128"`, "token: t1, tokenFile: /ignored")));
    expect(access).toMatchObject({ server: "https://k:6443", proxy: "http://p:3128" });
    expect(access.credentials()).toEqual({ authorization: "Bearer t1", tls: { ca: PEM, serverName: "kubernetes" } });
    expect(from(file(config("server: 'https://k', insecure-skip-tls-verify: true", ""))).credentials()).toEqual({ authorization: null, tls: { rejectUnauthorized: false } });
  });
  test("paths are relative to their file; files are read for every use", () => {
    const folder = mkdtempSync(join(home, "rel-"));
    for (const [name, text] of [["ca.pem", PEM], ["c.pem", "cert"], ["k.pem", "key"], ["t", "one"]] as const) writeFileSync(join(folder, name), text);
    const access = from(file(config("server: 'https://k', certificate-authority: ca.pem", "client-certificate: c.pem, client-key: k.pem, tokenFile: t"), folder));
    expect(access.credentials()).toEqual({ authorization: "Bearer one", tls: { ca: PEM, cert: "cert", key: "key" } });
    writeFileSync(join(folder, "t"), "two");
    writeFileSync(join(folder, "c.pem"), "renewed");
    expect(access.credentials()).toMatchObject({ authorization: "Bearer two", tls: { cert: "renewed" } });
  });
  test("user and password", () => expect(from(file(config("server: 'https://k'", "username: u, password: p"))).credentials().authorization).toBe(`Basic ${btoa("u:p")}`));
  test("several files and documents are one; the first of a name holds", () => {
    const first = file("current-context: x\nclusters: [{name: c, cluster: {server: 'https://first'}}]\n");
    const second = file("clusters: [{name: c, cluster: {server: 'https://second'}}]\n---\ncontexts: [{name: x, context: {cluster: c, user: nobody}}]\n");
    expect(from(first, second)).toMatchObject({ server: "https://first" });
    // Nobody is a user without credentials.
    expect(from(second, first).credentials().authorization).toBeNull();
    expect(from(second, first).server).toBe("https://second");
  });
  test.each([
    [/current-context is not set/, ""],
    [/current-context "y" is not among contexts/, "current-context: y"],
    [/cluster "c" of context "x" is not among clusters/, "current-context: x\ncontexts: [{name: x, context: {cluster: c}}]"],
    [/is not a kubeconfig: clusters/, "clusters: 5"],
    [/expected an http or https URL as server, got "k:6443"/, config("server: 'k:6443'", "")],
    [/expected an http or https URL as server, got ""/, config("", "")],
    [/as proxy-url, got "socks5:/, config("server: 'https://k', proxy-url: 'socks5://p'", "")],
    [/certificate-authority-data: expected PEM in base64/, config("server: 'https://k', certificate-authority-data: '%%%'", "")],
    [/is not a kubeconfig: clusters\.0\.cluster\.insecure-skip-tls-verify/, config("server: 'https://k', insecure-skip-tls-verify: 'maybe'", "")],
    [/client-certificate and client-key belong together/, config("server: 'https://k'", "client-certificate: a.pem")],
    [/user "u": exec is not supported/, config("server: 'https://k'", "exec: {command: aws}")],
    [/user "u": as is not supported/, config("server: 'https://k'", "as: root")],
  ])("refused: %s", (message, text) => {
    expect(() => from(file(text))).toThrow(message);
  });
  test("a file that is not there is named, an unreadable token only when it is needed", () => {
    expect(() => from("/nonexistent/kubeconfig")).toThrow(/KUBECONFIG "\/nonexistent\/kubeconfig": cannot read/);
    const access = from(file(config("server: 'https://k'", "tokenFile: missing")));
    expect(() => access.credentials()).toThrow(/tokenFile: cannot read ".*missing"/);
  });
});
