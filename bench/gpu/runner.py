"""Child processes and steps with limits. Whatever hangs, fails or is cut off costs its own result and no other."""
import copy
import json
import os
import signal
import subprocess
import tempfile
import threading
import time


def ended(code):
    """How a process ended, in words; code as Runner.run has it."""
    if code is None:
        return "ran out of time"
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"


def tail(text, count=700):
    return text if len(text) <= count else "…" + text[-count:]


class Failed(Exception):
    """A step's reason, in words."""


class Runner:
    """The clock of a whole run, and everything it has started."""

    def __init__(self, limit_s):
        self.limit_s = limit_s
        self.end = self.now() + limit_s
        self.step_end = self.end
        self.children = []  # process groups that may still run

    @staticmethod
    def now():
        return time.monotonic()

    def left(self):
        """Seconds until the end of the step that runs."""
        return min(self.step_end, self.end) - time.monotonic()

    def start(self, command, **options):
        """A process at the head of a group of its own, so that whatever it starts ends with it."""
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, **options)
        self.children.append(child)
        return child

    def stop(self, child, grace_s=0.0):
        """SIGTERM where there is grace, then SIGKILL to the group. One that a driver holds is left behind: nothing waits for it."""
        if grace_s > 0 and child.poll() is None:
            child.terminate()
            try:
                child.wait(grace_s)
            except subprocess.TimeoutExpired:
                pass
        try:
            os.killpg(child.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        try:
            child.wait(2)
        except subprocess.TimeoutExpired:
            pass
        if child in self.children:
            self.children.remove(child)

    def stop_all(self):
        for child in list(self.children):
            self.stop(child)

    def run(self, command, limit_s, env=None, cwd=None):
        """(exit code, or None when it ran out of time, what it printed). Output goes through a file: no pipe that a grandchild holds keeps us."""
        with tempfile.TemporaryFile() as out:
            child = self.start(command, stdout=out, stderr=subprocess.STDOUT, env=env, cwd=cwd)
            try:
                code = child.wait(max(0.5, min(limit_s, self.left())))
            except subprocess.TimeoutExpired:
                code = None
            self.stop(child)
            out.seek(0)
            return code, out.read().decode("utf-8", "replace")

    def must(self, command, limit_s, **options):
        """What a command prints that has to succeed."""
        code, text = self.run(command, limit_s, **options)
        if code != 0:
            raise Failed(f"{os.path.basename(command[0])} {ended(code)}: {tail(text)}")
        return text


class Report:
    """One JSON object, on disk after every step."""

    def __init__(self, path, content):
        self.path, self.content, self.lock = path, content, threading.RLock()
        self.save()

    def save(self):
        with self.lock:
            part = f"{self.path}.part"
            os.makedirs(os.path.dirname(os.path.abspath(self.path)), exist_ok=True)
            with open(part, "w", encoding="utf-8") as out:
                out.write(self.text())
            os.replace(part, self.path)

    def text(self):
        for _ in range(50):  # a step that was given up may still write into its part
            try:
                return json.dumps(copy.deepcopy(self.content))
            except RuntimeError:
                time.sleep(0.01)
        raise RuntimeError("the report never stands still")


def run_step(runner, report, name, limit_s, body):
    """Runs body(outcome) for at most limit_s; outcome is in the report from the beginning and says what became of the step."""
    outcome = {"ok": None}
    report.content["steps"][name] = outcome
    started = time.monotonic()
    runner.step_end = started + limit_s
    if runner.left() < 2:
        outcome.update(ok=False, error="no time is left", seconds=0)
        report.save()
        return outcome
    failure = []

    def guarded():
        try:
            body(outcome)
        except Failed as error:
            failure.append(str(error))
        except Exception as error:  # every step reports, whatever became of another
            trace = error.__traceback__
            while trace.tb_next:
                trace = trace.tb_next
            failure.append(f"{type(error).__name__}: {error} ({os.path.basename(trace.tb_frame.f_code.co_filename)}:{trace.tb_lineno})")

    thread = threading.Thread(target=guarded, daemon=True)
    thread.start()
    # Children end at the step's limit by themselves; the rest is for what the step itself does afterwards.
    thread.join(max(0.5, runner.left()) + 5)
    if thread.is_alive():
        runner.stop_all()
        thread.join(2)
        if thread.is_alive():
            # It may still write into its own dictionary, which the report keeps a copy of.
            outcome = report.content["steps"][name] = copy.deepcopy(outcome)
        failure.append(f"out of time after {limit_s} s")
    if failure:
        outcome.update(ok=False, error="; ".join(failure))
    elif outcome["ok"] is None:
        outcome["ok"] = True
    outcome["seconds"] = round(time.monotonic() - started, 2)
    report.save()
    return outcome
