#!/usr/bin/env bash
# Finds out what this machine can build, by compiling and linking tiny programs with the flags of the real build.
#
#     scripts/probe.sh OUT.mk        writes OUT.mk for the Makefile; says what is missing and fails
#     scripts/probe.sh --missing     prints the Debian packages that are needed and missing, one a line
#
# Reads CC, CFLAGS, CJSON_HOME, ZSTD_HOME, MPI_HOME, CUDA_HOME, NCCL_HOME, NVCC_CCBIN, GPU_ARCHS from the environment.
# deps/ comes before the system, a static library before a shared one. Everything found is kept in OUT.mk and not probed again until
# a variable or the compiler changes.
set -u
cd "$(dirname "$0")/.."

readonly CUDA_REQUIRED=12.4
out=${1:-build/config.mk}
mode=build
[ "$out" = --missing ] && mode=missing
work=build/probe
mkdir -p "$work"
CC=${CC:-cc}
CFLAGS=${CFLAGS:-}
log=$work/log.txt

fail() { # MESSAGE HINT
    printf 'error: %s\nhint:  %s\n' "$1" "$2" >&2
    exit 1
}

# link NAME FLAGS...: does $work/NAME.c compile and link with FLAGS?
link() {
    local name=$1
    shift
    $CC -std=gnu11 $CFLAGS -I. -o "$work/$name" "$work/$name.c" "$@" -lm -pthread >"$log" 2>&1
}

# macros HEADER FLAGS TEXT: TEXT after the preprocessor, for version numbers.
macros() {
    printf '#include <%s>\nversion %s\n' "$1" "$3" | $CC -E -P $2 -xc - 2>/dev/null | sed -n 's/^version //p' | tr -d ' "'
}

# ---- the compiler ----

find_compiler() {
    printf 'int main(void) { return 0; }\n' >"$work/compiler.c"
    link compiler && return
    [ "$mode" = missing ] && echo gcc && echo libc6-dev && return
    fail "the C compiler '$CC' does not link a program: $(tail -n 1 "$log")" \
        "Debian, Ubuntu: apt-get install gcc libc6-dev; Fedora: dnf install gcc; Arch: pacman -S gcc; or set CC="
}

find_openmp() {
    printf '#include <omp.h>\nint main(void) { return omp_get_max_threads() < 1; }\n' >"$work/openmp.c"
    openmp_flags=
    can_openmp="no OpenMP (one thread)"
    if link openmp -fopenmp; then
        openmp_flags=-fopenmp
        can_openmp=OpenMP
    fi
}

# ---- cJSON and zstd ----

# candidates HOME NAME: "compile flags | link flags", best first. HOME may be empty.
candidates() {
    local home=$1 name=$2 lib
    local homes=("$home")
    [ -z "$home" ] && [ -d deps/include ] && homes=(deps "")
    for home in "${homes[@]}"; do
        if [ -z "$home" ]; then
            printf '%s\n' "|-l:lib$name.a" "|-l$name"
            continue
        fi
        for lib in lib lib64 "lib/$($CC -print-multiarch 2>/dev/null)"; do
            [ -e "$home/$lib/lib$name.a" ] && echo "-I$home/include|$home/$lib/lib$name.a"
            [ -e "$home/$lib/lib$name.so" ] &&
                echo "-I$home/include|$home/$lib/lib$name.so -Wl,-rpath,$(realpath "$home/$lib")"
        done
    done
}

# find_library NAME HOME: sets found_cflags, found_libs, found_kind; its program is $work/NAME.c.
find_library() {
    local name=$1 cflags libs
    echo "no lib$name.a or lib$name.so in $2/lib" >"$log"
    while IFS='|' read -r cflags libs; do
        link "$name" $cflags $libs || continue
        found_cflags=$cflags
        found_libs=$libs
        found_kind=shared
        case $libs in *.a) found_kind=static ;; esac
        return 0
    done < <(candidates "$2" "$name")
    cat "$log" >"$work/$name.log"
    return 1
}

# explain NAME VARIABLE VALUE DEBIAN FEDORA ARCH CONDA: two lines on stderr.
explain() {
    local reason linker
    reason=$(grep -m 1 -E 'error|cannot find|No such file' "$work/${1,,}.log" || tail -n 1 "$work/${1,,}.log")
    linker=$($CC -print-prog-name=ld 2>/dev/null)
    printf 'error: a program with %s does not compile and link%s: %s (%s, linker %s)\n' "$1" "${3:+ from $2=$3}" \
        "$reason" "$CC" "$(command -v "$linker" || echo "$linker")"
    printf 'hint:  Debian, Ubuntu: apt-get install %s; Fedora: dnf install %s; Arch: pacman -S %s; ' "$4" "$5" "$6"
    printf 'conda: conda install -c conda-forge %s; or set %s=DIR (DIR/include, DIR/lib)\n' "$7" "$2"
} >&2

