"""Checks through native programs: kernels and models against references, compute-sanitizer, the benchmark."""
import json
import os
from concurrent.futures import ThreadPoolExecutor

import machine
from runner import Failed, ended, tail

# HBM bytes/s and dense bf16 FLOP/s of the data sheets, by a word of the GPU's name.
PEAKS = {"H200": (4.8e12, 989e12), "H100 PCIe": (2.0e12, 756e12), "H100": (3.35e12, 989e12), "A100": (2.0e12, 312e12), "B200": (8.0e12, 2250e12), "L40S": (0.864e12, 362e12)}
# Share of the limit that is wanted: docs/cuda.md.
TARGETS = {"decode_1": 0.80, "decode_64": 0.70, "prefill": 0.60, "kv_transfer": 0.80, "kv_pull": 0.80}
TOLD = 12  # failures with their words
# A part of the simulator's cases that takes seconds, one of every kind.
REHEARSED = ["gathered rows", "rmsnorm", "silu", "decoding: 3000 keys", "all types, one unit of inputs", "q alone", "a vocabulary of 256k", "every rank has the same sum", "refusals come before"]
# For compute-sanitizer, under which a kernel takes a hundred times as long.
SANITIZED = [
    ("memcheck", "gathered rows"), ("memcheck", "page copies"), ("memcheck", "all types, one unit of inputs"), ("memcheck", "decoding: contexts at the edges"), ("memcheck", "q alone"), ("memcheck", "a step is submitted"),
    ("racecheck", "several matrices at once"), ("racecheck", "what else is in a step"), ("racecheck", "a row is sampled the same"), ("synccheck", "what else is in a step"), ("synccheck", "several matrices at once"),
]


def cases(context):
    """Names of all cases of the checks."""
    names = context.runner.must([context.path("checks"), "--list"], 20, env=context.env).splitlines()
    if not names:
        raise Failed("the checks list no case")
    return names


def run_cases(context, jobs, outcome, limit_s, width):
    """Each of (label, command) as a process of its own; what fails is told with its reason, in the report as soon as it is known."""
    outcome.update(passed=0, failed=[], out_of_time=[])

    def one(job):
        label, command = job
        if context.runner.left() < 1:
            return outcome["out_of_time"].append(label)
        code, text = context.runner.run(command, limit_s, env=context.env)
        if code == 0:
            outcome["passed"] += 1
        elif code is None:
            outcome["out_of_time"].append(label)
        else:
            said = tail(text.strip().removeprefix(f"not ok {label}: "), 300)
            # When everything fails, it fails alike.
            outcome["failed"].append({"case": label, "ended": ended(code)} | ({"output": said} if len(outcome["failed"]) < TOLD else {}))
        return None

    with ThreadPoolExecutor(width) as pool:
        list(pool.map(one, jobs))
    if outcome["failed"] or outcome["out_of_time"]:
        raise Failed(f"{len(outcome['failed'])} failed, {len(outcome['out_of_time'])} ran out of time, {outcome['passed']} passed")


def parity(context, outcome):
    """Kernels, tiny models of every family through the ABI, and KV transfers."""
    names = cases(context)
    outcome["cases"] = len(names)
    if context.simulate:
        names = [name for name in names if any(name.startswith(start) for start in REHEARSED)]
    run_cases(context, [(name, [context.path("checks"), name]) for name in names], outcome, 60, 2 if context.simulate else 4)


def sanitizer(context, outcome):
    tool = context.sanitizer or machine.find_tool("compute-sanitizer")
    if tool is None:
        outcome["skipped"] = "no compute-sanitizer on this machine"
        return
    outcome["tool"] = tool
    names = cases(context)
    wanted = SANITIZED[:2] if context.simulate else SANITIZED
    jobs = [(f"{check}: {name}", [tool, "--tool", check, "--error-exitcode", "99", "--print-limit", "5", context.path("checks"), name]) for check, start in wanted for name in names if name.startswith(start)]
    if len(jobs) != len(wanted):
        raise Failed(f"of {len(wanted)} cases {len(jobs)} exist")
    try:
        run_cases(context, jobs, outcome, 50, 2 if context.simulate else 3)
    except Failed:
        refused = [one["output"] for one in outcome["failed"] if "Device not supported" in one["output"] or "not supported on" in one["output"]]
        if not refused or outcome["passed"]:
            raise
        outcome.update(skipped=f"compute-sanitizer does not take this machine: {refused[0][-200:]}", failed=[])


def benchmark(context, outcome):
    """Medians beside the limit: bytes at the memory's speed, products at the tensor cores', a transfer beside a plain TCP copy."""
    env = {key: value for key, value in context.env.items() if key != "CUDA_LAUNCH_BLOCKING"}
    shape = "tiny" if context.simulate else os.environ.get("LAYERSCALE_GPU_SHAPE", "qwen3-8b")
    before = machine.clocks()
    code, text = context.runner.run([context.path("step_bench"), shape, "4" if context.simulate else "100"], 150, env=env)
    lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    measured = {line.pop("name"): line for line in lines}
    peaks = None if context.simulate else next((peak for word, peak in PEAKS.items() if word in context.device_name), None)
    outcome.update(shape=shape, measured=measured, peaks={"bytes_per_second": peaks[0], "flops_per_second": peaks[1]} if peaks else None, clocks={"before": before, "after": machine.clocks()})
    if context.simulate:
        outcome["note"] = "simulated: these numbers say nothing of a GPU"
    elif peaks is None:
        outcome["note"] = f"no data sheet for {context.device_name!r}: no ratios to its limits"
    copied = measured.get("memory_copy")
    plain = measured.get("tcp_copy")
    for name, part in measured.items():
        part["rate"] = part.get("bytes", part.get("flops", 0)) / max(part["seconds"], 1e-12)
        if name.startswith("kv_"):
            limit = plain["bytes"] / plain["seconds"] if plain else None
        else:
            limit = peaks[1 if "flops" in part else 0] if peaks and name in (*TARGETS, "memory_copy") else None
        part["ratio"] = round(part["rate"] / limit, 3) if limit and not context.simulate else None
        if name in TARGETS:
            part["target"] = TARGETS[name]
            part["met"] = part["ratio"] >= TARGETS[name] if part["ratio"] is not None else None
        if name.startswith("decode_") and copied and not context.simulate:
            part["of_memory_copy"] = round(part["rate"] / (copied["bytes"] / copied["seconds"]), 3)
        part["rate"] = round(part["rate"])
    if code != 0:
        raise Failed(f"the benchmark {ended(code)} after {', '.join(measured) or 'nothing'}: {tail(text)}")
