/** Runs every shell block of README and docs that can run here, in the order of its file, in one shell: a block that fails is a broken document. */
import { describe, expect, test } from "bun:test";
import { mkdirSync, mkdtempSync, readdirSync, rmSync, symlinkSync, writeFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { containers, Network } from "../../support/container.ts";
import { Launched, required } from "../../support/launch.ts";
import { type Block, blocksOf, documents, root, SHELL } from "../../support/markdown-blocks.ts";

const LIMIT_MS = 300_000;

const PRELUDE = `set -aem -o pipefail
BACKGROUND=
# An answer that is an error fails the block, also where the text does not ask curl for that.
curl() {
  case " $* " in
    *" -f "* | *" -sf "*) command curl --max-time 120 "$@" ;;
    *) command curl --fail-with-body --max-time 120 "$@" ;;
  esac
}
stop_background() {
  if [ -n "$BACKGROUND" ]; then
    kill -TERM -- -$BACKGROUND 2>/dev/null || true
    while kill -0 -- -$BACKGROUND 2>/dev/null; do sleep 0.1; done
    BACKGROUND=
  fi
}
ready() {
  for attempt in $(seq 1200); do
    if command curl -sf --max-time 5 "$1" >/dev/null; then return 0; fi
    kill -0 $BACKGROUND || { echo "the server ended"; return 1; }
    sleep 0.1
  done
  return 1
}
trap stop_background EXIT
`;

/** A server's block runs beside the following ones, until the next server or the end of the file. */
function script(blocks: readonly Block[], folder: string): string {
  return PRELUDE + blocks.map(({ file, line, text, background }, index) => {
    // Answers often end without a line's end.
    const head = `printf '\\n::block ${file}:${line}\\n'\n`;
    if (background === null) return `${head}${text}\n`;
    const path = join(folder, `block-${index}.sh`);
    writeFileSync(path, text);
    return `${head}stop_background\nbash -e ${path} </dev/null &\nBACKGROUND=$!\ndisown\nready ${background}\n`;
  }).join("");
}

describe.skipIf(!containers || !process.env.LAYERSCALE_TEST_PYTHON)("shell blocks", () => {
  for (const file of documents()) {
    const blocks = blocksOf(file).filter((block) => SHELL.includes(block.language) && block.notRun === null);
    if (blocks.length === 0) continue;
    test(`${file}: ${blocks.length} run`, async () => {
      mkdirSync(join(root, "build"), { recursive: true });
      const scratch = mkdtempSync(join(root, "build", "docs-"));
      try {
        // A checkout as the reader has it, in which blocks may leave files: everything of this one, by links.
        for (const name of readdirSync(root)) if (name !== "build" && name !== ".git") symlinkSync(join(root, name), join(scratch, name));
        symlinkSync(dirname(dirname(required("LAYERSCALE_TEST_PYTHON"))), join(scratch, "dynamo-venv"));
        const home = join(scratch, "home");
        mkdirSync(join(home, ".cache"), { recursive: true });
        // The model's folder in the cache: <cache>/models/<name>/<file>.
        symlinkSync(join(dirname(required("LAYERSCALE_TEST_GGUF")), "../.."), join(home, ".cache/layerscale"));
        const path = join(scratch, "blocks.sh");
        writeFileSync(path, script(blocks, scratch));
        // Ports and /tmp of its own, and no way out.
        await using network = await Network.start();
        const shell = `mount -t tmpfs tmpfs /tmp && cd ${scratch} && exec bash ${path}`;
        await using run = Launched.command(network.inside(["unshare", "--mount", "--propagation=private", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", shell]), {
          env: { HOME: home, TMPDIR: "/tmp", HF_HUB_OFFLINE: "1", LAYERSCALE_LICENSE_KEY: required("LAYERSCALE_LICENSE_KEY") },
        });
        const code = await run.exit(LIMIT_MS);
        const reached = run.stdout.split("\n").filter((line) => line.startsWith("::block ")).map((line) => line.slice("::block ".length));
        if (code !== 0) throw new Error(`${reached.at(-1) ?? file}: the block ended with exit code ${code}\nstdout: ${run.stdout.slice(-3000)}\nstderr: ${run.stderr.slice(-3000)}`);
        expect(reached).toEqual(blocks.map(({ line }) => `${file}:${line}`));
      } finally {
        rmSync(scratch, { recursive: true, force: true });
      }
    }, LIMIT_MS + 30_000);
  }
});
