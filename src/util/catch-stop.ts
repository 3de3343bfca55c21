/** Imported first by main.ts, before anything that takes time to load. Workers of this process have no signals of their own. */
import { isMainThread } from "node:worker_threads";
import { keepStopSignals } from "./signals.ts";

if (isMainThread) keepStopSignals();
