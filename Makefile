# train_moe: `make` builds ./train_moe, `make help` lists the rest.
#
# scripts/probe.sh finds the libraries by linking with them and writes build/config.mk. Three builds of the same sources
# live side by side: build/opt (the trainer and its tests), build/double (the CPU reference in double, for tests against
# finite differences) and build/asan.

UNAME ?= $(shell uname -s)
ifneq ($(UNAME),Linux)
$(error train_moe builds on Linux (WSL2 included), not on $(UNAME). In a container: docker run --rm -it -v "$$PWD":/src -w /src debian:bookworm sh -c "apt-get update && apt-get install -y make && make quickstart YES=1")
endif

ifeq ($(origin CC),default)
CC := $(firstword $(foreach c,gcc clang,$(if $(shell command -v $c),$c)) cc)
endif
# Those that are set go to the scripts; an empty one must not (nvcc reads NVCC_CCBIN itself).
VARIABLES := $(foreach v,CC CFLAGS CJSON_HOME ZSTD_HOME MPI_HOME CUDA_HOME NVCC_CCBIN NCCL_HOME GPU_ARCHS,$(if $($v),$v))
export $(VARIABLES)
MAKEFLAGS += --no-builtin-rules

# Goals that compile look at the machine first; the others work without a compiler. Make before 4.4 does not export to
# $(shell), so the variables are spelt out.
GOALS := $(or $(MAKECMDGOALS),all)
ifneq ($(filter all train_moe run-tests test-gpu sanitize-gpu test-page asan fuzz bench tune build/%,$(GOALS)),)
ifneq ($(shell $(foreach v,$(VARIABLES),$v='$($v)') scripts/probe.sh build/config.mk && echo ok),ok)
$(error nothing was built, see the lines above)
endif
include build/config.mk
endif

# clang brings a fuzzer along; with gcc, tests/fuzz/main.c is it.
FUZZ_BY_LIBFUZZER := $(if $(filter asan fuzz build/fuzz/%,$(GOALS)),$(shell echo 'int LLVMFuzzerTestOneInput(void) \
    { return 0; }' | $(CC) -fsanitize=fuzzer -o build/probe/fuzzer -xc - 2>/dev/null && echo 1))

# ---- sources ----

