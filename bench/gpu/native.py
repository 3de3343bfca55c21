"""Checks through native programs: kernels and models against references, the benchmark, compute-sanitizer."""
import json
import os
import shutil
import subprocess

import build

# HBM bytes/s and dense bf16 FLOP/s of the data sheets, by a word of the GPU's name.
PEAKS = {"H200": (4.8e12, 989e12), "H100": (3.35e12, 989e12), "A100": (2.0e12, 312e12), "B200": (8.0e12, 2250e12), "L40S": (0.864e12, 362e12)}


def run_tests(context, names, launcher=(), limit=120):
    """Each test program's counts. Kernel launches are waited for one by one, since the tests read what a launcher has just written."""
    environment = dict(os.environ, CUDA_LAUNCH_BLOCKING="1")
    environment.pop("LAYERSCALE_SIM_DEVICES", None)
    results = {}
    for name, *arguments in names:
        try:
            done = subprocess.run([*launcher, context["programs"][name], *arguments], capture_output=True, text=True, timeout=max(5, min(limit, context["left"]() - 5)), env=environment)
            failures = [line for line in done.stdout.splitlines() if line.startswith("not ok")]
            results[name] = {"code": done.returncode, "summary": (done.stdout.strip().splitlines() or ["no output"])[-1], "failures": failures[:10]}
            if done.returncode != 0 and not failures:
                results[name]["stderr"] = done.stderr[-1000:]
            if launcher:
                results[name]["report"] = [line for line in (done.stdout + done.stderr).splitlines() if "ERROR SUMMARY" in line or "=========     " in line][:10]
        except subprocess.TimeoutExpired:
            results[name] = {"code": -1, "summary": "out of time", "failures": []}
    bad = [name for name, result in results.items() if result["code"] != 0]
    return {"tests": results} | ({"ok": False, "error": f"failed: {', '.join(bad)}"} if bad else {})


def parity(context):
    # What the simulator's environment simulates is not for a real GPU.
    abi = [("model_test", "logprobs of every"), ("model_test", "company"), ("model_test", "a step is"), ("model_test", "decode steps"), ("transfer_test", "a pulled prompt"), ("transfer_test", "more pages")]
    kernels = [(name,) for name in sorted(context["programs"]) if name not in context["through_abi"] and name not in ("step_bench", "simulator_test", "all_reduce_test")]
    first = run_tests(context, kernels, limit=60)
    merged = {"tests": first["tests"]}
    for name, case in abi:
        merged["tests"][f"{name}: {case}"] = run_tests(context, [(name, case)], limit=60)["tests"][name]
    bad = [name for name, result in merged["tests"].items() if result["code"] != 0]
    return merged | ({"ok": False, "error": f"failed: {', '.join(bad)}"} if bad else {})


def benchmark(context):
    """Times beside the roofline: bytes that a step must read at the memory's speed, products at the tensor cores'."""
    environment = {key: value for key, value in os.environ.items() if key != "CUDA_LAUNCH_BLOCKING"}
    text = build.run([context["programs"]["step_bench"], os.environ.get("LAYERSCALE_GPU_SHAPE", "qwen3-8b"), "40"], min(150, context["left"]()), env=environment)
    measured = json.loads(text)
    peaks = next((peak for word, peak in PEAKS.items() if word in context["device"]["name"]), None)
    if peaks:
        for name, part in measured.items():
            if name.startswith("decode_"):
                part["roofline"] = round(part["bytes"] / peaks[0] / part["seconds"], 3)
        measured["prefill"]["of_peak"] = round(measured["prefill"]["flops"] / peaks[1] / measured["prefill"]["seconds"], 3)
    transfer = measured["kv_transfer"]
    transfer["bytes_per_second"] = round(transfer["bytes"] / transfer["seconds"])
    return {"measured": measured, "peaks": peaks}


def sanitizer(context):
    tool = shutil.which("compute-sanitizer") or os.path.join(build.toolkit(), "bin", "compute-sanitizer")
    if not os.path.exists(tool):
        return {"skipped": "no compute-sanitizer"}
    return run_tests(context, [("model_test", "company")], launcher=[tool, "--error-exitcode", "9"], limit=90)
