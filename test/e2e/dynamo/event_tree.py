"""Follows a worker's KV events as a router does, into Dynamo's own tree.

  event_tree.py ENDPOINT

Prints a line once it is connected. Then one JSON line out for each JSON line in:
  {"after": id, "prompts": [[token, ...], ...]}   waits for event `id`, answers {"last": id, "blocks": [matching blocks, ...], "tree": [...]}
  {"dump": [router event, ...], "prompts": ...}   the same from a tree made of a dump
Events must have rising ids without a gap; otherwise it ends with an error.
"""
import json
import struct
import sys
import threading

import msgspec
import zmq
from dynamo._core import RadixTree, compute_block_hash_for_seq
from zmq.utils.monitor import recv_monitor_message

BLOCK = 16
TOPIC = b"kv-events"


class Follower:
    def __init__(self, endpoint: str) -> None:
        self.tree = RadixTree()
        self.last = 0
        self.error: str | None = None
        self.changed = threading.Condition()
        self.socket = zmq.Context.instance().socket(zmq.SUB)
        monitor = self.socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self.socket.subscribe(TOPIC)
        self.socket.connect(endpoint)
        if not monitor.poll(30_000):
            raise SystemExit(f"no handshake with {endpoint}")
        recv_monitor_message(monitor)
        self.socket.disable_monitor()
        threading.Thread(target=self.follow, daemon=True).start()

    def follow(self) -> None:
        while self.error is None:
            frames = self.socket.recv_multipart()
            with self.changed:
                try:
                    self.take(frames)
                except Exception as error:  # told with the next answer
                    self.error = repr(error)
                self.changed.notify_all()

    def take(self, frames: list[bytes]) -> None:
        topic, publisher, sequence, body = frames
        version, length = struct.unpack(">BI", body[:5])
        envelope = msgspec.msgpack.decode(body[5:])
        same = (topic, struct.unpack(">Q", publisher)[0], struct.unpack(">Q", sequence)[0]) == (TOPIC, envelope["publisher_id"], envelope["sequence"])
        if version != 1 or length != len(body) - 5 or not same:
            raise ValueError(f"frames and envelope differ: {frames[:3]} {envelope['publisher_id']} {envelope['sequence']}")
        for router_event in msgspec.msgpack.decode(envelope["payload"]):
            event = router_event["event"]
            if event["event_id"] != self.last + 1:
                raise ValueError(f"event {event['event_id']} after {self.last}")
            self.last += 1
            self.tree.apply_event(1, json.dumps(event).encode())

    def wait(self, after: int) -> None:
        with self.changed:
            if not self.changed.wait_for(lambda: self.error or self.last >= after, 60):
                raise SystemExit(f"event {after} did not come, the last is {self.last}")
        if self.error:
            raise SystemExit(self.error)


def answer(tree: RadixTree, last: int, prompts: list[list[int]]) -> None:
    blocks = [max(tree.find_matches(compute_block_hash_for_seq(prompt, BLOCK)).scores.values(), default=0) for prompt in prompts]
    edges = set()
    for text in tree.dump_tree_as_events():
        stored = json.loads(text)["event"]["data"]["stored"]
        parent = stored["parent_hash"]
        for block in stored["blocks"]:
            edges.add(f"{parent} {block['block_hash']} {block['tokens_hash']}")
            parent = block["block_hash"]
    print(json.dumps({"last": last, "blocks": blocks, "tree": sorted(edges)}), flush=True)


follower = Follower(sys.argv[1])
print(json.dumps({"connected": True}), flush=True)
for line in sys.stdin:
    question = json.loads(line)
    if "dump" in question:
        copy = RadixTree()
        for router_event in question["dump"]:
            copy.apply_event(1, json.dumps(router_event["event"]).encode())
        answer(copy, -1, question["prompts"])
    else:
        follower.wait(question["after"])
        answer(follower.tree, follower.last, question["prompts"])
