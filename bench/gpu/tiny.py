"""A small random model in the Hugging Face layout, made on the spot."""
import json
import os
import random
import struct

TEXTS = ["<|endoftext|>", "<|bos|>", "<|im_start|>", "<|im_end|>"]
VOCAB = 320
SHAPE = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "intermediate_size": 512, "vocab_size": VOCAB}
SIMULATED = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96}
TEMPLATE = "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"


def byte_alphabet():
    """Printable stand-ins of the 256 bytes, as byte-level tokenizers have them."""
    out, extra = [], 0
    for byte in range(256):
        printable = 0x21 <= byte <= 0x7E or 0xA1 <= byte <= 0xAC or byte >= 0xAE
        out.append(chr(byte if printable else 0x100 + extra))
        extra += not printable
    return out


def tokenizer():
    vocab = {token: i for i, token in enumerate(byte_alphabet() + TEXTS)}
    for i in range(len(vocab), VOCAB):
        vocab[f"[filler{i}]"] = i
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    added = [{"id": 256 + i, "content": text, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True} for i, text in enumerate(TEXTS)]
    model = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False, "vocab": vocab, "merges": []}
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None, "pre_tokenizer": level, "post_processor": None, "decoder": {**level, "add_prefix_space": True}, "model": model}


def bf16(count, exponent, rng):
    """Numbers between 2^exponent and 2^(exponent + 1) of either sign, little-endian."""
    bits = exponent + 127
    low = bytes((bits & 1) << 7 | (byte & 127) for byte in range(256))
    high = bytes((byte & 128) | bits >> 1 for byte in range(256))
    out = bytearray(2 * count)
    out[0::2] = rng.randbytes(count).translate(low)
    out[1::2] = rng.randbytes(count).translate(high)
    return bytes(out)


def make(folder, simulate=False):
    """Writes the model; deterministic. A smaller one for the simulator."""
    os.makedirs(folder, exist_ok=True)
    rng = random.Random(7)
    sizes = SHAPE | (SIMULATED if simulate else {})
    hidden, wide, dim = sizes["hidden_size"], sizes["intermediate_size"], sizes["head_dim"]
    q, kv = sizes["num_attention_heads"] * dim, sizes["num_key_value_heads"] * dim
    tensors = {"model.embed_tokens.weight": ([VOCAB, hidden], -1), "model.norm.weight": ([hidden], 0), "lm_head.weight": ([VOCAB, hidden], -3)}
    for layer in range(sizes["num_hidden_layers"]):
        p = f"model.layers.{layer}."
        tensors |= {p + "input_layernorm.weight": ([hidden], 0), p + "post_attention_layernorm.weight": ([hidden], 0), p + "self_attn.q_norm.weight": ([dim], 0), p + "self_attn.k_norm.weight": ([dim], 0)}
        tensors |= {p + "self_attn.q_proj.weight": ([q, hidden], -5), p + "self_attn.k_proj.weight": ([kv, hidden], -5), p + "self_attn.v_proj.weight": ([kv, hidden], -5), p + "self_attn.o_proj.weight": ([hidden, q], -5)}
        tensors |= {p + "mlp.gate_proj.weight": ([wide, hidden], -5), p + "mlp.up_proj.weight": ([wide, hidden], -5), p + "mlp.down_proj.weight": ([hidden, wide], -5)}
    header, data, at = {}, [], 0
    for name, (shape, exponent) in tensors.items():
        count = 1
        for n in shape:
            count *= n
        piece = bf16(count, exponent, rng) if len(shape) > 1 else struct.pack("<H", 0x3F80) * count
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + len(piece)]}
        at += len(piece)
        data.append(piece)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(os.path.join(folder, "model.safetensors"), "wb") as out:
        out.write(struct.pack("<Q", len(text)) + text + b"".join(data))
    config = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu", "max_position_embeddings": 8192, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False,
              "attention_bias": False, "torch_dtype": "bfloat16", "bos_token_id": 257, "eos_token_id": 259, **sizes}
    files = {"config.json": config, "tokenizer.json": tokenizer(), "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": TEXTS[1], "eos_token": TEXTS[3], "pad_token": TEXTS[0], "add_bos_token": False, "model_max_length": 8192, "chat_template": TEMPLATE},
             "generation_config.json": {"eos_token_id": 259}}
    for name, content in files.items():
        with open(os.path.join(folder, name), "w", encoding="utf-8") as out:
            json.dump(content, out)
    return folder
