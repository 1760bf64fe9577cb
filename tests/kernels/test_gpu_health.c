/* The health of a GPU: against a library made for the test, and without any. */
#include "kernels/gpu_health.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/test.h"

TEST(gpu_health_without_a_library) {
    GpuHealth h;
    EXPECT(gpu_health_open("libno-such-library.so.1", "0000:00:00.0") != 0);
    EXPECT(gpu_health_read(&h) != 0 && gpu_health_driver()[0] == 0);
    gpu_health_close();
}

/* NVML of a GPU at 0000:1b:00.0 that meets a new memory error at every second question for them. */
static const char library_text[] =
    "#include <string.h>\n"
    "int nvmlInit_v2(void) { return 0; }\n"
    "int nvmlShutdown(void) { return 0; }\n"
    "int nvmlSystemGetDriverVersion(char *s, unsigned n) { strncpy(s, \"580.65.06\", n); return 0; }\n"
    "int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, void **d)\n"
    "{ *d = (void *)7; return strcmp(bus, \"0000:1b:00.0\") ? 2 : 0; }\n"
    "int nvmlDeviceGetTemperature(void *d, int sensor, unsigned *t) { *t = 61; return d != (void *)7 || sensor; }\n"
    "int nvmlDeviceGetClockInfo(void *d, int type, unsigned *c) { *c = 1755; return d != (void *)7 || type != 1; }\n"
    "int nvmlDeviceGetPowerUsage(void *d, unsigned *w) { *w = 698500; return d != (void *)7; }\n"
    "int nvmlDeviceGetCurrentClocksThrottleReasons(void *d, unsigned long long *r)\n"
    "{ *r = 0x44; return d != (void *)7; }\n"
    "int nvmlDeviceGetTotalEccErrors(void *d, int type, int counter, unsigned long long *n)\n"
    "{ static int k; *n = 5 + k++ / 2; return d != (void *)7 || type != 1 || counter != 0; }\n";

/* Without some of the functions: what they would tell is not known. */
static const char *build(const char *name, const char *flags) {
    static char path[600];
    char source[600], command[2048];
    snprintf(source, sizeof source, "%s/%s.c", test_tmp_dir(), name);
    snprintf(path, sizeof path, "%s/%s.so", test_tmp_dir(), name);
    FILE *f = fopen(source, "w");
    REQUIRE(f && fputs(library_text, f) >= 0 && fclose(f) == 0, "%s not written", source);
    snprintf(command, sizeof command, "cc %s -shared -fPIC -o %s %s", flags, path, source);
    REQUIRE(system(command) == 0, "%s", command);
    return path;
}

TEST(gpu_health_of_a_gpu) {
    GpuHealth h;
    const char *names[GPU_THROTTLE_NAMES_MAX];
    const char *library = build("nvml", "");
    EXPECT(gpu_health_open(library, "0000:00:00.0") != 0, "no GPU has this address");
    EXPECT(gpu_health_read(&h) != 0);
    REQUIRE(gpu_health_open(library, "0000:1b:00.0") == 0);
    EXPECT(strcmp(gpu_health_driver(), "580.65.06") == 0, "%s", gpu_health_driver());
    REQUIRE(gpu_health_read(&h) == 0);
    EXPECT(h.temperature_c == 61 && h.sm_clock_mhz == 1755 && h.power_w == 698.5 && h.read_ms >= 0);
    EXPECT(h.throttle == 0x44 && gpu_health_is_throttled(&h));
    EXPECT_EQ(gpu_health_throttle_names(names, h.throttle), 2);
    EXPECT(strcmp(names[0], "sw_power_cap") == 0 && strcmp(names[1], "hw_thermal_slowdown") == 0);
    EXPECT(h.ecc_uncorrected == 5 && h.ecc_since_opening == 0, "errors of others: %lld, %lld",
           (long long)h.ecc_uncorrected, (long long)h.ecc_since_opening);
    REQUIRE(gpu_health_read(&h) == 0);
    EXPECT(h.ecc_uncorrected == 6 && h.ecc_since_opening == 1, "errors: %lld, new %lld", (long long)h.ecc_uncorrected,
           (long long)h.ecc_since_opening);
    gpu_health_close();
    EXPECT(gpu_health_read(&h) != 0, "closed");
}

TEST(gpu_health_of_a_gpu_that_does_not_tell) {
    GpuHealth h;
    REQUIRE(gpu_health_open(build("mute",
                                  "-DnvmlDeviceGetTemperature=a -DnvmlDeviceGetClockInfo=b -DnvmlDeviceGetPowerUsage=c "
                                  "-DnvmlDeviceGetCurrentClocksThrottleReasons=d -DnvmlDeviceGetTotalEccErrors=e "
                                  "-DnvmlSystemGetDriverVersion=f"),
                            "0000:1b:00.0") == 0);
    REQUIRE(gpu_health_read(&h) == 0);
    EXPECT(isnan(h.temperature_c) && isnan(h.sm_clock_mhz) && isnan(h.power_w) && h.throttle == 0);
    EXPECT(h.ecc_uncorrected == -1 && h.ecc_since_opening == 0 && !gpu_health_is_throttled(&h));
    EXPECT(gpu_health_driver()[0] == 0);
    gpu_health_close();
}

/* A power limit is how any busy GPU runs, and idling is no fault. */
TEST(gpu_health_throttles_by_heat_not_by_its_power_limit) {
    const struct {
        uint64_t bits;
        bool is_throttled;
    } cases[] = {{0, false},   {0x1, false}, {0x2, false}, {0x4, false},   {0x8, true},   {0x10, false},
                 {0x20, true}, {0x40, true}, {0x80, true}, {0x100, false}, {0x200, false}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const GpuHealth h = {.throttle = cases[i].bits};
        EXPECT(gpu_health_is_throttled(&h) == cases[i].is_throttled, "bits %llx", (unsigned long long)cases[i].bits);
    }
}
