"""The program itself on a small model: serve on the GPU beside serve on the CPU, and a prefill and a decode worker on one GPU, spoken to as a
frontend does."""
import contextlib
import json
import os
import re
import socket
import struct
import subprocess
import tempfile
import threading
import time
import urllib.error
import urllib.request

import build
import tiny

PROMPT = list(range(1, 200)) + [7, 9, 11]


def key():
    """The licence key of the environment, else the free one that README.md gives."""
    given = os.environ.get("LAYERSCALE_LICENSE_KEY")
    if given:
        return given
    with open(os.path.join(build.ROOT, "README.md"), encoding="utf-8") as text:
        return re.search(r"LSK-[A-Za-z0-9_.-]{40,}", text.read()).group(0)


@contextlib.contextmanager
def program(context, arguments, environment=None, ready=r"http://[^\s\"]+:(\d+)"):
    """Runs the program until the block ends. Yields the match of `ready` in its output, once it has come."""
    full = dict(os.environ, LAYERSCALE_LICENSE_KEY=key(), **(environment or {}))
    full.pop("LAYERSCALE_NATIVE_LIB", None)
    process = subprocess.Popen([os.path.join(build.OUT, "layerscale"), *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=full)
    lines, found, seen = [], [], threading.Event()

    def read():
        for line in process.stdout:
            lines.append(line)
            match = re.search(ready, line)
            if match and not found:
                found.append(match)
                seen.set()
        seen.set()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        if not seen.wait(max(1, min(120, context["left"]()))) or not found:
            raise RuntimeError(f"not ready: {''.join(lines)[-1500:]}")
        yield found[0]
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        reader.join(5)


def completion(port, body):
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"})
    deadline = time.monotonic() + 60
    while True:
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            # The address is open while weights are loaded.
            if error.code != 503 or time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def aggregated(context):
    """Greedy tokens and logprobs of serve on both devices: equal where the best token leads clearly."""
    folder = tiny.make(os.path.join(build.OUT, "tiny"))
    context["model"] = folder
    answers = {}
    for device in ("cpu", "cuda"):
        with program(context, ["serve", "--model", folder, "--device", device, "--port", "0", "--served-model-name", "tiny", "--max-num-seqs", "16", "--kv-cache-dtype", "bf16", "--ctx", "4096"]) as ready:
            ask = lambda prompt, tokens: completion(ready.group(1), {"model": "tiny", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "logprobs": 5, "ignore_eos": True})["choices"][0]
            answers[device] = [ask(PROMPT[: 5 + 19 * i], 1) for i in range(8)] + [ask(PROMPT, 32)]
    worst, same = 0.0, 0
    for got, want in zip(answers["cuda"][:8], answers["cpu"][:8]):
        here, there = got["logprobs"]["top_logprobs"][0], want["logprobs"]["top_logprobs"][0]
        worst = max([worst, *(abs(here[token] - there[token]) for token in here if token in there)])
        same += got["text"] == want["text"]
    ok = worst < 0.25 and same >= 6
    return {"worst_logprob_difference": round(worst, 4), "same_first_tokens": f"{same} of 8", "text": answers["cuda"][8]["text"][:60]} | ({} if ok else {"ok": False, "error": "GPU and CPU differ"})


def two_part(header, data):
    return struct.pack(">QQQ", len(header), len(data), 0) + header + data


def receive(connection, count):
    out = b""
    while len(out) < count:
        piece = connection.recv(count - len(out))
        if not piece:
            return None
        out += piece
    return out


def ask_worker(kv, component, body):
    """One request over the request plane, as a frontend sends it; the items of its answer."""
    folder = os.path.join(kv, "v1", "instances")
    transport = None
    for name in os.listdir(folder):
        with open(os.path.join(folder, name), encoding="utf-8") as text:
            record = json.load(text)
        if record["endpoint"] == "generate" and record["component"] == component:
            transport = re.match(r"^(.*):(\d+)/(.*)$", record["transport"]["tcp"])
    if transport is None:
        raise RuntimeError(f"no instance of {component}")
    host, port, path = transport.groups()
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection((host, int(port)), 10) as requests:
        listener.settimeout(60)
        info = {"address": f"127.0.0.1:{listener.getsockname()[1]}", "subject": "1", "context": "gpu-1", "stream_type": "response"}
        control = {"id": "gpu-1", "request_type": "single_in", "response_type": "many_out", "payload_codec": "json", "connection_info": {"transport": "tcp_server", "info": json.dumps(info)}}
        payload = two_part(json.dumps(control).encode(), json.dumps(body).encode())
        encoded = path.encode()
        requests.sendall(struct.pack(">H", len(encoded)) + encoded + struct.pack(">H", 2) + b"{}" + struct.pack(">I", len(payload)) + payload)
        answer, _ = listener.accept()
        with answer:
            answer.settimeout(60)
            items = []
            while (prefix := receive(answer, 24)) is not None:
                header, data, _ = struct.unpack(">QQQ", prefix)
                rest = receive(answer, header + data) or b""
                if data:
                    items.append(json.loads(rest[header:]))
            return items


def output_of(items):
    """Token ids and the last disaggregated_params of an answer."""
    tokens, params = [], None
    for item in items:
        output = (item.get("data") or {}).get("data") or {}
        tokens += output.get("token_ids") or []
        params = output.get("disaggregated_params") or params
    if not tokens and params is None:
        raise RuntimeError(f"no output in {json.dumps(items)[:800]}")
    return tokens, params


def disaggregated(context):
    """The same tokens from a prefill and a decode worker as from an aggregated one; the prompt's KV goes GPU - host - TCP - host - GPU."""
    folder = context.get("model") or tiny.make(os.path.join(build.OUT, "tiny"))
    body = {"token_ids": PROMPT, "stop_conditions": {"max_tokens": 24, "ignore_eos": True}, "sampling_options": {"temperature": 0}, "output_options": {}, "eos_token_ids": []}
    tokens = {}
    with tempfile.TemporaryDirectory() as home:
        def worker(mode, kv):
            environment = {"DYN_DISCOVERY_BACKEND": "file", "DYN_FILE_KV": kv, "DYN_TCP_RPC_HOST": "127.0.0.1", "POD_IP": "127.0.0.1"}
            arguments = ["dynamo", "--model", folder, "--device", "cuda:0", "--served-model-name", "tiny", "--max-num-seqs", "8", "--ctx", "4096", "--gpu-memory-utilization", "0.3", "--max-total-tokens", "65536", "--disaggregation-mode", mode, "--component", "prefill" if mode == "prefill" else "backend"]
            return program(context, arguments, environment, ready=r"worker ready")

        alone, pair = os.path.join(home, "alone"), os.path.join(home, "pair")
        with worker("agg", alone):
            wait_for(context, alone, 1)
            tokens["agg"], _ = output_of(ask_worker(alone, "backend", body))
        with worker("prefill", pair), worker("decode", pair):
            wait_for(context, pair, 2)
            begin = time.monotonic()
            first = ask_worker(pair, "prefill", body | {"stop_conditions": {"max_tokens": 1}})
            _, params = output_of(first)
            if params is None:
                raise RuntimeError(f"the prefill worker handed nothing over: {json.dumps(first)[:500]}")
            tokens["disagg"], _ = output_of(ask_worker(pair, "backend", body | {"prefill_result": {"disaggregated_params": params}}))
            seconds = time.monotonic() - begin
    same = tokens["agg"] == tokens["disagg"]
    return {"tokens": len(tokens["disagg"]), "seconds_of_a_request": round(seconds, 3)} | ({} if same else {"ok": False, "error": f"tokens differ: {tokens}"})


def wait_for(context, kv, workers):
    """Until so many workers have told their generate endpoint."""
    folder = os.path.join(kv, "v1", "instances")
    deadline = time.monotonic() + max(1, min(60, context["left"]()))
    while time.monotonic() < deadline:
        with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):
            records = [json.load(open(os.path.join(folder, name), encoding="utf-8")) for name in os.listdir(folder)]
            if sum(record["endpoint"] == "generate" for record in records) >= workers:
                return
        time.sleep(0.1)
    raise RuntimeError(f"{workers} workers are not registered in time")
