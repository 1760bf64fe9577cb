/* How fast a GPU is, for forecasts: a table of known ones, or a JSON file. Floor 5.
 *
 *     {"version": 1, "name": "my GPU", "source": "make bench, 2026-12-01", "measured": true, "memory_gib": 139.8,
 *      "peak_bf16": 989, "peak_fp8": 1979, "gemm_bf16": 720, "gemm_fp8": 1180, "grouped_bf16": 415,
 *      "grouped_fp8": 1150, "attention_forward": 333, "attention_backward": 230, "hbm": 4104, "op_us": 5,
 *      "nvlink": 296, "ib": 40, "gpus_per_node": 8, "exchange_share": 0.12}
 *
 * The *_fp8 members may be left out or null: the GPU has no FP8. stream, gradient_fp8, and those of the last line,
 * which a plan of several GPUs needs, may be left out too. "//" is a comment. */
#ifndef TRAIN_MOE_RATES_H
#define TRAIN_MOE_RATES_H

#include <stdbool.h>

enum { RATES_NAME_LEN = 64, RATES_SOURCE_LEN = 256 };

/* What memory-bound ops attain of a copy: the mean of tests/bench/results.jsonl. */
#define SHARE_OF_COPY 0.85

/* TFLOP/s, decimal. An attained rate is never above its peak, so that no MFU is above 100 %. */
typedef struct {
    char name[RATES_NAME_LEN];
    char source[RATES_SOURCE_LEN]; /* where the numbers come from, in words */
    bool measured;                 /* on this GPU; else scaled from another's by published peaks */
    double memory_gib;             /* all of it, as CUDA or nvidia-smi say */
    double peak_bf16, peak_fp8;    /* dense, published; peak_fp8 0 = it has none */
    double gemm_bf16, gemm_fp8;    /* large products, forward and input gradient */
    double grouped_bf16, grouped_fp8;
    double attention_forward, attention_backward; /* causal; backward counts five products, the score once */
    double hbm;                                   /* GB/s, read plus written, of a copy */
    double stream;                                /* of memory-bound ops; 0 = SHARE_OF_COPY of hbm */
    double op_us;                                 /* what an op takes at the least, launch included */
    double gradient_fp8; /* FP8 weight gradients, their f32 sums in memory included; 0 = as gemm_fp8, and the traffic */
    double nvlink, ib;   /* GB/s a GPU sends to others of its node, and of other nodes; 0 = there is no such link */
    double gpus_per_node;
    double exchange_share; /* of the multiprocessors, that the exchange of tokens takes from products beside it, 0..1 */
} GpuRates;

/* "h200", "h100-80", ... in the order of the table; NULL behind the last. */
const char *rates_known(int index);

/* The rates of a known name, or of a file. Returns 0, or -1 with one line in err and a hint (ERR_LEN each). */
int rates_find(GpuRates *r, const char *name_or_file, char *err, char *hint);

#endif
