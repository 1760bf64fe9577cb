/* What a GPU could do at most. Floor 5. */
#ifndef TRAIN_MOE_PEAK_H
#define TRAIN_MOE_PEAK_H

/* Dense BF16 FLOP/s with f32 sums of a GPU by the name that CUDA gives it ("NVIDIA H100 80GB HBM3"), from NVIDIA's data
 * sheets, without sparsity: what model FLOPs utilisation is counted against, in every precision. 0 = not known, also
 * for a slice of a GPU (MIG): no utilisation rather than a wrong one. */
double peak_bf16_flops(const char *gpu_name);

#endif
