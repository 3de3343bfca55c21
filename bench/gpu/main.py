"""Runs the GPU checks one after the other within a time limit and prints one JSON object. Python's standard library only."""
import argparse
import json
import os
import shutil
import signal
import stat
import sys
import tempfile
import threading

import compiler
import kit
import machine
import native
import serving
import suites
from runner import Failed, Report, Runner, run_step

LIMIT_S = 340.0
# In the order of worth: what is cut off at the end matters least. Seconds that a step may take; together more than there is.
STEPS = [("prepare", 170), ("parity", 80), ("benchmark", 120), ("golden", 45), ("conformance", 60), ("serve", 45), ("disaggregated", 45), ("sanitizer", 60)]


class Context:
    """What steps share."""

    def __init__(self, runner, folder, simulate, device):
        self.runner, self.folder, self.simulate = runner, folder, simulate
        self.device_name = (device or {}).get("name", "")
        self.capability = (device or {}).get("compute_cap", "9.0")
        self.sanitizer = None
        drop = ("LAYERSCALE_NATIVE_LIB", "LAYERSCALE_SIM_", "http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")
        self.env = {key: value for key, value in os.environ.items() if not key.startswith(drop)}
        self.env["HOME"] = folder
        driver = None if simulate else machine.driver_folder()
        if driver:
            self.env["LD_LIBRARY_PATH"] = ":".join(filter(None, [self.env.get("LD_LIBRARY_PATH"), driver]))

    def path(self, name):
        found = os.path.join(self.folder, name)
        if not os.path.exists(found):
            raise Failed(f"there is no {name}: it was neither carried in a kit nor built here")
        return found


def prepare(context, kit_path):
    """Unpacks the kit, or builds what can be built; then asks the library what it sees."""

    def body(outcome):
        if os.path.exists(kit_path):
            manifest = kit.unpack(kit_path, context.folder)
            outcome["kit"] = {"bytes": os.path.getsize(kit_path), "files": manifest["files"], "simulated": manifest["simulated"], "made_of_these_sources": manifest["sources"] == kit.sources()}
            if manifest["simulated"] != context.simulate:
                raise Failed(f"{kit_path} is {'for a rehearsal' if manifest['simulated'] else 'for a GPU'}; pack another")
        elif context.simulate:
            raise Failed(f"no kit at {kit_path}: bench/gpu.sh pack --simulate --stored makes it")
        else:
            outcome["kit"] = None
        why = None
        if outcome["kit"]:
            try:
                outcome["library"] = kit.device(context.runner, context.path("liblayerscale_cuda.so"), context.env)
                why = outcome["library"].get("error") or (None if outcome["library"]["devices"] else "it sees no device") or next((one["error"] for one in outcome["library"]["devices"] if "error" in one), None)
            except (Failed, ValueError, KeyError) as error:
                why = str(error)
        if outcome["kit"] and why is None:
            context.device_name = context.device_name or outcome["library"]["devices"][0]["name"]
            return
        if why:
            outcome["carried_library"] = why
        if context.simulate:
            raise Failed(f"the carried library cannot be used: {why}")
        compiler.compile_all(context.runner, context.folder, context.capability, outcome)
        outcome["library"] = kit.device(context.runner, context.path("liblayerscale_cuda.so"), context.env)
        if not outcome["library"]["devices"]:
            raise Failed(f"the library built here sees no device: {outcome['library'].get('error')}")

    return body


def rehearsed_sanitizer(folder):
    """Stands in for compute-sanitizer: runs the program."""
    path = os.path.join(folder, "compute-sanitizer")
    with open(path, "w", encoding="utf-8") as out:
        out.write('#!/bin/sh\nwhile [ "${1#--}" != "$1" ]; do shift 2; done\n"$@"\n')
    os.chmod(path, os.stat(path).st_mode | stat.S_IXUSR)
    return path


