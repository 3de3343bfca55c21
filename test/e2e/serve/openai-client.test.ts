import { expect, test } from "bun:test";
import { join } from "node:path";
import { Launched, required } from "../../support/launch.ts";
import { serveModel } from "./support.ts";

test("the openai Python client works, with and without a key", async () => {
  for (const withKey of [false, true]) {
    await using server = await serveModel(withKey ? ["--api-key"] : []);
    const key = withKey ? required("LAYERSCALE_LICENSE_KEY") : "none";
    await using client = Launched.command([required("LAYERSCALE_TEST_PYTHON"), join(import.meta.dir, "openai_client.py"), `${server.url}/v1`, key, withKey ? "keyed" : "open"]);
    const code = await client.exit(100_000);
    expect([code, client.stderr, client.stdout.trim().split("\n").at(-1)]).toEqual([0, "", "all good"]);
  }
}, 240_000);