# A bare <cJSON.h>, as in cJSON's own build tree, is reached under Debian's name through a one-line header.
cjson_header() {
    local header=$work/include/cjson/cJSON.h
    rm -f "$header"
    printf '#include <cjson/cJSON.h>\nint main(void) { return !cJSON_Parse(cJSON_Version()); }\n' >"$work/cjson.c"
    find_library cjson "${CJSON_HOME:-}" && return
    mkdir -p "${header%/*}"
    printf '#include <cJSON.h>\n' >"$header"
    local kept=$CFLAGS
    CFLAGS="$CFLAGS -I$work/include"
    if find_library cjson "${CJSON_HOME:-}"; then
        found_cflags="-I$work/include $found_cflags"
        CFLAGS=$kept
        return
    fi
    CFLAGS=$kept
    rm -f "$header"
    find_library cjson "${CJSON_HOME:-}" # for the reason in the log
}

find_libraries() {
    local missing=0
    lib_cflags= lib_libs= can_libraries=
    if cjson_header; then
        local v='CJSON_VERSION_MAJOR.CJSON_VERSION_MINOR.CJSON_VERSION_PATCH'
        lib_cflags+=" $found_cflags" lib_libs+=" $found_libs"
        can_libraries+=", cJSON $(macros cjson/cJSON.h "$found_cflags" "$v") ($found_kind)"
    else
        missing=1
        [ "$mode" = missing ] && [ -z "${CJSON_HOME:-}" ] && echo libcjson-dev
        [ "$mode" = build ] && explain cJSON CJSON_HOME "${CJSON_HOME:-}" libcjson-dev cjson-devel cjson cjson
    fi
    printf '#include <zstd.h>\nint main(void) { return ZSTD_versionNumber() < 10000; }\n' >"$work/zstd.c"
    if find_library zstd "${ZSTD_HOME:-}"; then
        local v='ZSTD_VERSION_MAJOR.ZSTD_VERSION_MINOR.ZSTD_VERSION_RELEASE'
        lib_cflags+=" $found_cflags" lib_libs+=" $found_libs"
        can_libraries=", zstd $(macros zstd.h "$found_cflags" "$v") ($found_kind)$can_libraries"
    else
        missing=1
        [ "$mode" = missing ] && [ -z "${ZSTD_HOME:-}" ] && echo libzstd-dev
        [ "$mode" = build ] && explain zstd ZSTD_HOME "${ZSTD_HOME:-}" libzstd-dev libzstd-devel zstd zstd
    fi
    [ $missing = 0 ] || [ "$mode" = missing ] || exit 1
}

# ---- MPI: optional ----

# The flags of an mpicc without the compiler's name; both Open MPI and MPICH know -show.
mpicc_flags() {
    "$1" -show 2>/dev/null | tr ' ' '\n' | grep -E '^-(I|L|l|Wl,|D|pthread)' | tr '\n' ' '
}

find_mpi() {
    have_mpi= mpi_cflags= mpi_libs= note_mpi=
    local home=${MPI_HOME:-} flags options=() name
    printf '#include <mpi.h>\nint main(int n, char **a) { return MPI_Init(&n, &a) + MPI_Finalize(); }\n' >"$work/mpi.c"
    if [ "$home" = none ]; then
        can_mpi="no MPI" note_mpi="MPI_HOME=none: builds for one process"
        return
    elif [ -n "$home" ]; then
        options=("$(mpicc_flags "$home/bin/mpicc")" "-I$home/include -L$home/lib -Wl,-rpath,$home/lib -lmpi")
    else
        options=("$(mpicc_flags mpicc)" "-lmpi")
    fi
    for flags in "${options[@]}"; do
        [ -n "$flags" ] && link mpi $flags || continue
        have_mpi=1
        mpi_libs=$flags
        mpi_cflags=$(tr ' ' '\n' <<<"$flags" | grep -E '^-[ID]' | tr '\n' ' ')
        name=$(macros mpi.h "$mpi_cflags" 'OMPI_MAJOR_VERSION.OMPI_MINOR_VERSION.OMPI_RELEASE_VERSION(OpenMPI)')
        case $name in OMPI_*) name=$(macros mpi.h "$mpi_cflags" 'MPICH_VERSION(MPICH)') ;; esac
        case $name in MPICH_*) name="$(macros mpi.h "$mpi_cflags" 'MPI_VERSION.MPI_SUBVERSION') (standard)" ;; esac
        can_mpi="MPI $(sed 's/(OpenMPI)/ (Open MPI)/; s/(MPICH)/ (MPICH)/' <<<"$name")"
        return
    done
    can_mpi="no MPI"
    note_mpi="no MPI found${home:+ in MPI_HOME=$home}: builds for one process"
    note_mpi+=" (for more: apt-get install libopenmpi-dev openmpi-bin, or set MPI_HOME=DIR)"
}

