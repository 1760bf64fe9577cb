/* Which device a run computes on: run.device, and what this binary and this machine have. Floor 5. */
#ifndef TRAIN_MOE_DEVICE_H
#define TRAIN_MOE_DEVICE_H

#include "data/config.h"
#include "kernels/gpu_health.h"
#include "kernels/ops.h"

enum { DEVICE_TEXT_LEN = 384, DEVICE_NOTE_LEN = 256 };

/* Opens the device and describes it in text (DEVICE_TEXT_LEN): "cpu, 2 threads, AVX-512", "NVIDIA H200 (sm_90, ...".
 * Ranks of one host take its GPUs in turn, and share one where there are fewer, and its memory; all ranks call it.
 * "auto" takes a GPU where binary and machine have one; a binary that could, on a machine that cannot, ends the text
 * with the reason. What cannot be had: DIE. */
void device_open(Device *d, const Config *c, char *text);
/* The same choice (or a GPU in any case) for a plan, which opens nothing: memory and logits_bytes of the device that a
 * run would take. A GPU is one that is empty and takes what is expected (kernels/device_memory.h). */
void device_for_plan(Device *d, const Config *c, bool is_gpu);
void device_close(Device *d);

/* Ranks on the fullest GPU of the job, equal on all; 1 on CPUs. After device_open. */
int device_ranks_sharing(void);

bool device_is_gpu(const Device *d);
/* The GPU's name as CUDA gives it; "" for a CPU. */
const char *device_gpu_name(void);
/* Its place on the PCI bus, "" for a CPU. */
const char *device_gpu_bus(void);

/* ---- what decides the bits of a run ---- */

/* "sm_90, 132 SMs, cuBLASLt 13.1.0", or "cpu"; into text (DEVICE_TEXT_LEN), returned. */
const char *device_identity(const Device *d, char *text);
/* The algorithms of the library GEMMs, one a line, for a checkpoint; NULL where there are none. The caller frees it. */
char *device_gemms(const Device *d);
/* Before the first GEMM, what a checkpoint says of both (each may be NULL): the same algorithms from here on. If that
 * cannot be, note (DEVICE_NOTE_LEN) says in a few words what differs; else it is "". */
void device_resume(const Device *d, const char *identity, const char *gemms, char *note);
/* Ops that compute nothing, but choose the algorithm of every GEMM that they are asked for (model_rehearse); NULL where
 * there is nothing to choose. */
const Ops *device_rehearsal(const Device *d);
/* "gemm table: 38 of 41 shapes known; ..." of the GEMMs so far; "" where there is no table. Into note
 * (DEVICE_NOTE_LEN), returned. `config` is what to tune. */
const char *device_gemm_note(const Device *d, const char *config, char *note);

/* ---- for the log and for profilers ---- */

/* Returns 0, or -1: a CPU, or nobody to ask. */
int device_health(const Device *d, GpuHealth *health);
/* Begins or ends what a profiler records. Returns 0, or -1: not on this device. */
int device_profile(const Device *d, bool on);

/* "CUDA 13.0, cuBLASLt 13.1.0, NCCL 2.28.9", or "CPU only"; into text (DEVICE_TEXT_LEN), returned. */
const char *device_built_for(char *text);

#endif
