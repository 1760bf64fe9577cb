/* How a GPU feels, as NVIDIA's management library (NVML) says it. Floor 1.
 *
 * The library comes with the driver and is opened at run time; without it, or without a GPU, there is nothing to tell
 * and nothing is said. A reading is five queries of the driver and none of the GPU's streams. */
#ifndef TRAIN_MOE_GPU_HEALTH_H
#define TRAIN_MOE_GPU_HEALTH_H

#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define GPU_HEALTH_LIBRARY "libnvidia-ml.so.1"
enum { GPU_THROTTLE_NAMES_MAX = 16 };

/* What the GPU does not tell is NAN, or -1. */
typedef struct {
    double temperature_c, sm_clock_mhz, power_w;
    uint64_t throttle;         /* NVML's bits: why the clocks are not at their highest */
    int64_t ecc_uncorrected;   /* memory errors that ECC could not correct, since the driver was loaded */
    int64_t ecc_since_opening; /* those of them that came in this process */
    double read_ms;            /* what the reading took */
} GpuHealth;

/* Opens the library for the GPU at this PCI address ("00000000:1b:00.0"). Returns 0, or -1: there is no such library or
 * no such GPU. */
int gpu_health_open(const char *library, const char *pci_bus_id);
void gpu_health_close(void);
/* Returns 0, or -1 if it is not open. */
int gpu_health_read(GpuHealth *health);
/* Bytes of the GPU's memory in use by all processes; -1 if it is not open, or does not tell. */
int64_t gpu_health_memory_used(void);
/* "580.65.06"; "" if it is not open. */
const char *gpu_health_driver(void);

/* Is the GPU slower than its power limit makes it: heat, a power brake? */
bool gpu_health_is_throttled(const GpuHealth *health);
/* The names of the bits ("sw_power_cap") into names; returns how many. Idle is none. */
int gpu_health_throttle_names(const char *names[GPU_THROTTLE_NAMES_MAX], uint64_t throttle);

#ifdef __cplusplus
}
#endif

#endif
