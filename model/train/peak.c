/* See peak.h. */
#include "peak.h"

#include <ctype.h>
#include <string.h>

/* The first that stands in the name wins: a longer one comes before its beginning. */
static const struct {
    const char *name;
    double tflops;
} peaks[] = {
    {"B200", 2250},
    {"GB200", 2500},
    {"GH200", 989.5},
    {"H200 NVL", 835.5},
    {"H200", 989.5},
    {"H100 PCIe", 756.5},
    {"H100 NVL", 835.5},
    {"H100 80GB HBM3", 989.5},
    {"H800 PCIe", 756.5},
    {"H800", 989.5},
    {"H20", 148},
    {"A100", 312},
    {"A800", 312},
    {"A40", 149.7},
    {"A30", 165},
    {"A10G", 70},
    {"A10", 125},
    {"L40S", 362.1},
    {"L40", 181.1},
    {"L4", 121},
    {"RTX 6000 Ada", 364.2},
    {"RTX A6000", 154.8},
    {"RTX 5090 D", 0},
    {"RTX 5090", 209.5},
    {"RTX 4090 D", 0},
    {"RTX 4090", 165.2},
    {"RTX 3090 Ti", 80},
    {"RTX 3090", 71.2},
};

/* Whole words: "L4" is not in "L40". */
static int has_words(const char *text, const char *words) {
    const size_t length = strlen(words);
    for (const char *at = strstr(text, words); at; at = strstr(at + 1, words)) {
        const int before = at == text ? ' ' : (unsigned char)at[-1], after = (unsigned char)at[length];
        if (!isalnum(before) && !isalnum(after)) return 1;
    }
    return 0;
}

double peak_bf16_flops(const char *gpu_name) {
    if (has_words(gpu_name, "MIG") || has_words(gpu_name, "Laptop")) return 0;
    for (size_t i = 0; i < sizeof peaks / sizeof *peaks; i++)
        if (has_words(gpu_name, peaks[i].name)) return peaks[i].tflops * 1e12;
    return 0;
}
