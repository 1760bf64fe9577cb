"""Documents to packed ids, in this process or in others; what comes out does not depend on which."""

import array
import collections
import concurrent.futures
import multiprocessing
import os
import re
import signal
import threading

from .common import die
from .engines import Engine
from .split import draws
from .tokenizer import Tokenizer

# A batch is what a worker gets at once. A longer document is cut where a letter is followed by white space: there a
# piece begins whatever follows, so the ids are those of the whole.
BATCH_BYTES = 1 << 20
BATCH_DOCUMENTS = 4096
BORDER = re.compile(rb"(?<=[A-Za-z])(?=[ \t\r\n])")

# text: of one split, val or not. first: a document begins. fim: None, or where prefix and middle end.
Item = collections.namedtuple("Item", "text val first fim")


def chunks(text):
    start = 0
    while len(text) - start > BATCH_BYTES:
        border = BORDER.search(text, start + BATCH_BYTES)
        if not border:
            break
        yield text[start : border.start()]
        start = border.start()
    yield text[start:]


def fim_cuts(document, document_hash, rate):
    """Fill in the middle for this share of documents: None, or two cuts drawn evenly, at character borders."""
    if rate == 0:
        return None
    draw, *ends = draws(document_hash, b"fim", 3)
    if draw >= rate:
        return None
    cuts = sorted(int(end * (len(document) + 1)) for end in ends)
    for i, cut in enumerate(cuts):
        while cut < len(document) and document[cut] & 0xC0 == 0x80:
            cut += 1
        cuts[i] = cut
    return tuple(cuts)


class Coder:
    """Calling it with items gives the packed ids of the training and of the validation part."""

    def __init__(self, tokenizer, engine_name, document_token, fim_ids):
        self.engine = Engine(tokenizer, engine_name)
        self.typecode = tokenizer.typecode
        self.document_token, self.fim_ids = document_token, fim_ids

    def __call__(self, items):
        texts = []
        for item in items:
            if item.fim:
                a, b = item.fim
                # Prefix, suffix, middle: the order in which they are written.
                texts += item.text[:a], item.text[b:], item.text[a:b]
            else:
                texts.append(item.text)
        encoded = iter(self.engine.encode(texts))
        parts = array.array(self.typecode), array.array(self.typecode)
        for item in items:
            part = parts[item.val]
            if item.first:
                part.append(self.document_token)
            if item.fim:
                for token in self.fim_ids:
                    part.append(token)
                    part += next(encoded)
            else:
                part += next(encoded)
        return [part.tobytes() for part in parts]


coder = None


def start_worker(tokenizer_arguments, coder_arguments):
    """Runs in a new worker process; the parent alone answers the signals of a terminal, and it ends with the parent."""
    global coder
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=end_with, args=(multiprocessing.parent_process(),), daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    coder = Coder(Tokenizer(*tokenizer_arguments), *coder_arguments)


def end_with(parent):
    parent.join()
    os._exit(1)


def encode_in_worker(items):
    return coder(items)


def encode_batches(batches, tokenizer, coder_arguments, workers):
    """(batch, packed ids) of each batch (an object with `items`) in order. A few batches are on their way at a time."""
    if workers <= 1:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        here = Coder(tokenizer, *coder_arguments)
        for batch in batches:
            yield batch, here(batch.items)
        return
    # Processes that begin from nothing: a fork would inherit locks that threads of libraries hold.
    pool = concurrent.futures.ProcessPoolExecutor(
        workers, multiprocessing.get_context("spawn"), start_worker,
        ((tokenizer.label, tokenizer.raw, tokenizer.ranked), coder_arguments))
    waiting = collections.deque()
    try:
        for batch in batches:
            waiting.append((batch, pool.submit(encode_in_worker, batch.items)))
            batch.items = None
            if len(waiting) > 2 * workers + 2:
                batch, future = waiting.popleft()
                yield batch, future.result()
        while waiting:
            batch, future = waiting.popleft()
            yield batch, future.result()
    except concurrent.futures.process.BrokenProcessPool:
        die("a worker process has died", "is memory short? The same command with fewer --workers goes on")
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
