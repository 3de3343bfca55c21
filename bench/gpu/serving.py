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

import tiny
from kit import ROOT
from runner import Failed, tail

PROMPT = list(range(1, 200)) + [7, 9, 11]
POLL_S = 0.05
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def key():
    """The licence key of the environment, else the free one that README.md gives."""
    given = os.environ.get("LAYERSCALE_LICENSE_KEY")
    if given:
        return given
    with open(os.path.join(ROOT, "README.md"), encoding="utf-8") as text:
        found = re.search(r"LSK-[A-Za-z0-9_.-]{40,}", text.read())
    if found is None:
        raise Failed("LAYERSCALE_LICENSE_KEY is not set and README.md gives no key")
    return found.group(0)


def model(context):
    """The small model's folder; its sizes in tokens and sequences."""
    folder = os.path.join(context.folder, "tiny")
    if not os.path.exists(os.path.join(folder, "generation_config.json")):
        tiny.make(folder, context.simulate)
    return folder


@contextlib.contextmanager
def program(context, arguments, environment=None, ready=r"http://[^\s\"]+:(\d+)"):
    """Runs the program until the block ends. Yields the match of `ready` in its output, once it has come."""
    full = dict(context.env, LAYERSCALE_LICENSE_KEY=key(), **(environment or {}))
    process = context.runner.start([context.path("layerscale"), *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", env=full)
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
        seen.wait(max(0.5, context.runner.left()))
        if not found:
            raise Failed(f"layerscale {arguments[0]} {'ended' if process.poll() is not None else 'was not ready in time'}: {tail(''.join(lines))}")
        yield found[0]
    except Exception as error:
        # What the program said last belongs to whatever went wrong with it.
        raise error if isinstance(error, Failed) and lines and lines[-1].strip() in str(error) else Failed(f"{type(error).__name__}: {error}; layerscale {arguments[0]} said: {tail(''.join(lines), 500)}") from error
    finally:
        context.runner.stop(process, min(10, max(0.5, context.runner.left())))
        reader.join(2)


def completion(context, port, body):
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"})
    while True:
        try:
            with DIRECT.open(request, timeout=max(1, context.runner.left())) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            text = error.read().decode("utf-8", "replace")
            # The address is open while weights are loaded.
            if error.code != 503 or context.runner.left() < 1:
                raise Failed(f"status {error.code}: {tail(text, 300)}") from error
            time.sleep(POLL_S)


def aggregated(context, outcome):
    """Greedy tokens and logprobs of serve on both devices: equal where the best token leads clearly."""
    folder, count = model(context), 3 if context.simulate else 8
    sizes = ["--max-num-seqs", "2" if context.simulate else "16", "--ctx", "512" if context.simulate else "4096"]
    answers = {}
    for device in ("cpu", "cuda"):
        began = time.monotonic()
        with program(context, ["serve", "--model", folder, "--device", device, "--port", "0", "--served-model-name", "tiny", "--kv-cache-dtype", "bf16", *sizes]) as ready:
            ask = lambda prompt, tokens: completion(context, ready.group(1), {"model": "tiny", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "logprobs": 5, "ignore_eos": True})["choices"][0]
            answers[device] = [ask(PROMPT[: 5 + 19 * i], 1) for i in range(count)] + [ask(PROMPT[:10] if context.simulate else PROMPT, 4 if context.simulate else 32)]
        outcome[f"{device}_seconds"] = round(time.monotonic() - began, 2)
    worst, same, shared = 0.0, 0, 0
    for got, want in zip(answers["cuda"][:count], answers["cpu"][:count]):
        here, there = got["logprobs"]["top_logprobs"][0], want["logprobs"]["top_logprobs"][0]
        both = [token for token in here if token in there]
        shared += len(both)
        worst = max([worst, *(abs(here[token] - there[token]) for token in both)])
        same += got["text"] == want["text"]
    outcome.update(worst_logprob_difference=round(worst, 4), same_first_tokens=f"{same} of {count}", shared_alternatives=f"{shared} of {5 * count}", text=answers["cuda"][count]["text"][:60])
    if not (worst < 0.25 and same * 4 >= count * 3 - 1 and shared >= 3 * count):
        raise Failed("GPU and CPU differ")


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


def ask_worker(context, kv, component, body):
    """One request over the request plane, as a frontend sends it; the items of its answer."""
    folder = os.path.join(kv, "v1", "instances")
    transport = None
    for name in os.listdir(folder):
        with open(os.path.join(folder, name), encoding="utf-8") as text:
            record = json.load(text)
        if record["endpoint"] == "generate" and record["component"] == component:
            transport = re.match(r"^(.*):(\d+)/(.*)$", record["transport"]["tcp"])
    if transport is None:
        raise Failed(f"no instance of {component}")
    host, port, path = transport.groups()
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection((host, int(port)), 10) as requests:
        listener.settimeout(max(1, context.runner.left()))
        info = {"address": f"127.0.0.1:{listener.getsockname()[1]}", "subject": "1", "context": "gpu-1", "stream_type": "response"}
        control = {"id": "gpu-1", "request_type": "single_in", "response_type": "many_out", "payload_codec": "json", "connection_info": {"transport": "tcp_server", "info": json.dumps(info)}}
        payload = two_part(json.dumps(control).encode(), json.dumps(body).encode())
        encoded = path.encode()
        requests.sendall(struct.pack(">H", len(encoded)) + encoded + struct.pack(">H", 2) + b"{}" + struct.pack(">I", len(payload)) + payload)
        answer, _ = listener.accept()
        with answer:
            answer.settimeout(max(1, context.runner.left()))
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
        raise Failed(f"no output in {json.dumps(items)[:500]}")
    return tokens, params


def disaggregated(context, outcome):
    """The same tokens from a prefill and a decode worker as from an aggregated one; the prompt's KV goes GPU - host - TCP - host - GPU."""
    folder = model(context)
    prompt, more = (PROMPT[:40], 4) if context.simulate else (PROMPT, 24)
    body = {"token_ids": prompt, "stop_conditions": {"max_tokens": more, "ignore_eos": True}, "sampling_options": {"temperature": 0}, "output_options": {}, "eos_token_ids": []}
    sizes = ["--max-num-seqs", "2" if context.simulate else "8", "--ctx", "512" if context.simulate else "4096", "--max-total-tokens", "1024" if context.simulate else "65536", "--gpu-memory-utilization", "0.3"]
    tokens = {}
    with tempfile.TemporaryDirectory(dir=context.folder) as home:
        def worker(mode, kv):
            environment = {"DYN_DISCOVERY_BACKEND": "file", "DYN_FILE_KV": kv, "DYN_TCP_RPC_HOST": "127.0.0.1", "POD_IP": "127.0.0.1", "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "0"}
            arguments = ["dynamo", "--model", folder, "--device", "cuda:0", "--served-model-name", "tiny", *sizes, "--disaggregation-mode", mode, "--component", "prefill" if mode == "prefill" else "backend"]
            return program(context, arguments, environment, ready=r"worker ready")

        alone, pair = os.path.join(home, "alone"), os.path.join(home, "pair")
        with worker("agg", alone):
            wait_for(context, alone, 1)
            begin = time.monotonic()
            tokens["agg"], _ = output_of(ask_worker(context, alone, "backend", body))
            outcome["aggregated"] = {"tokens": len(tokens["agg"]), "seconds_of_a_request": round(time.monotonic() - begin, 3)}
        with worker("prefill", pair), worker("decode", pair):
            wait_for(context, pair, 2)
            begin = time.monotonic()
            first = ask_worker(context, pair, "prefill", body | {"stop_conditions": {"max_tokens": 1}})
            _, params = output_of(first)
            if params is None:
                raise Failed(f"the prefill worker handed nothing over: {json.dumps(first)[:500]}")
            items = ask_worker(context, pair, "backend", body | {"prefill_result": {"disaggregated_params": params}})
            tokens["disagg"], _ = output_of(items)
            seconds = time.monotonic() - begin
    usage = next((found for item in reversed(items) if (found := ((item.get("data") or {}).get("data") or {}).get("completion_usage"))), {})
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    outcome["disaggregated"] = {"tokens": len(tokens["disagg"]), "seconds_of_a_request": round(seconds, 3), "prompt_tokens_taken": cached}
    if len(tokens["disagg"]) != more or len(tokens["agg"]) != more:
        raise Failed(f"expected {more} tokens: {tokens}")
    if tokens["agg"] != tokens["disagg"]:
        raise Failed(f"tokens differ: {tokens}")
    # What fails on the way is computed where it is needed, with the same tokens: only this tells that the KV came over.
    if not cached or cached < len(prompt) - 16:
        raise Failed(f"of {len(prompt)} prompt tokens {cached} were taken from the prefill worker")


def wait_for(context, kv, workers):
    """Until so many workers have told their generate endpoint."""
    folder = os.path.join(kv, "v1", "instances")
    while context.runner.left() > 0:
        with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):
            records = []
            for name in os.listdir(folder):
                with open(os.path.join(folder, name), encoding="utf-8") as text:
                    records.append(json.load(text))
            if sum(record["endpoint"] == "generate" for record in records) >= workers:
                return
        time.sleep(POLL_S)
    raise Failed(f"{workers} workers are not registered in time")
