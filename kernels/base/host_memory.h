/* Memory of this machine that a new process can have: Linux's estimate and the limits of containers. Floor 0. */
#ifndef TRAIN_MOE_HOST_MEMORY_H
#define TRAIN_MOE_HOST_MEMORY_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Bytes; 0 = not known. total: the machine's, or the lowest limit of this process's control groups (v2 and v1) where
 * that is less. available: MemAvailable and free swap, or what the tightest of these limits leaves. `root` stands in
 * front of every path: "" but in tests. */
void host_memory(const char *root, int64_t *total, int64_t *available);

/* The number behind `key` at the start of a line ("MemAvailable:" of /proc/meminfo, "file " of memory.stat), or -1. */
int64_t text_number(const char *text, const char *key);

#ifdef __cplusplus
}
#endif
#endif
