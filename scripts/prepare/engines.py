"""The three engines that apply a tokenizer, with equal ids.

    built-in     bpe.py: GPT-2's and DeepSeek-V3's kind, on any bytes; slow
    tokenizers   the library of Hugging Face: any tokenizer.json
    tiktoken     OpenAI's library, for rank files

Text that spells an added token stays text: the libraries are given none of them. Text that is not UTF-8 goes through
the built-in encoder, as in the trainer; where a tokenizer is not of its kind, the wrong bytes become U+FFFD."""

import array
import importlib.metadata
import json

from .bpe import GPT2_REGEX, alphabet
from .common import NEEDS_VENV, die


def library_tokenizer(tree):
    """The tokenizers library's object for a tokenizer.json, without what it would add to plain text."""
    import tokenizers

    plain = {**tree, "added_tokens": [], "post_processor": None, "truncation": None, "padding": None}
    return tokenizers.Tokenizer.from_str(json.dumps(plain))


def library_encode(library, texts):
    encode = getattr(library, "encode_batch_fast", library.encode_batch)
    return [encoding.ids for encoding in encode(texts, add_special_tokens=False)]


def version_of(engine):
    return "the built-in encoder" if engine == "built-in" else "%s %s" % (engine, importlib.metadata.version(engine))


def is_there(module):
    try:
        __import__(module)
    except ImportError:
        return False
    return True


def choose_engine(tokenizer, wanted="auto"):
    """The name of the engine. Bytes need no library; otherwise the fastest that is there."""
    fits = {
        "tiktoken": tokenizer.ranked and is_there("tiktoken"),
        "tokenizers": is_there("tokenizers"),
        "built-in": tokenizer.regexes is not None,
    }
    if wanted != "auto":
        if not fits[wanted]:
            die("--engine %s: not for %s, or not installed" % (wanted, tokenizer.label), NEEDS_VENV)
        return wanted
    if tokenizer.regexes is not None and not tokenizer.model["merges"]:
        return "built-in"
    for name, ok in fits.items():
        if ok:
            return name
    die("%s: its kind needs the tokenizers library" % tokenizer.label, NEEDS_VENV)


class Engine:
    """encode(texts) gives the packed ids of each."""

    def __init__(self, tokenizer, name):
        self.tokenizer, self.name, self.splitter = tokenizer, name, None
        if name == "tokenizers":
            self.library = library_tokenizer(tokenizer.tree)
        elif name == "tiktoken":
            import tiktoken

            added = set(tokenizer.added)
            letters = {letter: byte for byte, letter in alphabet().items()}
            ranks = {bytes(letters[c] for c in token): i for token, i in tokenizer.vocab.items() if token not in added}
            self.library = tiktoken.Encoding("ranks", pat_str=GPT2_REGEX, mergeable_ranks=ranks, special_tokens={})
        elif not tokenizer.model["merges"]:
            self.bytes_as_ids = tokenizer.encoder().byte_ids == list(range(256))

    def ids(self, text):
        """The ids of text that the library may not be given."""
        if self.tokenizer.encoder():
            return self.tokenizer.encoder().encode(text)
        return library_encode(self.library, [text.decode("utf-8", "replace")])[0]

    def encode(self, texts):
        typecode = self.tokenizer.typecode
        if self.name == "built-in":
            if not self.tokenizer.model["merges"] and self.bytes_as_ids:
                return [array.array(typecode, list(text)) for text in texts]
            return [array.array(typecode, self.ids(text)) for text in texts]
        results, strings, places = [None] * len(texts), [], []
        for i, text in enumerate(texts):
            try:
                strings.append(text.decode("utf-8"))
                places.append(i)
            except UnicodeDecodeError:
                results[i] = self.ids(text)
        if self.name == "tokenizers":
            found = library_encode(self.library, strings)
        else:
            found = [self.library.encode_ordinary(string) for string in strings]
        for i, ids in zip(places, found):
            results[i] = ids
        return [array.array(typecode, ids) for ids in results]
