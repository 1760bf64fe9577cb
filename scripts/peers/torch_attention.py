#!/usr/bin/env python3
"""The peer of our attention: cuDNN's fused attention, as PyTorch calls it, measured beside ours in one run.

    build/bench/bench_cuda --json attention_ | python3 scripts/peers/torch_attention.py

Reads rows of results.jsonl from stdin, times cuDNN on the same shapes, and prints the rows with peer, peer_value and
ratio: BF16, causal, q and k 192 wide, v 128, random. The peer is the faster of two layouts: token by token, as tensors
lie in a model and ours do, and head by head. Its backward is free to add in any order; what it makes of
torch.use_deterministic_algorithms(True), which is what ours promises, stands in the note. FLOPs are counted as in
bench_attention.cu: half of the square, backward without the second product for the scores.

Before anything is timed, the result for two heads is held against unfused attention in f32.
"""
import json
import re
import sys

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

LAYOUTS = "by token", "by head"
QK, V = 192, 128
CALLS, ROUNDS = 10, 9  # as bench.cuh: the median of rounds of ten calls
DIFFERENCE_MAX = 0.02  # of BF16's outputs from f32, relative, over a whole tensor


def random_heads(layout, n_seqs, n_heads, seq_len, width):
    """(B, H, S, width)."""
    order = (n_seqs, n_heads, seq_len) if layout == "by head" else (n_seqs, seq_len, n_heads)
    x = torch.empty(*order, width, device="cuda", dtype=torch.bfloat16).uniform_(-1, 1)
    return x if layout == "by head" else x.transpose(1, 2)


def attend(backend, q, k, v):
    with sdpa_kernel([backend]):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def gradients(o, inputs, d_o):
    return torch.autograd.grad(o, inputs, d_o, retain_graph=True)


def difference(x, exact):
    return ((x.float() - exact).norm() / exact.norm()).item()


def check(q, k, v, d_o):
    """Largest relative difference from f32 of o, dq, dk and dv, of two heads of the first sequence."""
    few = [x[:1, :2].detach() for x in (q, k, v, d_o)]
    results = []
    for backend, dtype in (SDPBackend.CUDNN_ATTENTION, torch.bfloat16), (SDPBackend.MATH, torch.float32):
        *inputs, gradient = [x.to(dtype) for x in few]
        inputs = [x.requires_grad_() for x in inputs]
        o = attend(backend, *inputs)
        results.append([o.detach(), *gradients(o, inputs, gradient)])
    worst = max(difference(x, exact) for x, exact in zip(*results))
    if not worst < DIFFERENCE_MAX:
        sys.exit(f"cuDNN's attention is {worst:.3g} off f32, {DIFFERENCE_MAX} is allowed: nothing was timed")
    return worst


def seconds_of(work):
    """Of one call: CUDA events around CALLS of them."""
    work()
    times = []
    for _ in range(ROUNDS + 1):  # the first warms up
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(CALLS):
            work()
        end.record()
        end.synchronize()
        times.append(1e-3 * start.elapsed_time(end) / CALLS)
    return sorted(times[1:])[ROUNDS // 2]


class Peer:
    """cuDNN on one shape and layout, for both directions."""

    def __init__(self, layout, n_heads, n_seqs, seq_len):
        q, k = (random_heads(layout, n_seqs, n_heads, seq_len, QK) for _ in range(2))
        v, self.d_o = (random_heads(layout, n_seqs, n_heads, seq_len, V) for _ in range(2))
        self.worst = check(q, k, v, self.d_o)
        self.inputs = [x.requires_grad_() for x in (q, k, v)]
        self.square = n_seqs * n_heads * seq_len**2
        self.o = attend(SDPBackend.CUDNN_ATTENTION, *self.inputs)

    def forward(self):
        with torch.no_grad():
            attend(SDPBackend.CUDNN_ATTENTION, *self.inputs)

    def backward(self):
        gradients(self.o, self.inputs, self.d_o)

    def tflops(self, direction, deterministic=False):
        torch.use_deterministic_algorithms(deterministic)
        flops = self.square * (QK + V if direction == "forward" else 3 * QK + 2 * V)
        return 1e-12 * flops / seconds_of(getattr(self, direction))


def measured(layout, size, directions):
    """TFLOP/s and what is to be said of them, by direction."""
    peer = Peer(layout, *size)
    result = {}
    for direction in directions:
        note = f"torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}, {layout}, {peer.worst:.1e} off f32"
        if direction == "backward":
            note += f"; deterministic {peer.tflops(direction, deterministic=True):.1f}"
        result[direction] = peer.tflops(direction), note
    return result


def main():
    torch.manual_seed(0)
    torch.utils.deterministic.fill_uninitialized_memory = False  # or it is timed, too
    shapes = {}  # rows by direction, by heads, sequences, length
    for row in map(json.loads, filter(str.strip, sys.stdin)):
        direction, *size = re.fullmatch(r"attention_(\w+)/(\d+)(?:x(\d+))?x(\d+)", row["bench"]).groups(default="1")
        shapes.setdefault(tuple(map(int, size)), {})[direction] = row
    for size, rows in shapes.items():
        peers = [measured(layout, size, rows) for layout in LAYOUTS]
        for direction, row in rows.items():
            rate, note = max(peer[direction] for peer in peers)
            row.update(peer="cudnn", peer_value=round(rate, 1), ratio=round(row["value"] / rate, 3), note=note)
            print(json.dumps(row), flush=True)


main()
