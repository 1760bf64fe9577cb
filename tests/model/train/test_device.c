/* What is said of a checkpoint's device. */
#include "model/train/device.h"

#include <stdlib.h>
#include <string.h>

#include "tests/test.h"

TEST(device_resume_says_when_bits_differ) {
    const Device cpu = {.ops = ops_cpu()};
    char note[DEVICE_NOTE_LEN], identity[DEVICE_TEXT_LEN];
    EXPECT(strcmp(device_identity(&cpu, identity), "cpu") == 0, "%s", identity);
    device_resume(&cpu, identity, NULL, note);
    EXPECT(note[0] == 0, "the same: %s", note);
    device_resume(&cpu, NULL, NULL, note);
    EXPECT(note[0] == 0, "not said: %s", note);
    device_resume(&cpu, "sm_90, 132 SMs, cuBLASLt 13.1.0", "whatever", note);
    EXPECT(strcmp(note, "saved on sm_90, 132 SMs, cuBLASLt 13.1.0, this is cpu: bits differ from here on") == 0, "%s",
           note);
}

/* A CPU has no algorithms to choose, no health to tell and no profiler. */
TEST(device_cpu_has_nothing_of_a_gpu) {
    const Device cpu = {.ops = ops_cpu()};
    char note[DEVICE_NOTE_LEN] = "x";
    GpuHealth health;
    EXPECT(!device_is_gpu(&cpu) && !device_gemms(&cpu) && !device_rehearsal(&cpu));
    EXPECT(device_gemm_note(&cpu, "c.json", note)[0] == 0, "%s", note);
    EXPECT(device_health(&cpu, &health) != 0 && device_profile(&cpu, true) != 0);
}
