/* Peaks of GPUs by the names that CUDA reports. */
#include "model/train/peak.h"

#include "tests/test.h"

TEST(peak_of_known_gpus) {
    static const struct {
        const char *name;
        double tflops;
    } cases[] = {
        {"NVIDIA H200", 989.5},
        {"NVIDIA H100 80GB HBM3", 989.5},
        {"NVIDIA H100 PCIe", 756.5},
        {"NVIDIA H100 NVL", 835.5},
        {"NVIDIA H200 NVL", 835.5},
        {"NVIDIA GH200 480GB", 989.5},
        {"NVIDIA H20", 148},
        {"NVIDIA A100-SXM4-80GB", 312},
        {"NVIDIA A100 80GB PCIe", 312},
        {"NVIDIA L40S", 362.1},
        {"NVIDIA L4", 121},
        {"NVIDIA GeForce RTX 4090", 165.2},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        EXPECT_NEAR(peak_bf16_flops(cases[i].name), cases[i].tflops * 1e12, 1);
}

/* No utilisation rather than a wrong one: other GPUs, other models of a known name, slices. */
TEST(peak_of_unknown_gpus) {
    static const char *const names[] = {"",
                                        "NVIDIA H300",
                                        "NVIDIA H2000",
                                        "Tesla V100-SXM2-16GB",
                                        "Tesla T4",
                                        "NVIDIA H200 MIG 3g.71gb",
                                        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
                                        "NVIDIA H100",
                                        "NVIDIA GeForce RTX 4090 D",
                                        "NVIDIA GeForce RTX 4090 Laptop GPU",
                                        "Quadro RTX 6000",
                                        "cpu"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        EXPECT(peak_bf16_flops(names[i]) == 0, "%s: %g", names[i], peak_bf16_flops(names[i]));
}
