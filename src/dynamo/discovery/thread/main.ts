/** Entry of the discovery thread when the program runs from its sources; the executable's own entry leads there as well. */
import { runDiscoveryThread } from "./run.ts";

await runDiscoveryThread();
