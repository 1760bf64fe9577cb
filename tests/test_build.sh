#!/usr/bin/env bash
# What scripts/probe.sh and the Makefile say about machines that this one is not: toolkits that are too old or refuse the
# host compiler, libraries that do not link, mistyped targets. Works on a copy with a made-up nvcc. Prints each check;
# exit 1 if one fails.
set -u
cd "$(dirname "$0")/.."
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
mkdir -p "$folder/tree/kernels/cuda" "$folder/cuda/bin" "$folder/cuda/lib64" "$folder/empty/lib"
cp -r Makefile scripts "$folder/tree"
touch "$folder/tree/kernels/cuda/a.cu"
cd "$folder/tree"
failed=0
unset MAKEFLAGS MAKELEVEL MFLAGS CFLAGS CJSON_HOME ZSTD_HOME CUDA_HOME NCCL_HOME NVCC_CCBIN GPU_ARCHS
export MPI_HOME=none CC=${CC:-gcc}

check() { # NAME, then a command that must hold
    local name=$1
    shift
    if "$@"; then
        echo "ok    $name"
    else
        failed=1
        echo "FAIL  $name: exit $code"
        sed 's/^/      /' out.txt err.txt
    fi
}
probe() { # VARIABLE=VALUE...: sets code, out.txt, err.txt, probe.mk
    rm -f probe.mk
    env "$@" scripts/probe.sh probe.mk >out.txt 2>err.txt
    code=$?
}
# One error line, one hint, and these parts in them.
refuses() {
    local part
    [ $code = 1 ] && [ "$(grep -c '^error: ' err.txt)" = 1 ] && [ "$(wc -l <err.txt)" = 2 ] && [ ! -e probe.mk ] || return 1
    for part in "$@"; do grep -qF -- "$part" err.txt || return 1; done
}
accepts() {
    local part
    [ $code = 0 ] && [ ! -s err.txt ] || return 1
    for part in "$@"; do grep -qF -- "$part" probe.mk || return 1; done
}

# An nvcc of release $RELEASE; $ONLY_WITH is the one host compiler that it works with.
cat >"$folder/cuda/bin/nvcc" <<'NVCC'
#!/bin/sh
[ "$1" = --version ] && { echo "Cuda compilation tools, release $RELEASE, V$RELEASE.1"; exit; }
case "$* " in *"-ccbin $ONLY_WITH "*) ;; *) [ -z "$ONLY_WITH" ] || { echo "error: unsupported GNU version!" >&2; exit 1; } ;; esac
while [ "$1" != -o ]; do shift; done
: >"$2"
NVCC
chmod +x "$folder/cuda/bin/nvcc"
printf 'int cudaFree(void *p) { return p != 0; }\n' >cudart.c
$CC -c cudart.c && ar rc "$folder/cuda/lib64/libcudart_static.a" cudart.o
for name in cublasLt stdc++ dl rt; do ar rc "$folder/cuda/lib64/lib$name.a"; done
cuda=CUDA_HOME=$folder/cuda

# A7: a toolkit of years ago
probe "$cuda" RELEASE=10.1
check "an old toolkit: found, required, what to do" refuses "found CUDA 10.1" "required 12.4" "CUDA_HOME="
probe "$cuda" RELEASE=9.0
check "9 is older than 12" refuses "found CUDA 9.0"
# A2: no GPU is asked, the architectures are the documented ones
probe "$cuda" RELEASE=12.9
check "without a GPU: code for sm_90, PTX for sm_80" accepts "arch=compute_90,code=sm_90" \
    "arch=compute_80,code=compute_80" "HAVE_CUDA := 1"
probe "$cuda" RELEASE=12.9 "GPU_ARCHS=80 90a"
check "GPU_ARCHS replaces them" accepts "arch=compute_80,code=sm_80" "arch=compute_90a,code=sm_90a"
check "and leaves nothing of them" bash -c '! grep -q "code=sm_90 " probe.mk'
# A6: a host compiler that the toolkit refuses
probe "$cuda" RELEASE=12.9 ONLY_WITH=g++-11
check "a refused host compiler: which, and the variable" refuses "nvcc 12.9" "host compiler" "unsupported GNU version" \
    "NVCC_CCBIN="
probe "$cuda" RELEASE=12.9 ONLY_WITH=g++-11 NVCC_CCBIN=g++-11
check "NVCC_CCBIN reaches every compilation" accepts "-ccbin g++-11"
probe CUDA_HOME="$folder/empty"
check "CUDA_HOME without nvcc: for the CPU, and says so" accepts "no nvcc found in CUDA_HOME=$folder/empty"

