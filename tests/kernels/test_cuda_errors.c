/* What CUDA errors are said to be, and the loading of libraries: without a GPU. Cases A1, E3. */
#ifdef HAVE_CUDA
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "kernels/cuda/cuda.h"
#include "tests/test.h"

static CudaDevice gpu_of(int driver, int runtime, int major, int minor) {
    CudaDevice gpu;
    memset(&gpu, 0, sizeof gpu);
    snprintf(gpu.name, sizeof gpu.name, "NVIDIA X100");
    gpu.driver_version = driver;
    gpu.runtime_version = runtime;
    gpu.major = major;
    gpu.minor = minor;
    gpu.cublaslt_version = 130100;
    return gpu;
}

/* Every error of a start: one line, a hint, and what the user must read in them. Numbers as in driver_types.h. */
TEST(cuda_errors_of_a_start) {
    static const struct {
        int error, driver, major, minor;
        const char *parts[3], *hint;
    } cases[] = {
        {35, 0, 0, 0, {"no CUDA driver"}, "run.device"},
        {35, 12040, 0, 0, {"CUDA 12.4", "CUDA 13.0"}, "CUDA 12 toolkit"},
        {35, 11080, 0, 0, {"CUDA 11.8", "CUDA 13.0"}, "CUDA 13.0 or newer"},
        {803, 13000, 0, 0, {"kernel module"}, "reboot"},
        {804, 13000, 0, 0, {"compatibility package"}, "LD_LIBRARY_PATH"},
        {100, 13000, 0, 0, {"no GPU"}, "CUDA_VISIBLE_DEVICES"},
        {101, 13000, 0, 0, {"no GPU"}, "CUDA_VISIBLE_DEVICES"},
        {46, 13000, 9, 0, {"NVIDIA X100", "busy"}, "nvidia-smi"},
        {2, 13000, 9, 0, {"NVIDIA X100", "memory"}, "nvidia-smi"},
        {802, 13000, 0, 0, {"not ready"}, "fabricmanager"},
        {805, 13000, 0, 0, {"MPS"}, "nvidia-cuda-mps-control"},
        {209, 13000, 7, 5, {"no code", "sm_75", "sm "}, "GPU_ARCHS=75"},
        {98, 13000, 12, 1, {"no code", "sm_121"}, "GPU_ARCHS=121"},
        {222, 12040, 8, 9, {"PTX", "CUDA 12.4", "CUDA 13.0"}, "GPU_ARCHS=89"},
        {221, 13000, 8, 0, {"PTX compiler", "not installed"}, "GPU_ARCHS=80"},
        {223, 13000, 8, 0, {"PTX compiler", "switched off"}, "GPU_ARCHS=80"},
        {214, 13000, 9, 0, {"NVIDIA X100", "cudaErrorECCUncorrectable"}, "ECC"},
        {999, 13000, 9, 0, {"NVIDIA X100", "cudaErrorUnknown"}, "xid"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char err[ERR_LEN] = "", hint[ERR_LEN] = "";
        const CudaDevice gpu = gpu_of(cases[i].driver, 13000, cases[i].major, cases[i].minor);
        EXPECT(cuda_explain_start(cases[i].error, &gpu, err, hint) == -1, "error %d", cases[i].error);
        for (int k = 0; k < 3 && cases[i].parts[k]; k++)
            EXPECT(strstr(err, cases[i].parts[k]), "error %d: no '%s' in: %s", cases[i].error, cases[i].parts[k], err);
        EXPECT(strstr(hint, cases[i].hint), "error %d: no '%s' in hint: %s", cases[i].error, cases[i].hint, hint);
        EXPECT(!strchr(err, '\n') && !strchr(hint, '\n'), "error %d: more than a line", cases[i].error);
    }
}

TEST(cuda_errors_have_hints) {
    for (int error = 1; error < 1000; error++)
        EXPECT(cuda_failure_hint(error) && strlen(cuda_failure_hint(error)) > 20, "error %d", error);
    EXPECT(strstr(cuda_failure_hint(2), "memory plan"), "%s", cuda_failure_hint(2));
    EXPECT(strstr(cuda_failure_hint(214), "ECC"), "%s", cuda_failure_hint(214));
    EXPECT(strstr(cuda_failure_hint(226), "hardware"), "%s", cuda_failure_hint(226));
    EXPECT(strstr(cuda_failure_hint(700), "CUDA_LAUNCH_BLOCKING"), "%s", cuda_failure_hint(700));
    EXPECT(strstr(cuda_failure_hint(702), "desktop"), "%s", cuda_failure_hint(702));
}

TEST(cuda_failure_text_says_where) {
    char err[ERR_LEN];
    EXPECT_EQ(cuda_failure_text("misaligned", "gemm", "in step 3 of 9; no checkpoint yet", err), -1);
    EXPECT(strcmp(err, "the GPU failed at or before gemm, in step 3 of 9; no checkpoint yet: misaligned") == 0, "%s",
           err);
    cuda_failure_text("misaligned", NULL, "", err);
    EXPECT(strcmp(err, "the GPU failed: misaligned") == 0, "%s", err);
}

static void about(void *arg, char *text, size_t text_len) {
    snprintf(text, text_len, "in step 12 of 900; last checkpoint %s", (const char *)arg);
}

static void fail_in_cuda(void *arg) {
    (void)arg;
    static char folder[] = "runs/x/step_00000010";
    check_set_about(about, folder);
    cuda_failed("kernels/cuda/gemm.cu", 77, 700);
}

static void fail_in_cublas(void *arg) {
    (void)arg;
    cublas_failed("kernels/cuda/gemm.cu", 78, "CUBLAS_STATUS_EXECUTION_FAILED");
}

/* Exit 1 in good order: no abort, no core. */
TEST(cuda_failure_ends_the_run) {
    EXPECT(expect_exit(EXIT_FAILED, "in step 12 of 900; last checkpoint runs/x/step_00000010: ", fail_in_cuda, NULL));
    EXPECT(expect_exit(EXIT_FAILED, "cudaErrorIllegalAddress (gemm.cu:77)\nhint:  ", fail_in_cuda, NULL));
    EXPECT(expect_exit(EXIT_FAILED, "cuBLASLt: CUBLAS_STATUS_EXECUTION_FAILED (gemm.cu:78)", fail_in_cublas, NULL));
}

TEST(cuda_fp8_needs_hopper_and_a_library) {
    static const struct {
        int major, minor;
        size_t library;
        const char *part; /* of the refusal; NULL: accepted */
    } cases[] = {{8, 0, 130100, "sm_80"},  {8, 9, 130100, "sm_89"},      {9, 0, 120804, "found 12.8"},
                 {9, 0, 120405, "12.9"},   {9, 0, 110900, "found 11.9"}, {9, 0, 120900, NULL},
                 {10, 0, 130000, "sm_100"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char err[ERR_LEN] = "", hint[ERR_LEN] = "";
        CudaDevice gpu = gpu_of(13000, 13000, cases[i].major, cases[i].minor);
        gpu.cublaslt_version = cases[i].library;
        const int result = cuda_check_fp8(&gpu, err, hint);
        EXPECT_EQ(result, cases[i].part ? -1 : 0);
        if (cases[i].part) EXPECT(strstr(err, cases[i].part) && strstr(hint, "bf16"), "case %zu: %s", i, err);
    }
}

TEST(cuda_libraries_are_loaded_by_name) {
    static const char *const names[] = {"cos", "sin"}, *const missing[] = {"cos", "cosine_of_nothing"};
    char err[ERR_LEN];
    void *library, *functions[2];
    REQUIRE(cuda_load_library(&library, "libm.so.6", names, functions, 2, err) == 0, "%s", err);
    double (*cosine)(double);
    memcpy(&cosine, functions, sizeof cosine);
    EXPECT_NEAR(cosine(1), cos(1), 1e-15);
    EXPECT(cuda_load_library(&library, "libm.so.6", missing, functions, 2, err) == -1 &&
               strstr(err, "cosine_of_nothing") && !library,
           "%s", err);
    EXPECT(cuda_load_library(&library, "libnone_of_this.so.1", names, functions, 2, err) == -1 &&
               strstr(err, "libnone_of_this"),
           "%s", err);
    EXPECT(cuda_load_library(&library, "libnone_of_this.so.1", names, functions, 2, NULL) == -1, "and without a text");
}

/* The library that this binary was built with is found, and has every function that is asked for. */
TEST(cuda_blas_library_is_found) {
    char err[ERR_LEN], hint[ERR_LEN];
    REQUIRE(cublaslt_load(err, hint) == 0, "%s (%s)", err, hint);
    EXPECT(cublaslt_load(err, hint) == 0, "the second time: %s", err);
}
#endif
