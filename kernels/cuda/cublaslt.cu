/* See cublaslt.h. */
#include "cublaslt.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#include "cuda.h"
#include "kernels/base/check.h"

CublasLt cublaslt;

int cuda_load_library(void **library, const char *file, const char *const *names, void **functions, int n, char *err) {
    *library = dlopen(file, RTLD_NOW | RTLD_LOCAL);
    if (!*library) return err_set(err, "%s", dlerror());
    for (int i = 0; i < n; i++) {
        functions[i] = dlsym(*library, names[i]);
        if (functions[i]) continue;
        dlclose(*library);
        *library = NULL;
        return err_set(err, "%s has no %s", file, names[i]);
    }
    return 0;
}

int cublaslt_load(char *err, char *hint) {
    static void *library;
    if (library) return 0;
#define CUBLASLT_NAME(name) "cublasLt" #name,
    static const char *const names[] = {CUBLASLT_FUNCTIONS(CUBLASLT_NAME)};
#undef CUBLASLT_NAME
    enum { N = sizeof names / sizeof *names };
    static_assert(sizeof cublaslt == N * sizeof(void *), "a pointer for each name");
    char file[64], why[ERR_LEN];
    void *functions[N];
    snprintf(file, sizeof file, "libcublasLt.so.%d", CUBLAS_VER_MAJOR);
    if (cuda_load_library(&library, file, names, functions, N, why) != 0) {
        snprintf(hint, ERR_LEN,
                 "install cuBLAS %d.%d of the CUDA toolkit, put its folder into LD_LIBRARY_PATH, or set run.device to "
                 "\"cpu\"",
                 CUBLAS_VER_MAJOR, CUBLAS_VER_MINOR);
        return err_set(err, "cuBLASLt %d cannot be loaded: %.600s", CUBLAS_VER_MAJOR, why);
    }
    memcpy(&cublaslt, functions, sizeof cublaslt);
    return 0;
}