# A4: what is there by name and does not link
probe CUDA_HOME=none CJSON_HOME="$folder/empty"
check "a library that does not link: its name, the linker, the variable" refuses "cJSON" \
    "CJSON_HOME=$folder/empty" "linker" "apt-get install libcjson-dev"
printf '#!/bin/sh\ncase "$*" in *zstd*) echo "ld: cannot find -lzstd" >&2; exit 1 ;; esac\nexec %s "$@"\n' \
    "$(command -v gcc || command -v cc)" >"$folder/conda-gcc"
chmod +x "$folder/conda-gcc"
probe CUDA_HOME=none CC="$folder/conda-gcc"
check "another linker in front: found by linking, not by name" refuses "zstd" "cannot find -lzstd" "$folder/conda-gcc"
probe CUDA_HOME=none CC="$folder/none"
check "no compiler" refuses "the C compiler '$folder/none'" "CC="
# A8: each optional part can be left out
probe CUDA_HOME=none MPI_HOME=none
check "without CUDA and MPI" accepts "CPU only: CUDA_HOME=none" "MPI_HOME=none: builds for one process"
probe CUDA_HOME=none MPI_HOME="$folder/empty"
check "MPI_HOME without MPI: for one process, and says so" accepts "no MPI found in MPI_HOME=$folder/empty"


# NCCL: by linking, too; without it the build goes on and says what that means
mkdir -p "$folder/nccl/include" "$folder/nccl/lib"
cat >"$folder/nccl/include/nccl.h" <<'NCCL'
#define NCCL_MAJOR 2
#define NCCL_MINOR 19
#define NCCL_PATCH 4
#define NCCL_VERSION(x, y, z) ((x) * 10000 + (y) * 100 + (z))
#define NCCL_VERSION_CODE NCCL_VERSION(NCCL_MAJOR, NCCL_MINOR, NCCL_PATCH)
int ncclGetVersion(int *), ncclCommSplit(void);
NCCL
ar rc "$folder/nccl/lib/libnccl.a"
probe "$cuda" RELEASE=12.9 NCCL_HOME="$folder/nccl"
check "NCCL that does not link: why, the linker, the variable, and a build without it" accepts "HAVE_NCCL := " \
    "NOTE_NCCL := no NCCL found in NCCL_HOME=$folder/nccl (" "linker" "goes through the hosts" "NCCL_HOME=DIR"
printf 'int ncclGetVersion(int *v) { return *v; }\nint ncclCommSplit(void) { return 0; }\n' >nccl.c
$CC -c nccl.c && ar rc "$folder/nccl/lib/libnccl.a" nccl.o
probe "$cuda" RELEASE=12.9 NCCL_HOME="$folder/nccl"
check "NCCL that links: its version" accepts "HAVE_NCCL := 1" "NCCL 2.19.4" "-isystem $folder/nccl/include"
sed -i 's/NCCL_MINOR 19/NCCL_MINOR 12/' "$folder/nccl/include/nccl.h"
probe "$cuda" RELEASE=12.9 NCCL_HOME="$folder/nccl"
check "NCCL that is too old" accepts "older than 2.18.1"
probe "$cuda" RELEASE=12.9 NCCL_HOME=none
check "NCCL_HOME=none" accepts "NOTE_NCCL := NCCL_HOME=none: data between GPUs goes through the hosts"
probe CUDA_HOME=none NCCL_HOME="$folder/nccl"
check "without CUDA nobody asks for NCCL" bash -c 'grep -q "^NOTE_NCCL := $" probe.mk && grep -q "^HAVE_NCCL := $" probe.mk'

# A7: a mistyped target
make tset >out.txt 2>err.txt
code=$?
check "a mistyped target: named, and all targets" bash -c "[ $code = 2 ] && grep -q \"no target or file 'tset'\" err.txt &&
    grep -q 'make test ' err.txt"
make help >out.txt 2>err.txt
code=$?
check "make help" bash -c "[ $code = 0 ] && grep -q 'make fuzz' out.txt && grep -q NVCC_CCBIN out.txt"
make UNAME=Darwin >out.txt 2>err.txt
code=$?
check "another system: one line" bash -c "[ $code = 2 ] && grep -q 'builds on Linux' err.txt"
exit $failed
