"""What n-grams of bytes reach on held-out text: numbers to measure a model against."""

import collections
import math


def ngram_counts(data, n):
    return collections.Counter(zip(*(data[i:] for i in range(n))))


def ngram_ladder(train, val, orders=(2, 3, 4)):
    """Held-out nats a byte of n-grams with Witten-Bell smoothing. With N(h) and T(h) the occurrences of the context h
    and the kinds of bytes seen after it, p(c|h) = (count(hc) + T(h) p(c|h')) / (N(h) + T(h)), h' being h without its
    first byte, down to 1/256."""
    seen = [ngram_counts(train, n) for n in range(1, max(orders) + 1)]
    contexts = []
    for counts in seen:
        totals, kinds = collections.defaultdict(int), collections.defaultdict(int)
        for gram, count in counts.items():
            totals[gram[:-1]] += count
            kinds[gram[:-1]] += 1
        contexts.append((totals, kinds))

    def probability(gram):
        p = 1 / 256
        for n in range(1, len(gram) + 1):
            part = gram[-n:]
            totals, kinds = contexts[n - 1]
            n_kinds = kinds.get(part[:-1], 0)
            if n_kinds:
                p = (seen[n - 1].get(part, 0) + n_kinds * p) / (totals[part[:-1]] + n_kinds)
        return p

    ladder = {}
    for n in orders:
        counts = ngram_counts(val, n)
        nats = -sum(count * math.log(probability(gram)) for gram, count in counts.items())
        if counts:
            ladder["bigram" if n == 2 else "%d-gram" % n] = round(nats / sum(counts.values()), 4)
    return ladder


