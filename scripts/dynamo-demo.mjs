// npm run dynamo:demo: the real Dynamo frontend and one LayerScale worker on file discovery, one streamed chat answer, a clean stop.
//   npm run dynamo:demo -- "Your question"
// Everything stays on loopback. Every wait is bounded; exit code 0 when the answer came and both programs stopped.
import { runDemo } from "./lib/demo.mjs";
import { say } from "./lib/run.mjs";

const question = process.argv.slice(2).join(" ") || "What is the capital of France?";

await runDemo(async (demo) => {
  await demo.frontend();
  await demo.worker("worker");
  await demo.served();
  say(`question: ${question}`);
  await demo.ask(question);
});
