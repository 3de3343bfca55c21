"""A small streaming server over OpenVINO GenAI's continuous batching, which ships without one, so that it can be measured like the others.

usage: openvino_server.py MODEL.gguf --port P --cache DIR
Prompts are token ids. The converted model is kept in DIR. Needs openvino-genai and aiohttp.
"""
import argparse
import asyncio
import json
import os
import queue
import shutil
import threading
import time

import numpy
import openvino
import openvino_genai as genai
from aiohttp import web

parser = argparse.ArgumentParser()
parser.add_argument("model")
parser.add_argument("--port", type=int, required=True)
parser.add_argument("--cache", required=True)
args = parser.parse_args()


def converted(gguf: str) -> str:
    """The library converts a GGUF while loading it and writes the result beside the file: done once on a link in the cache."""
    folder = os.path.join(args.cache, os.path.basename(gguf).removesuffix(".gguf"))
    if not os.path.exists(os.path.join(folder, "openvino_model.xml")):
        os.makedirs(folder, exist_ok=True)
        link = os.path.join(folder, os.path.basename(gguf))
        if not os.path.exists(link):
            shutil.copyfile(gguf, link)
        genai.LLMPipeline(link, "CPU", enable_save_ov_model=True)
        os.remove(link)
    return folder


scheduler = genai.SchedulerConfig()
scheduler.cache_size = 2
scheduler.max_num_seqs = 256
scheduler.enable_prefix_caching = True
scheduler.dynamic_split_fuse = True
pipeline = genai.ContinuousBatchingPipeline(converted(args.model), scheduler, "CPU")
inbox: queue.Queue = queue.Queue()


def engine() -> None:
    live: dict = {}
    number = 0
    while True:
        while not live or not inbox.empty():
            prompt, config, deliver = inbox.get()
            number += 1
            ids = openvino.Tensor(numpy.array([prompt], dtype=numpy.int64))
            live[number] = (pipeline.add_request(number, ids, config), deliver)
        pipeline.step()
        for key, (handle, deliver) in list(live.items()):
            if handle.can_read():
                for output in handle.read().values():
                    deliver(list(output.generated_ids))
            if handle.get_status() != genai.GenerationStatus.RUNNING:
                deliver(None)
                del live[key]
        time.sleep(0.0002)  # lets the thread that writes the streams have the interpreter


async def completions(request: web.Request) -> web.StreamResponse:
    body = await request.json()
    config = genai.GenerationConfig()
    config.max_new_tokens = body["max_tokens"]
    config.ignore_eos = bool(body.get("ignore_eos"))
    config.do_sample = False
    config.apply_chat_template = False
    tokens: asyncio.Queue = asyncio.Queue()
    loop = asyncio.get_running_loop()
    inbox.put((body["prompt"], config, lambda ids: loop.call_soon_threadsafe(tokens.put_nowait, ids)))
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    made = 0
    while (ids := await tokens.get()) is not None:
        made += len(ids)
        event = {"choices": [{"index": 0, "text": " ".join(map(str, ids)), "finish_reason": None}]}
        await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
    usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": made}
    await response.write(b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\ndata: [DONE]\n\n")
    return response


async def health(_: web.Request) -> web.Response:
    return web.Response(text="ok")


threading.Thread(target=engine, daemon=True).start()
app = web.Application(client_max_size=1 << 26)
app.router.add_post("/v1/completions", completions)
app.router.add_get("/health", health)
web.run_app(app, host="127.0.0.1", port=args.port, print=None)
