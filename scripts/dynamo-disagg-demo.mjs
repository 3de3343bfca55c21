// npm run dynamo:disagg-demo: the real Dynamo frontend, one prefill and one decode worker on file discovery, one streamed chat answer whose
// prompt was computed by the one and continued by the other, a clean stop.
//   npm run dynamo:disagg-demo -- "Your question"
// Everything stays on loopback. Every wait is bounded; exit code 0 when the answer came, its KV was transferred, and all programs stopped.
import { runDemo } from "./lib/demo.mjs";
import { say } from "./lib/run.mjs";

const question = process.argv.slice(2).join(" ") || "What is the capital of France?";

/** The sum of a family's samples. */
async function metric(system, name) {
  const lines = (await (await fetch(`${system}/metrics`)).text()).split("\n");
  return lines.filter((line) => line.startsWith(`${name}{`) || line.startsWith(`${name} `)).reduce((sum, line) => sum + Number(line.slice(line.lastIndexOf(" ") + 1)), 0);
}

await runDemo(async (demo) => {
  await demo.frontend();
  const prefill = await demo.worker("prefill worker", "--disaggregation-mode", "prefill");
  const decode = await demo.worker("decode worker", "--disaggregation-mode", "decode");
  await demo.served();
  const read = async () => ({
    bytes: await metric(decode, 'layerscale_kv_transfer_bytes_total{direction="received"}'),
    prefilled: await metric(prefill, "layerscale_prompt_tokens_computed_total"),
    recomputed: await metric(decode, "layerscale_prompt_tokens_computed_total"),
  });
  const before = await read();
  say(`question: ${question}`);
  const { usage } = await demo.ask(question);
  const after = await read();
  const moved = after.bytes - before.bytes;
  say(`the prefill worker computed ${after.prefilled - before.prefilled} of the prompt's ${usage.prompt_tokens} tokens, the decode worker ${after.recomputed - before.recomputed}`);
  say(`${moved} bytes of KV went over TCP; cached_tokens is ${usage.prompt_tokens_details?.cached_tokens}`);
  if (moved === 0 || after.recomputed - before.recomputed !== 1) throw new Error("the decode worker did not take the prompt's KV from the prefill worker");
});
