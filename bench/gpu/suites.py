"""Test files of the tree over the device's library. The program is its own test runner: it holds the runtime that they are written for."""
import os
import xml.etree.ElementTree as tree

from kit import ROOT
from runner import Failed, ended, tail


def run_suite(context, outcome, name, limit_s):
    """The counts of one file, and what failed."""
    report = os.path.join(context.folder, f"{name}.xml")
    path = f"./test/e2e/engine/{name}.test.ts"
    env = dict(context.env, BUN_BE_BUN="1", LAYERSCALE_NATIVE_LIB=context.path("liblayerscale_cuda.so"))
    command = [context.path("layerscale"), "test", "--timeout", str(int(limit_s * 1000)), "--reporter=junit", f"--reporter-outfile={report}", path]
    code, text = context.runner.run(command, limit_s, env=env, cwd=ROOT)
    result = outcome.setdefault("suites", {})[name] = {"code": code}
    if os.path.exists(report):
        cases = [case for case in tree.parse(report).getroot().iter("testcase")]
        failed = [case.get("name") for case in cases if case.find("failure") is not None or case.find("error") is not None]
        result.update(passed=len(cases) - len(failed) - sum(case.find("skipped") is not None for case in cases), failed=failed)
    if code != 0 or not result.get("passed"):
        result["output"] = tail(text, 1200)
        return f"{name} {ended(code)}"
    return None


def run_suites(context, outcome, names, limit_s):
    bad = [reason for name in names if (reason := run_suite(context, outcome, name, min(limit_s, context.runner.left()))) is not None]
    if bad:
        raise Failed("; ".join(bad))


def golden(context, outcome):
    """Tiny models against what another implementation computed."""
    run_suites(context, outcome, ["device-golden"], 60)


def conformance(context, outcome):
    """The engine's own promises over the ABI, those of the CPU library: batches, chunks, preemption, cancelling, events, the prefix cache."""
    run_suites(context, outcome, ["device-cache"] if context.simulate else ["device-cache", "native"], 50)