# ---- CUDA: optional ----

has_cuda_sources() {
    compgen -G 'kernels/cuda/*.cu' >/dev/null
}

find_nvcc() {
    local home=${CUDA_HOME:-} version
    nvcc= have_cuda= nvcc_flags= cuda_libs=
    can_cuda="CPU only: no nvcc found (set CUDA_HOME=DIR)"
    if [ "$home" = none ]; then
        can_cuda="CPU only: CUDA_HOME=none"
        return
    elif [ -n "$home" ]; then
        nvcc=$home/bin/nvcc
        if ! [ -x "$nvcc" ]; then
            can_cuda="CPU only: no nvcc found in CUDA_HOME=$home"
            return
        fi
    else
        nvcc=$(command -v nvcc || command -v /usr/local/cuda/bin/nvcc) || return
    fi
    version=$("$nvcc" --version 2>&1 | sed -n 's/.*release \([0-9]*\.[0-9]*\).*/\1/p' | head -n 1)
    [ -n "$version" ] || fail "$nvcc --version does not name its release" "set CUDA_HOME=DIR, or CUDA_HOME=none for the CPU"
    [ "$(printf '%s\n' "$version" $CUDA_REQUIRED | sort -V | head -n 1)" = $CUDA_REQUIRED ] ||
        fail "found CUDA $version ($nvcc), required $CUDA_REQUIRED or newer" \
            "set CUDA_HOME=DIR of a newer toolkit, or CUDA_HOME=none for a CPU build"
    if ! has_cuda_sources; then
        can_cuda="CPU only: CUDA $version found, but this version has no CUDA kernels"
        return
    fi
    check_nvcc "$version"
}

# Does nvcc accept the host compiler and the architectures, and does its run-time library link?
check_nvcc() {
    local arch home
    home=$(dirname "$(dirname "$(realpath "$nvcc")")")
    nvcc_flags="-std=c++17 -Xcompiler -Wall"
    for arch in ${GPU_ARCHS:-90}; do
        nvcc_flags+=" -gencode arch=compute_$arch,code=sm_$arch"
    done
    # PTX for the GPUs between and after: their driver compiles it at start.
    [ -n "${GPU_ARCHS:-}" ] || nvcc_flags+=" -gencode arch=compute_80,code=compute_80"
    nvcc_flags+=${NVCC_CCBIN:+ -ccbin $NVCC_CCBIN}
    printf '#include <cuda_bf16.h>\n__global__ void f(__nv_bfloat16 *x) { x[0] = x[1] + x[2]; }\n' >"$work/cuda.cu"
    "$nvcc" $nvcc_flags -c -o "$work/cuda.o" "$work/cuda.cu" >"$log" 2>&1 ||
        fail "nvcc $1 (host compiler ${NVCC_CCBIN:-its default, $(command -v g++ || echo none)}) fails: $(
            grep -m 1 -i error "$log" || tail -n 1 "$log"
        )" "set NVCC_CCBIN= to a supported g++, GPU_ARCHS= (now ${GPU_ARCHS:-90, PTX 80}), or CUDA_HOME=none for the CPU"
    cuda_libs="-L$home/lib64 -Wl,-rpath,$home/lib64 -lcudart_static -ldl -lrt -lstdc++"
    printf 'int cudaFree(void *); int main(void) { return cudaFree(0) < 0; }\n' >"$work/cudart.c"
    link cudart $cuda_libs || fail "cannot link cudart_static from $home/lib64: $(tail -n 1 "$log")" "set CUDA_HOME=DIR"
    have_cuda=1
    can_cuda="CUDA $1 for sm ${GPU_ARCHS:-90, PTX 80}"
}

# ---- NCCL: optional, for GPUs ----

# candidates of NCCL_HOME, the system, the CUDA toolkit; "compile flags | link flags".
nccl_candidates() {
    local home lib
    [ -n "${NCCL_HOME:-}" ] || echo "|-lnccl"
    for home in ${NCCL_HOME:-"$1"}; do
        for lib in lib lib64 "lib/$($CC -print-multiarch 2>/dev/null)"; do
            [ -d "$home/$lib" ] && echo "-isystem $home/include|-L$home/$lib -Wl,-rpath,$(realpath "$home/$lib") -lnccl"
        done
    done
}

