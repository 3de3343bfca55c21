"""Golden data for small made-up tokenizers: the features that the three real ones do not use. Used by tokenizer_golden.py."""
import json
import random

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = ["the quick brown fox, jumps over 12 lazy dogs. 1999!", " don't you know? it's 3.14 -- ok...", "(a+b)*c == 42; x_1 -> y", "Hello World hello the there 100 200", "a  b   c\n\nd", "né é ü 你好 好"] * 20
TEXTS = [
    "", " ", "the quick", " the  quick  ", "don't 1999 12 3.14", "(a+b)*c == 42;", "x_1->y", "Hello hello HELLO", "né 你好吗", "a\n\nd", "<s>the</s>", "the <s> quick", "the<s>quick</s>", "<mask>the <mask> x<mask>", "  <mask>  the",
    "wordword word a word", "word", "xword wordx", "Word WORD word", "日本語 ½ ② 3²", "...!!!???", "--a--b--", " \n ", "▁the▁", "😀", "é\u0301", "\ufeffthe", "a--b---c", "1a22b333c4444", "the\tquick\r\nbrown", "the 你 the", "\u00a0the\u3000quick",
]
BYTES = [f"<0x{b:02X}>" for b in range(256)]


def trained(specials, **model):
    tok = Tokenizer(models.BPE(**model))
    tok.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=420 + len(specials), special_tokens=specials, show_progress=False))
    return tok


def with_model(base, changes):
    """The same merges under another model setting."""
    data = json.loads(base.to_str())
    data["model"].update(changes)
    return Tokenizer.from_str(json.dumps(data))


def tokenizers():
    spm = trained(["<unk>", "<s>", "</s>", *BYTES], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    renamed = json.loads(spm.to_str())
    mark = lambda token: token.replace(" ", "\u2581")  # noqa: E731
    renamed["model"]["vocab"] = {mark(token): i for token, i in renamed["model"]["vocab"].items()}
    renamed["model"]["merges"] = [[mark(a), mark(b)] for a, b in renamed["model"]["merges"]]
    # The trainer makes them control tokens; in real files they are plain vocabulary.
    renamed["added_tokens"] = [token for token in renamed["added_tokens"] if token["content"] not in BYTES]
    spm = Tokenizer.from_str(json.dumps(renamed))
    spm.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    spm.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    spm.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", spm.token_to_id("<s>"))])
    yield "spm", spm
    for scheme in ["always", "first", "never"]:
        meta = Tokenizer.from_str(spm.to_str())
        meta.normalizer = None
        meta.pre_tokenizer = pre_tokenizers.Metaspace(replacement="\u2581", prepend_scheme=scheme, split=scheme != "never")
        meta.decoder = decoders.Metaspace(replacement="\u2581", prepend_scheme=scheme, split=True)
        yield f"metaspace-{scheme}", meta
    base = trained(["<unk>", "<s>", "</s>"], unk_token="<unk>")
    yield "unk", with_model(base, {"fuse_unk": False})
    yield "unk-fused", with_model(base, {"fuse_unk": True})
    yield "dropped", with_model(base, {"unk_token": None})
    yield "ignore-merges", with_model(base, {"ignore_merges": True})
    splits = {
        "digits": pre_tokenizers.Digits(False), "digits-each": pre_tokenizers.Digits(True), "whitespace": pre_tokenizers.Whitespace(), "whitespace-split": pre_tokenizers.WhitespaceSplit(),
        "delimiter": pre_tokenizers.CharDelimiterSplit("e"), "bert": pre_tokenizers.BertPreTokenizer(),
    }
    for behavior in ["removed", "isolated", "merged_with_previous", "merged_with_next", "contiguous"]:
        splits[f"punctuation-{behavior}"] = pre_tokenizers.Punctuation(behavior)
        for invert in [False, True]:
            splits[f"split-{behavior}-{invert}"] = pre_tokenizers.Split(Regex(r"[a-c\s]|\d{1,3}|-"), behavior, invert)
        splits[f"split-string-{behavior}"] = pre_tokenizers.Split("--", behavior)
    for name, split in splits.items():
        tok = Tokenizer.from_str(base.to_str())
        tok.pre_tokenizer = split
        yield name, tok
    added = Tokenizer.from_str(base.to_str())
    added.normalizer = normalizers.Sequence([normalizers.Lowercase(), normalizers.Replace("$", "$&"), normalizers.NFC()])
    added.add_special_tokens([AddedToken("<mask>", lstrip=True, rstrip=True, normalized=False), AddedToken("<pad>", normalized=False)])
    added.add_tokens([AddedToken("word", single_word=True, normalized=True), AddedToken("好", normalized=False), AddedToken("--", rstrip=True, normalized=False), AddedToken("---", normalized=False)])
    yield "added", added
    gpt2 = Tokenizer(models.BPE())
    gpt2.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=True)
    gpt2.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=420, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=["<s>"], show_progress=False))
    gpt2.decoder = decoders.ByteLevel()
    gpt2.post_processor = processors.RobertaProcessing(("<s>", 0), ("<s>", 0))
    yield "gpt2", gpt2


def golden(tok):
    rng = random.Random(3)
    top = max(tok.get_vocab(with_added_tokens=True).values()) + 1
    encoded = [tok.encode(text, add_special_tokens=False).ids for text in TEXTS]
    lists = [*encoded, *([rng.randrange(top) for _ in range(n)] for n in [1, 1, 2, 2, 3, 5, 8, 13])]
    # Runs that mix valid and invalid bytes are decoded otherwise here, on purpose.
    if tok.token_to_id("<0x00>") is not None:
        byte_ids = {tok.token_to_id(token) for token in BYTES}
        lists = [[i for i in ids if i not in byte_ids] if ids not in encoded else ids for ids in lists]
        lists += [[tok.token_to_id(f"<0x{b:02X}>") for b in run] for run in [[0xff], [0x80, 0x81], [0xe4, 0xbd], [0xc0, 0xaf], [0xf0, 0x9f, 0x98, 0x80], [0xed, 0xa0, 0x80], [0x41, 0x0a]]]
    return {
        "json": json.loads(tok.to_str()), "encoded": encoded, "special": [tok.encode(text).ids for text in TEXTS[:6]],
        "decoded": [[ids, tok.decode(ids, skip_special_tokens=True), tok.decode(ids, skip_special_tokens=False)] for ids in lists],
    }


def synthetic_golden(_rows):
    """Tokenizers that share a model carry it once."""
    models_seen, out = [], {}
    for name, tok in tokenizers():
        entry = golden(tok)
        model = entry["json"].pop("model")
        core = {"vocab": model.pop("vocab"), "merges": model.pop("merges")}
        if core not in models_seen:
            models_seen.append(core)
        entry["json"]["model"] = {**model, "core": models_seen.index(core)}
        out[name] = entry
    return {"texts": TEXTS, "cores": models_seen, "tokenizers": out}