def arguments():
    parser = argparse.ArgumentParser(prog="bench/gpu.sh", description="Checks and measures on the first GPU; prints one JSON object.")
    parser.add_argument("command", nargs="?", choices=["pack"], help="pack: put the built program, libraries and checks into the kit")
    parser.add_argument("--simulate", action="store_true", help="over the simulator, in small: a rehearsal")
    parser.add_argument("--stored", action="store_true", help="with pack: without compression")
    parser.add_argument("--kit", default=kit.KIT, help="archive to make or to use (default dist/gpu-kit/kit.tar)")
    parser.add_argument("--report", help="file that has the JSON object after every step (default: report.json in the work folder)")
    parser.add_argument("--work", help="folder to unpack and build in (default: a new one in the folder for temporary files, removed afterwards)")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help=f"seconds for everything (default {LIMIT_S:.0f})")
    parser.add_argument("--only", help="steps, separated by commas, that are run after prepare")
    return parser.parse_args()


def main():
    options = arguments()
    if options.command == "pack":
        try:
            print(json.dumps(kit.pack(options.simulate, options.stored, os.path.abspath(options.kit))))
        except Failed as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        return 0
    wanted = options.only.split(",") if options.only else [name for name, _ in STEPS]
    unknown = [name for name in wanted if name not in dict(STEPS)]
    if unknown:
        print(f"error: --only: expected some of {', '.join(name for name, _ in STEPS)}, got \"{','.join(unknown)}\"", file=sys.stderr)
        return 2
    device = {"name": "simulated device", "count": 0} if options.simulate else machine.gpu()
    if device is None:
        print("no GPU", file=sys.stderr)
        print(json.dumps({"result": "no GPU"}))
        return 0
    folder = os.path.abspath(options.work) if options.work else tempfile.mkdtemp(prefix="layerscale-gpu-")
    os.makedirs(folder, exist_ok=True)
    runner = Runner(options.limit)
    report = Report(os.path.abspath(options.report or os.path.join(folder, "report.json")), {"result": "cut off", "simulated": options.simulate, "gpu": device, "machine": machine.facts(), "steps": {}})
    context = Context(runner, folder, options.simulate, device)
    context.sanitizer = rehearsed_sanitizer(folder) if options.simulate else None

    ending = threading.Lock()

    def end(result):
        """Tells what there is and ends the process, whatever still hangs. The first to come does it."""
        ending.acquire()
        content = report.content
        content["result"] = result
        for step in content["steps"].values():
            if step["ok"] is None:
                step.update(ok=False, error=f"cut off while it ran, {options.limit:.0f} s after the beginning or by a signal")
        content["failed"] = [name for name, step in content["steps"].items() if not step["ok"]]
        measured = content["steps"].get("benchmark", {}).get("measured", {})
        content["targets"] = {name: {key: part[key] for key in ("ratio", "target", "met")} for name, part in measured.items() if "target" in part}
        content["total_seconds"] = round(runner.limit_s - (runner.end - runner.now()), 1)
        report.save()
        print(report.text(), flush=True)
        runner.stop_all()
        if not options.work:
            shutil.rmtree(folder, ignore_errors=True)
        sys.stderr.flush()
        os._exit(0 if result == "ok" else 1)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: threading.Thread(target=end, args=("cut off",), daemon=True).start())
    watchdog = threading.Timer(options.limit + 6, end, args=("cut off",))
    watchdog.daemon = True
    watchdog.start()

    bodies = {
        "prepare": prepare(context, os.path.abspath(options.kit)), "parity": native.parity, "benchmark": native.benchmark, "golden": suites.golden, "conformance": suites.conformance,
        "serve": serving.aggregated, "disaggregated": serving.disaggregated, "sanitizer": native.sanitizer,
    }
    for name, limit_s in STEPS:
        if name != "prepare" and name not in wanted:
            continue
        body = bodies[name]
        step = body if name == "prepare" else lambda outcome, body=body: body(context, outcome)
        outcome = run_step(runner, report, name, limit_s, step)
        print(f"{name}: {'ok' if outcome['ok'] else outcome['error']} ({outcome['seconds']} s)", file=sys.stderr, flush=True)
    end("ok" if all(step["ok"] for step in report.content["steps"].values()) else "failed")


if __name__ == "__main__":
    sys.exit(main())