# A program that does not need the library leaves it out.
find_nccl() {
    local cuda cflags libs version
    have_nccl= nccl_cflags= nccl_libs= note_nccl=
    [ "$have_cuda" = 1 ] || return
    cuda=$(dirname "$(dirname "$(realpath "$nvcc")")")
    if [ "${NCCL_HOME:-}" = none ]; then
        note_nccl="NCCL_HOME=none: data between GPUs goes through the hosts"
        return
    fi
    cat >"$work/nccl.c" <<'C'
#include <nccl.h>
#if NCCL_VERSION_CODE < NCCL_VERSION(2, 18, 1)
#error older than 2.18.1
#endif
int main(void) { return ncclGetVersion((int[1]){0}) + (ncclCommSplit == 0); }
C
    echo "no nccl.h or libnccl.so" >"$log"
    while IFS='|' read -r cflags libs; do
        cflags="$cflags -isystem $cuda/include"
        link nccl $cflags $libs || continue
        have_nccl=1 nccl_cflags=$cflags nccl_libs="-Wl,--push-state,--as-needed $libs -Wl,--pop-state"
        version=$(macros nccl.h "$cflags" 'NCCL_MAJOR.NCCL_MINOR.NCCL_PATCH')
        can_cuda+=", NCCL $version"
        return
    done < <(nccl_candidates "$cuda")
    note_nccl="no NCCL found${NCCL_HOME:+ in NCCL_HOME=$NCCL_HOME} ($(
        { grep -m 1 -oE '(error|cannot find|No such file).*' "$log" || tail -n 1 "$log"; } | tr -d '`"$\\#'
    ); linker $(command -v "$($CC -print-prog-name=ld 2>/dev/null)"))"
    note_nccl+=": data between GPUs goes through the hosts, slowly (apt-get install libnccl-dev, or set NCCL_HOME=DIR)"
}

# ---- the result ----

compiler_name() {
    local version
    version=$($CC --version 2>/dev/null | head -n 1)
    case $version in *clang*) printf 'clang ' ;; *) printf 'gcc ' ;; esac
    $CC -dumpfullversion 2>/dev/null || $CC -dumpversion
}

key="# $(printf '%s|' "$CC" "$CFLAGS" "${CJSON_HOME:-}" "${ZSTD_HOME:-}" "${MPI_HOME:-}" "${CUDA_HOME:-}" "${NCCL_HOME:-}" \
    "${NVCC_CCBIN:-}" "${GPU_ARCHS:-}" "$(command -v "${CC%% *}")" "$(command -v nvcc)" "$(command -v mpicc)" \
    "$($CC --version 2>&1 | head -n 1)" "$(ls -d deps 2>/dev/null)" "$(has_cuda_sources && echo cuda)" "$(cksum <scripts/probe.sh)" |
    tr '\n' ' ')"
if [ "$mode" = build ] && [ -f "$out" ] && [ "$(head -n 1 "$out")" = "$key" ] && grep -q '^COMPLETE := 1' "$out"; then
    exit 0
fi

find_compiler
if [ "$mode" = missing ]; then
    [ -s "$work/compiler" ] && find_libraries || printf 'libcjson-dev\nlibzstd-dev\n'
    exit 0
fi
find_openmp
find_nvcc
find_nccl
find_libraries
find_mpi

# Without MPI, nvcc or NCCL the next make looks again: they may have been installed since.
complete=1
case "$note_mpi$can_cuda$note_nccl" in *"no MPI found"* | *"no nvcc found"* | *"no NCCL found"*) complete= ;; esac
cat >"$out.new" <<MK
$key
COMPLETE := $complete
OPENMP_FLAGS := $openmp_flags
LIB_CFLAGS :=$lib_cflags
LIB_LIBS :=$lib_libs
HAVE_MPI := $have_mpi
MPI_CFLAGS := $mpi_cflags
MPI_LIBS := $mpi_libs
HAVE_CUDA := $have_cuda
NVCC := $nvcc
NVCC_FLAGS :=$nvcc_flags
CUDA_LIBS := $cuda_libs
HAVE_NCCL := $have_nccl
NCCL_CFLAGS := $nccl_cflags
NCCL_LIBS := $nccl_libs
CAN := $(compiler_name), $can_openmp, $can_mpi$can_libraries
CAN_CUDA := $can_cuda
NOTE_MPI := $note_mpi
NOTE_NCCL := $note_nccl
MK
cmp -s "$out.new" "$out" && rm "$out.new" || mv "$out.new" "$out"
