/* Which device a run computes on: run.device, and what this binary and this machine have. Floor 5. */
#ifndef TRAIN_MOE_DEVICE_H
#define TRAIN_MOE_DEVICE_H

#include "data/config.h"
#include "kernels/ops.h"

enum { DEVICE_TEXT_LEN = 384 };

/* Opens the device and describes it in text (DEVICE_TEXT_LEN): "cpu, 2 threads, AVX-512", "NVIDIA H200 (sm_90, ...".
 * "auto" takes a GPU where binary and machine have one; a binary that could, on a machine that cannot, ends the text
 * with the reason. What cannot be had: DIE. */
void device_open(Device *d, const Config *c, char *text);
/* The same choice (or a GPU in any case) for a plan, which opens nothing: memory and logits_bytes of the device that a run would take. A GPU
 * is one that is empty and takes what is expected (kernels/device_memory.h). */
void device_for_plan(Device *d, const Config *c, bool is_gpu);
void device_close(Device *d);

/* "CUDA 13.0, cuBLASLt 13.1.0", or "CPU only"; into text (DEVICE_TEXT_LEN), returned. */
const char *device_built_for(char *text);

#endif
