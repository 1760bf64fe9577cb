/* The part of tune that is written in CUDA. */
#ifndef TRAIN_MOE_TUNE_GEMM_H
#define TRAIN_MOE_TUNE_GEMM_H

#include "kernels/cuda/gemm_table.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Times every GEMM that was prepared, prints a line for each, and puts the fastest algorithms into rows. */
void tune_gemms(GemmRows *rows);

#ifdef __cplusplus
}
#endif
#endif