LIB_SOURCES := $(wildcard kernels/base/*.c kernels/*.c kernels/cpu/*.c kernels/cuda/*.c kernels/comm/*.c data/*.c model/*.c \
    model/parallel/*.c)
RUN_SOURCES := $(wildcard model/train/*.c)
TEST_SOURCES := $(sort $(shell find tests -name '*.c' -not -path 'tests/bench/*' -not -path 'tests/cuda/*' \
    -not -path 'tests/fuzz/*' -not -path 'tests/ranks/*'))
RANKS_TEST_SOURCES := $(wildcard tests/ranks/*.c) tests/test.c tests/kernels/op_test.c tests/model/model_test.c \
    tests/model/train/replay.c
CUDA_TEST_SOURCES := tests/run.c tests/test.c tests/kernels/op_test.c tests/model/model_test.c $(wildcard tests/cuda/*.c)
DOUBLE_TEST_SOURCES := $(filter-out tests/model/train/%,$(filter tests/run.c tests/test.c tests/kernels/% tests/model/%,$(TEST_SOURCES)))
BENCH_SOURCES := $(filter-out tests/bench/tune.c,$(wildcard tests/bench/*.c))
# Fuzzing looks at the coverage of the readers alone.
FUZZED_SOURCES := $(wildcard kernels/base/*.c data/*.c model/train/manifest*.c)
FUZZ_SOURCES := $(filter-out $(if $(FUZZ_BY_LIBFUZZER),%/main.c,%/libfuzzer.c),$(wildcard tests/fuzz/*.c))
CUDA_SOURCES := $(if $(HAVE_CUDA),$(wildcard kernels/cuda/*.cu kernels/cuda/sm90/*.cu kernels/comm/*.cu))

# ---- flags ----

WARNINGS := -Wall -Wextra -Wshadow -Wstrict-prototypes $(if $(OPENMP_FLAGS),,-Wno-unknown-pragmas)
FLAGS := -std=gnu11 -ffp-contract=fast -fno-math-errno -pthread $(OPENMP_FLAGS) $(WARNINGS) -I. $(LIB_CFLAGS) \
    $(if $(HAVE_MPI),-DHAVE_MPI $(MPI_CFLAGS))
FLAGS_opt := $(FLAGS) -O3 -g $(if $(HAVE_CUDA),-DHAVE_CUDA) $(if $(HAVE_NCCL),-DHAVE_NCCL) $(CFLAGS)
FLAGS_double := $(FLAGS) -O2 -g -DREAL_IS_DOUBLE $(CFLAGS)
FLAGS_asan := $(FLAGS) -O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer $(CFLAGS)
FLAGS_fuzz := $(FLAGS_asan) $(if $(FUZZ_BY_LIBFUZZER),-fsanitize=fuzzer-no-link,-fsanitize-coverage=trace-pc)
LIBS := $(LIB_LIBS) $(MPI_LIBS) $(NCCL_LIBS) $(CUDA_LIBS) -ldl -lm

# OpenBLAS is a peer to measure against, in the bench programs alone.
OPENBLAS_LIBS := $(if $(filter bench build/bench/%,$(GOALS)),$(shell echo 'int cblas_sgemm(void); \
    int main(void) { return cblas_sgemm(); }' | $(CC) -o build/probe/openblas -xc - -lopenblas 2>/dev/null && echo -lopenblas))
# CUPTI, which toolkits keep beside cudart or in a folder of its own, says what a GPU really did: there alone, too.
CUDA_DIR := $(if $(HAVE_CUDA),$(patsubst %/bin/,%,$(dir $(realpath $(NVCC)))))
CUPTI_FLAGS := $(if $(CUDA_DIR),-I$(CUDA_DIR)/include -I$(CUDA_DIR)/extras/CUPTI/include)
CUPTI_LIBS := $(if $(CUDA_DIR),$(foreach d,lib64 extras/CUPTI/lib64,-L$(CUDA_DIR)/$d -Wl,-rpath,$(CUDA_DIR)/$d) -lcupti)
CUPTI_LIBS := $(if $(CUDA_DIR),$(if $(filter bench build/bench/%,$(GOALS)),$(shell printf '\043include <cupti.h>\n \
    int main(void) { uint32_t v; return cuptiGetVersion(&v); }' | $(CC) $(CUPTI_FLAGS) -o build/probe/cupti -xc - \
    $(CUPTI_LIBS) 2>/dev/null && echo '$(CUPTI_LIBS)')))
BENCH_FLAGS := $(if $(OPENBLAS_LIBS),-DHAVE_OPENBLAS) $(CUPTI_FLAGS) $(if $(CUPTI_LIBS),-DHAVE_CUPTI)

# The one or two files that print a version; a new commit compiles only these again.
COMMIT := $(or $(shell git rev-parse --short HEAD 2>/dev/null),unknown)$(if $(shell git status --porcelain -uno 2>/dev/null),+)
VERSION_FLAGS := -DTRAIN_MOE_COMMIT='"$(COMMIT)"'
own_flags = $(if $(filter $<,$(VERSION_SOURCES)),$(VERSION_FLAGS)) $(if $(filter $<,$(BENCH_SOURCES)),$(BENCH_FLAGS)) \
    $(if $(filter $<,kernels/comm/nccl.c),$(NCCL_CFLAGS))
VERSION_SOURCES := $(shell grep -ls TRAIN_MOE_COMMIT $(wildcard train_moe.cu) $(LIB_SOURCES) $(RUN_SOURCES))

# ---- rules ----

# objects VARIANT,SOURCES
objects = $(patsubst %,build/$1/%.o,$(basename $2))
CUDA_OBJECTS := $(CUDA_SOURCES:%.cu=build/cuda/%.o)
TRAINER_OBJECTS := $(call objects,opt,train_moe.cu $(LIB_SOURCES) $(RUN_SOURCES)) $(CUDA_OBJECTS)
TEST_OBJECTS := $(call objects,opt,$(TEST_SOURCES) $(LIB_SOURCES) $(RUN_SOURCES)) $(CUDA_OBJECTS)
RANKS_TEST_OBJECTS := $(call objects,opt,$(RANKS_TEST_SOURCES) $(LIB_SOURCES) $(RUN_SOURCES)) $(CUDA_OBJECTS)
DOUBLE_OBJECTS := $(call objects,double,$(DOUBLE_TEST_SOURCES) $(LIB_SOURCES))
CUDA_TEST_OBJECTS := $(call objects,opt,$(CUDA_TEST_SOURCES) $(LIB_SOURCES) $(RUN_SOURCES)) $(CUDA_OBJECTS)
ASAN_OBJECTS := $(call objects,asan,$(TEST_SOURCES) $(LIB_SOURCES) $(RUN_SOURCES))
FUZZ_OBJECTS := $(call objects,fuzz,$(FUZZED_SOURCES)) \
    $(call objects,asan,$(FUZZ_SOURCES) $(filter-out $(FUZZED_SOURCES),$(LIB_SOURCES) $(RUN_SOURCES)))
BENCH_OBJECTS := $(call objects,opt,$(LIB_SOURCES) $(RUN_SOURCES)) $(CUDA_OBJECTS)

say = $(if $(V),,@echo "  $1";)

.PHONY: all quickstart test run-tests test-gpu sanitize-gpu test-page bench tune lint format deps-bundle venv help clean asan fuzz FORCE
.SECONDARY:

all: train_moe
	@echo "train_moe: $(CAN)"
	@echo "$(CAN_CUDA)"
	$(if $(NOTE_MPI),@echo "$(NOTE_MPI)")
	$(if $(NOTE_NCCL),@echo "$(NOTE_NCCL)")

train_moe: $(TRAINER_OBJECTS)
	$(call say,link $@)$(CC) $(FLAGS_opt) -o $@ $^ $(LIBS)

build/tests/run: $(TEST_OBJECTS)
	$(call say,link $@)mkdir -p $(@D) && $(CC) $(FLAGS_opt) -o $@ $^ $(LIBS)

build/tests/run_ranks: $(RANKS_TEST_OBJECTS)
	$(call say,link $@)mkdir -p $(@D) && $(CC) $(FLAGS_opt) -o $@ $^ $(LIBS)

build/tests/run_double: $(DOUBLE_OBJECTS)
	$(call say,link $@)mkdir -p $(@D) && $(CC) $(FLAGS_double) -o $@ $^ $(LIBS)

build/tests/run_cuda: $(CUDA_TEST_OBJECTS)
	$(call say,link $@)mkdir -p $(@D) && $(CC) $(FLAGS_opt) -o $@ $^ $(LIBS)

build/tests/run_asan: $(ASAN_OBJECTS)
	$(call say,link $@)mkdir -p $(@D) && $(CC) $(FLAGS_asan) -o $@ $^ $(LIBS)

build/fuzz/run: $(FUZZ_OBJECTS)
	$(call say,link $@)mkdir -p $(@D) && $(CC) $(FLAGS_asan) $(if $(FUZZ_BY_LIBFUZZER),-fsanitize=fuzzer) -o $@ $^ $(LIBS)

# stamp FILE,TEXT: a file that changes only when TEXT does.
define stamp
$1: FORCE
	@mkdir -p $$(@D) && echo '$(subst ','"'"',$2)' | cmp -s - $$@ || echo '$(subst ','"'"',$2)' >$$@
endef
$(eval $(call stamp,build/version,$(VERSION_FLAGS)))
$(eval $(call stamp,build/bench_flags,$(BENCH_FLAGS)))
$(call objects,opt,$(BENCH_SOURCES)): build/bench_flags

# compile VARIANT: how an object of this build is made. A change of flags compiles everything again.
define compile
$(call stamp,build/$1/flags,$(CC) $(FLAGS_$1))
$(call objects,$1,$(VERSION_SOURCES)): build/version

build/$1/%.o: %.c build/$1/flags
	$$(call say,$(CC) $$<$(if $(filter opt,$1),, ($1)))mkdir -p $$(@D) && $(CC) $$(FLAGS_$1) $$(own_flags) -MMD -MP -c -o $$@ $$<

build/$1/%.o: %.cu build/$1/flags
	$$(call say,$(CC) $$<$(if $(filter opt,$1),, ($1)))mkdir -p $$(@D) && $(CC) $$(FLAGS_$1) $$(own_flags) -MMD -MP -c -o $$@ -x c $$<
endef
$(foreach variant,opt double asan fuzz,$(eval $(call compile,$(variant))))

$(eval $(call stamp,build/cuda/flags,$(NVCC) $(NVCC_FLAGS)))
# sm90/ is Hopper's own: its instructions exist for compute_90a alone, whatever GPU_ARCHS says.
build/cuda/kernels/cuda/sm90/%.o: NVCC_FLAGS := $(filter-out -gencode arch=%,$(NVCC_FLAGS)) -gencode arch=compute_90a,code=sm_90a
build/cuda/%.o: %.cu build/cuda/flags
	$(call say,nvcc $<)mkdir -p $(@D) && $(NVCC) $(NVCC_FLAGS) -O3 -lineinfo -I. -MMD -MP -c -o $@ $<

ifneq ($(filter all train_moe run-tests test-gpu sanitize-gpu test-page asan fuzz bench tune build/%,$(GOALS)),)
include $(shell find build -name '*.d' 2>/dev/null)
endif

# ---- tests ----

test:
	@scripts/packages.sh python3
	@$(MAKE) --no-print-directory run-tests

run-tests: build/tests/run build/tests/run_double $(if $(HAVE_MPI),build/tests/run_ranks) train_moe
	@tests/run_all.sh $(T)

asan: build/tests/run_asan build/fuzz/run
	@build/tests/run_asan $(or $(T),tests/kernels/ tests/data/)
	@[ -n "$(T)" ] || $(call run_fuzz,2)

# run_fuzz SECONDS
run_fuzz = $(if $(FUZZ_BY_LIBFUZZER),tests/fuzz/libfuzzer.sh $1,build/fuzz/run --seed $(or $(SEED),1) --seconds $1)

fuzz: build/fuzz/run
	@$(call run_fuzz,$(or $(SECONDS),60)) $(T)

# On a GPU: every op against the CPU, the whole model, then the runs of tests/*.sh, whose run.device is "auto".
ifeq ($(HAVE_CUDA),1)
test-gpu: build/tests/run_cuda train_moe
	@build/tests/run_cuda $(T)
	@[ -n "$(T)" ] || for script in tests/test_resume.sh tests/test_eval_generate.sh tests/test_train.sh tests/test_gpu_ranks.sh; do bash $$script || exit 1; done

sanitize-gpu: build/tests/run_cuda
	@tests/cuda/sanitize.sh $(or $(TOOL),memcheck) $(T)
else
test-gpu sanitize-gpu:
	@echo "This build has no CUDA: nvcc was not found (CUDA_HOME=DIR). make test runs everything else."
endif

test-page: train_moe
	@tests/page.sh

build/bench/%: build/opt/tests/bench/%.o $(BENCH_OBJECTS)
	$(call say,link $@)mkdir -p $(@D) && $(CC) $(FLAGS_opt) -o $@ $^ $(LIBS) $(OPENBLAS_LIBS) $(CUPTI_LIBS)

build/bench/bench_cuda: $(patsubst %.cu,build/cuda/%.o,$(wildcard tests/bench/bench_*.cu)) $(BENCH_OBJECTS)
	$(call say,link $@)mkdir -p $(@D) && $(CC) $(FLAGS_opt) -o $@ $^ $(LIBS)

build/bench/tune: build/opt/tests/bench/tune.o build/cuda/tests/bench/tune_gemm.o $(BENCH_OBJECTS)
	$(call say,link $@)mkdir -p $(@D) && $(CC) $(FLAGS_opt) -o $@ $^ $(LIBS)

ifeq ($(HAVE_CUDA),1)
tune: build/bench/tune
	@for config in $(or $(CONFIG),configs/moonlight_half.json configs/v3_slice.json); do \
	    $< kernels/cuda/gemm_rows.inc $$config $(SETS) || exit; done
else
tune:
	@echo "This build has no CUDA: nvcc was not found (CUDA_HOME=DIR), and there is nothing to tune." >&2; exit 2
endif

bench: $(BENCH_SOURCES:tests/bench/%.c=build/bench/%) $(if $(HAVE_CUDA),build/bench/bench_cuda)
	@for program in $^; do $$program || exit 1; done

# ---- the rest ----

quickstart:
	@scripts/quickstart.sh

lint:
	@scripts/lint.sh

format:
	@git ls-files -co --exclude-standard '*.c' '*.h' '*.cu' '*.cuh' | xargs clang-format -i

deps-bundle:
	@scripts/deps_bundle.sh

venv: .venv/requirements.txt

.venv/requirements.txt: scripts/requirements.txt
	@python3 -m venv --clear .venv || { echo "error: no .venv was made; on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	@.venv/bin/pip install -q --disable-pip-version-check -r $< && cp $< $@
	@echo ".venv/bin/python has the packages of $<"

clean:
	rm -rf build train_moe

help:
	@sed -n 's/^# *| //p' Makefile

# | make                builds ./train_moe and says what it can do
# | make quickstart     sets up, trains a small model on a CPU and shows what it has learnt
# |                     TEXT=FILE your text   TOKENIZER=train:N   CONFIG=FILE   YES=1 installs packages unasked
# | make test           builds and runs all tests; T=NAME those with NAME in their name or file
# | make test-gpu       tests on a GPU
# | make sanitize-gpu   the op tests under compute-sanitizer; TOOL=memcheck|racecheck|initcheck|synccheck T=NAME
# | make test-page      the page of scripts/plot_log.py in headless Chromium; RUNS="runs/a runs/b" shows those
# | make asan           op and reader tests under the address and undefined-behaviour sanitizers; T=NAME
# | make fuzz           every reader of files against damaged files: SECONDS=60 each, SEED=1, T=NAME for one;
# |                     CC=clang takes libFuzzer
# | make bench          kernels beside their peers
# | make tune           on a GPU: times cuBLASLt's algorithms for the GEMMs of CONFIG=FILE and writes the fastest into
# |                     kernels/cuda/gemm_rows.inc; make builds them in. SETS="precision.compute=fp8" as for a run
# | make lint           include floors, format, warnings of gcc and clang
# | make format         clang-format on all sources
# | make deps-bundle    headers and static libraries of cJSON and zstd into deps/, which is preferred afterwards
# | make venv           Python packages of scripts/requirements.txt into .venv/: more formats and tokenizers, faster
# | make clean          removes what was built
# |
# | Variables: CC=gcc|clang   CFLAGS=...   V=1 shows commands
# |            CJSON_HOME= ZSTD_HOME= MPI_HOME= CUDA_HOME= NCCL_HOME= (DIR; the last three take none: do without)
# |            NVCC_CCBIN=g++   GPU_ARCHS="80 90a"

.DEFAULT:
	@echo "make: there is no target or file '$@'. Targets:" >&2
	@sed -n 's/^# *| //p' Makefile >&2
	@exit 2
