/* See gpu_health.h. NVML's functions and constants are written out here: its header is in no toolkit package that a
 * build needs, and its interface is kept stable by versioned names. */
#include "gpu_health.h"

#include <dlfcn.h>
#include <math.h>
#include <string.h>

#include "base/clock.h"

enum { NVML_SUCCESS = 0, NVML_TEMPERATURE_GPU = 0, NVML_CLOCK_SM = 1, NVML_ECC_UNCORRECTED = 1, NVML_ECC_VOLATILE = 0 };
typedef struct nvmlDevice_st *nvmlDevice_t;

static struct {
    void *library;
    nvmlDevice_t device;
    char driver[96];
    int64_t ecc_at_opening;
    int (*shutdown)(void);
    int (*temperature)(nvmlDevice_t, int sensor, unsigned *celsius);
    int (*clock)(nvmlDevice_t, int type, unsigned *mhz);
    int (*power)(nvmlDevice_t, unsigned *milliwatts);
    int (*throttle)(nvmlDevice_t, unsigned long long *reasons);
    int (*ecc)(nvmlDevice_t, int error_type, int counter_type, unsigned long long *count);
    int (*memory)(nvmlDevice_t, unsigned long long total_free_used[3]);
} nvml;

static const struct {
    uint64_t bit;
    bool is_slow; /* beyond what a power limit or a set clock does to any busy GPU */
    const char *name;
} reasons[] = {
    {0x002, false, "clocks_set"},    {0x004, false, "sw_power_cap"},       {0x008, true, "hw_slowdown"},
    {0x010, false, "sync_boost"},    {0x020, true, "sw_thermal_slowdown"}, {0x040, true, "hw_thermal_slowdown"},
    {0x080, true, "hw_power_brake"}, {0x100, false, "display_clocks"},
};
enum { N_REASONS = sizeof reasons / sizeof *reasons };

/* Into a pointer to a function, which C does not convert from void *. */
static bool find(void *function, const char *name) {
    void *symbol = dlsym(nvml.library, name);
    memcpy(function, &symbol, sizeof symbol);
    return symbol != NULL;
}

static int64_t count_ecc(void) {
    unsigned long long count;
    return nvml.ecc && nvml.ecc(nvml.device, NVML_ECC_UNCORRECTED, NVML_ECC_VOLATILE, &count) == NVML_SUCCESS
               ? (int64_t)count
               : -1;
}

static bool open_device(const char *pci_bus_id) {
    int (*init)(void), (*by_bus)(const char *, nvmlDevice_t *), (*driver)(char *, unsigned);
    if (!find(&init, "nvmlInit_v2") || !find(&by_bus, "nvmlDeviceGetHandleByPciBusId_v2") || init() != NVML_SUCCESS)
        return false;
    find(&nvml.shutdown, "nvmlShutdown");
    find(&nvml.temperature, "nvmlDeviceGetTemperature");
    find(&nvml.clock, "nvmlDeviceGetClockInfo");
    find(&nvml.power, "nvmlDeviceGetPowerUsage");
    find(&nvml.ecc, "nvmlDeviceGetTotalEccErrors");
    find(&nvml.memory, "nvmlDeviceGetMemoryInfo");
    if (!find(&nvml.throttle, "nvmlDeviceGetCurrentClocksEventReasons")) /* its name since driver 535 */
        find(&nvml.throttle, "nvmlDeviceGetCurrentClocksThrottleReasons");
    if (!find(&driver, "nvmlSystemGetDriverVersion") || driver(nvml.driver, sizeof nvml.driver) != NVML_SUCCESS)
        nvml.driver[0] = 0;
    if (by_bus(pci_bus_id, &nvml.device) != NVML_SUCCESS) return false;
    nvml.ecc_at_opening = count_ecc();
    return true;
}

int gpu_health_open(const char *library, const char *pci_bus_id) {
    gpu_health_close();
    nvml.library = dlopen(library, RTLD_NOW | RTLD_LOCAL);
    if (!nvml.library) return -1;
    if (open_device(pci_bus_id)) return 0;
    gpu_health_close();
    return -1;
}

void gpu_health_close(void) {
    if (nvml.shutdown) nvml.shutdown();
    if (nvml.library) dlclose(nvml.library);
    memset(&nvml, 0, sizeof nvml);
}

int gpu_health_read(GpuHealth *h) {
    if (!nvml.library) return -1;
    const double start = clock_s();
    unsigned value;
    unsigned long long bits;
    h->temperature_c =
        nvml.temperature && nvml.temperature(nvml.device, NVML_TEMPERATURE_GPU, &value) == NVML_SUCCESS ? value : NAN;
    h->sm_clock_mhz = nvml.clock && nvml.clock(nvml.device, NVML_CLOCK_SM, &value) == NVML_SUCCESS ? value : NAN;
    h->power_w = nvml.power && nvml.power(nvml.device, &value) == NVML_SUCCESS ? value / 1000.0 : NAN;
    h->throttle = nvml.throttle && nvml.throttle(nvml.device, &bits) == NVML_SUCCESS ? bits : 0;
    h->ecc_uncorrected = count_ecc();
    h->ecc_since_opening = h->ecc_uncorrected > nvml.ecc_at_opening && nvml.ecc_at_opening >= 0
                               ? h->ecc_uncorrected - nvml.ecc_at_opening
                               : 0;
    h->read_ms = 1e3 * (clock_s() - start);
    return 0;
}

int64_t gpu_health_memory_used(void) {
    unsigned long long total_free_used[3];
    return nvml.memory && nvml.memory(nvml.device, total_free_used) == NVML_SUCCESS ? (int64_t)total_free_used[2] : -1;
}

const char *gpu_health_driver(void) {
    return nvml.driver;
}

bool gpu_health_is_throttled(const GpuHealth *h) {
    for (int i = 0; i < N_REASONS; i++)
        if (reasons[i].is_slow && (h->throttle & reasons[i].bit)) return true;
    return false;
}

int gpu_health_throttle_names(const char *names[GPU_THROTTLE_NAMES_MAX], uint64_t throttle) {
    int n = 0;
    for (int i = 0; i < N_REASONS; i++)
        if (throttle & reasons[i].bit) names[n++] = reasons[i].name;
    return n;
}
