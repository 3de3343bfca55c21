"""Runs the GPU checks one after the other within a time limit and prints one JSON object. Python's standard library only."""
import json
import os
import subprocess
import sys
import time
import traceback

import build
import native
import serving

LIMIT_S = float(os.environ.get("LAYERSCALE_GPU_LIMIT_S", "340"))


def gpu():
    """The first GPU as nvidia-smi has it, or None."""
    try:
        fields = "name,driver_version,memory.total,clocks.max.sm,power.limit"
        text = subprocess.run(["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"], capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    lines = text.strip().splitlines()
    return dict(zip(fields.split(","), [part.strip() for part in lines[0].split(",")])) | {"count": len(lines)} if lines else None


def main():
    if sys.argv[1:] == ["pack"]:
        print(json.dumps(build.pack()))
        return 0
    device = gpu()
    if device is None:
        print("no GPU", file=sys.stderr)
        print(json.dumps({"result": "no GPU"}))
        return 0
    begin = time.monotonic()
    left = lambda: LIMIT_S - (time.monotonic() - begin)
    report = {"result": "ok", "gpu": device, "steps": {}}
    context = {"left": left, "device": device}
    # The order is that of worth: what is cut off at the end matters least.
    steps = [("build", build.build), ("parity", native.parity), ("benchmark", native.benchmark), ("serve", serving.aggregated), ("disaggregated", serving.disaggregated), ("sanitizer", native.sanitizer)]
    for name, step in steps:
        started = time.monotonic()
        if left() < 10:
            outcome = {"ok": False, "error": "no time left"}
        else:
            try:
                outcome = {"ok": True} | step(context)
            except Exception as error:  # every step reports, whatever became of another
                outcome = {"ok": False, "error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc().splitlines()[-3:]}
        outcome["seconds"] = round(time.monotonic() - started, 2)
        report["steps"][name] = outcome
        print(f"{name}: {'ok' if outcome['ok'] else outcome.get('error', 'failed')} ({outcome['seconds']} s)", file=sys.stderr)
        if not outcome["ok"]:
            report["result"] = "failed"
        if name == "build" and not outcome["ok"]:
            break
    report["seconds"] = round(time.monotonic() - begin, 1)
    print(json.dumps(report))
    return 0 if report["result"] == "ok" else 1


if __name__ == "__main__":
    sys.exit(main())
