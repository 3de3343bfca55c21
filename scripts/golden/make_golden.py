#!/usr/bin/env python3
"""Reference data from transformers + torch (CPU, float32) for the engine's correctness tests: test/golden/<model>.json.

usage: make_golden.py --bun BUN --gguf SmolLM2-135M-Instruct.Q4_1.gguf [--only NAME ...]
needs: torch, transformers, safetensors; run from the repository root.

Each file holds, for prompts of 1, 15, 16, 17, 33 and 300 tokens, the greedy continuation of 64 tokens and, teacher-forced on it, the top 20
(id, natural-log probability) that predict each of the 64 tokens, with the gap between the first two. Tiny models are written by
tiny_models.ts; the SmolLM2 variants by scripts/models/convert.ts, so that a quantised file is compared on its dequantised weights.
"""
import argparse
import hashlib
import json
import pathlib
import subprocess
import tempfile

import torch
import transformers

PROMPT_LENGTHS = (1, 15, 16, 17, 33, 300)
STEPS = 64
TOP = 20
OUT = pathlib.Path("test/golden")

TEXT = """The lighthouse keeper climbed the stairs every evening before dusk, carrying a lamp, a loaf of bread and a small book with a blue cover.
From the top he could see the harbour, the market square and, on clear days, the white cliffs on the other side of the bay. In 1847 a storm took
the roof, and for 3 weeks he slept under a sail. "You should come down," the baker said. "Nobody sails in this weather." But ships did come: a
grain ship from the north, two fishing boats, and once a navy cutter whose captain thanked him with a barrel of cider. He wrote each of them into
the book: the date, the wind, the number of sails. Years later his granddaughter found it and counted 2,316 entries. She learned from it how the
weather had changed, which months were the most dangerous, and that her grandfather had never missed a night. The museum in the city asked for
the book, and she gave it to them on one condition: that the page of the great storm would always lie open, next to the lamp, so that every child
who visited could read what he had written there in a careful hand. It said: the sea was higher than the wall, the light did not go out, and
nobody was lost. Scientists have since used the entries to check their models of the climate of that coast. They agree with the tree rings.
The lamp is still there, and on the first Sunday of the year somebody climbs the stairs to light it."""


def digest(paths):
    sha = hashlib.sha256()
    for path in paths:
        sha.update(path.read_bytes())
    return sha.hexdigest()


def load(directory):
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    return model.eval()


@torch.inference_mode()
def greedy(model, prompt):
    ids = torch.tensor([prompt])
    cache, out, feed = None, [], ids
    for _ in range(STEPS):
        result = model(feed, past_key_values=cache, use_cache=True)
        cache = result.past_key_values
        out.append(int(result.logits[0, -1].argmax()))
        feed = torch.tensor([[out[-1]]])
    return out


@torch.inference_mode()
def forced(model, prompt, continuation):
    """(STEPS, vocab) log-probabilities that predict each token of the continuation, from one pass without a cache."""
    logits = model(torch.tensor([prompt + continuation[:-1]]), use_cache=False).logits[0, len(prompt) - 1:]
    return torch.log_softmax(logits.double(), dim=-1)


def record(model, prompt):
    continuation = greedy(model, prompt)
    logprobs = forced(model, prompt, continuation)
    # The cached and the uncached pass differ in the last bits; a greedy token must still be the maximum but for a near-tie.
    for step, token in enumerate(continuation):
        assert float(logprobs[step].max() - logprobs[step, token]) < 1e-4, (len(prompt), step)
    values, ids = logprobs.topk(TOP, dim=-1)
    top = [[x for pair in zip(i, (round(v, 5) for v in vs)) for x in pair] for i, vs in zip(ids.tolist(), values.tolist())]
    gaps = [round(v[0] - v[1], 5) for v in values.tolist()]
    return {"tokens": prompt, "greedy": continuation, "gaps": gaps, "top": top}


def write(name, source, model, prompts):
    data = {
        "model": name,
        "source": source,
        "reference": f"transformers {transformers.__version__}, torch {torch.__version__.split('+')[0]}, float32",
        "invFreq": [float(x) for x in model.model.rotary_emb.inv_freq],
        "prompts": [record(model, prompt) for prompt in prompts],
    }
    OUT.mkdir(parents=True, exist_ok=True)
    lines = json.dumps({**data, "prompts": []}, separators=(",", ":"))[:-2]
    body = ",\n".join(json.dumps(prompt, separators=(",", ":")) for prompt in data["prompts"])
    (OUT / f"{name}.json").write_text(f"{lines}\n{body}\n]}}\n")
    print(name, [len(p["tokens"]) for p in data["prompts"]], "smallest gap", min(min(p["gaps"]) for p in data["prompts"]), flush=True)


def tiny_prompts(vocab, seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocab, (length,), generator=generator).tolist() for length in PROMPT_LENGTHS]


def text_prompts(directory):
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    ids = tokenizer(TEXT.replace("\n", " "), add_special_tokens=False).input_ids
    assert len(ids) >= max(PROMPT_LENGTHS), len(ids)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    chat = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=True)["input_ids"]
    return [ids[:length] for length in PROMPT_LENGTHS] + [list(chat)]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--bun", required=True)
    parser.add_argument("--gguf", required=True, type=pathlib.Path)
    parser.add_argument("--only", nargs="*", default=None, help="names of the files to make, e.g. tiny-llama smollm2-bf16")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    wanted = lambda name: args.only is None or name in args.only
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as scratch:
        scratch = pathlib.Path(scratch)
        run = lambda *command: subprocess.run([args.bun, *map(str, command)], check=True)
        run("scripts/golden/tiny_models.ts", scratch / "tiny")
        for seed, directory in enumerate(sorted((scratch / "tiny").iterdir())):
            if wanted(directory.name):
                model = load(directory)
                write(directory.name, digest(sorted(directory.glob("*.safetensors"))), model, tiny_prompts(model.config.vocab_size, seed))
        source = digest([args.gguf])
        for variant in ("q4_1", "q4_0", "q8_0", "bf16", "f16"):
            name = f"smollm2-{variant}"
            if not wanted(name):
                continue
            file, directory = args.gguf, scratch / variant
            if variant in ("q4_0", "q8_0"):
                file = scratch / f"{variant}.gguf"
                run("scripts/models/convert.ts", args.gguf, file, variant)
            run("scripts/models/convert.ts", file, directory, f"hf-{variant}" if variant in ("bf16", "f16") else "hf-f32")
            write(name, source, load(directory), text_prompts(directory))


main()
