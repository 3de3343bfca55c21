/** The cache that checkouts share: build trees in it keep their own path, so a link to it must not become that path. */
import { afterAll, expect, test } from "bun:test";
import { mkdirSync, mkdtempSync, realpathSync, rmSync, symlinkSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";

const work = realpathSync(mkdtempSync(join(tmpdir(), "layerscale-cache-")));
afterAll(() => rmSync(work, { recursive: true, force: true }));

async function cacheDir(env: Record<string, string>): Promise<string> {
  const paths = join(import.meta.dir, "../../../scripts/lib/paths.mjs");
  const run = Bun.spawn([process.execPath, "-e", `console.log((await import(${JSON.stringify(paths)})).cacheDir)`], { env: { PATH: "/usr/bin:/bin", ...env }, cwd: work, stdout: "pipe", stderr: "inherit" });
  return (await new Response(run.stdout).text()).trim();
}

test("a link to the cache is followed, also where the cache is not made yet", async () => {
  mkdirSync(join(work, "real/layerscale"), { recursive: true });
  mkdirSync(join(work, "home"));
  symlinkSync(join(work, "real"), join(work, "home/.cache"));
  symlinkSync(join(work, "real"), join(work, "link"));
  expect(await cacheDir({ HOME: join(work, "home") })).toBe(join(work, "real/layerscale"));
  expect(await cacheDir({ HOME: "/nowhere", XDG_CACHE_HOME: join(work, "link") })).toBe(join(work, "real/layerscale"));
  expect(await cacheDir({ HOME: "/nowhere", LAYERSCALE_CACHE_DIR: join(work, "link/new/one") })).toBe(join(work, "real/new/one"));
  expect(await cacheDir({ HOME: "/nowhere", LAYERSCALE_CACHE_DIR: "link/two" })).toBe(join(work, "real/two"));
});
