"""Words to the user: errors, notes, a progress bar."""

import sys
import time

START = time.time()
NEEDS_VENV = "make venv, then: .venv/bin/python scripts/prepare_data.py ..."


def comma(n):
    return format(n, ",")


def plural(n, word):
    return "%s %s%s" % (comma(n), word, "" if n == 1 else "s")


def die(message, hint):
    """The user's mistake: what is wrong, what to do, exit code 2."""
    Progress.clear()
    print("error: %s\nhint:  %s" % (message, hint), file=sys.stderr)
    sys.exit(2)


def say(word, message):
    Progress.clear()
    print("%-8s %s  (%.1f s)" % (word, message, time.time() - START), file=sys.stderr, flush=True)


def duration(seconds):
    minutes = int(seconds) // 60
    if minutes >= 60:
        return "%dh%02dm" % (minutes // 60, minutes % 60)
    return "%dm%02ds" % (minutes, seconds % 60) if minutes else "%ds" % seconds


class Progress:
    """A bar on stderr if that is a terminal: share of the input, text a second since this start, time to go."""

    drawn = False

    def __init__(self, word, total, done=0):
        self.word, self.total, self.first = word, max(total, 1), done
        self.start = self.last = time.time()
        self.text_bytes = 0

    @classmethod
    def clear(cls):
        if cls.drawn:
            sys.stderr.write("\r\033[K")
            cls.drawn = False

    def update(self, done, text_bytes):
        """done: bytes of the input files read, of `total`; text_bytes: of text dealt with since the last call."""
        self.text_bytes += text_bytes
        now = time.time()
        if now - self.last < 0.2 or not sys.stderr.isatty():
            return
        self.last = now
        share = min(done / self.total, 1)
        rate = (done - self.first) / (now - self.start)
        left = "eta " + duration((self.total - done) / rate) if rate > 0 and done < self.total else ""
        bar = ("#" * round(24 * share)).ljust(24, ".")
        speed = self.text_bytes / (now - self.start) / 1e6
        sys.stderr.write("\r\033[K%-8s %s %3d %%  %.1f MB/s  %s" % (self.word, bar, 100 * share, speed, left))
        sys.stderr.flush()
        Progress.drawn = True
