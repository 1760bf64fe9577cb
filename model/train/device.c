/* See device.h. The one place that knows which backends were built in. */
#include "device.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "kernels/base/check.h"
#include "kernels/base/host_memory.h"
#include "kernels/comm/comm.h"
#include "kernels/cpu/cpu.h"

#ifdef _OPENMP
#include <omp.h>
#endif
#ifdef HAVE_CUDA
#include "kernels/cuda/cuda.h"
#endif

/* Logits that fill a GPU. */
#define GPU_LOGITS_BYTES ((int64_t)1 << 30)

/* Ranks of one host that nobody has bound to cores share them. */
static void share_cores(void) {
#ifdef _OPENMP
    const int here = job_ranks_here(), cores = omp_get_num_procs();
    if (here > 1 && cores == (int)sysconf(_SC_NPROCESSORS_ONLN) && !getenv("OMP_NUM_THREADS"))
        omp_set_num_threads(cores > here ? cores / here : 1);
#endif
}

static int threads(void) {
#ifdef _OPENMP
    return omp_get_max_threads();
#else
    return 1;
#endif
}

static void use_host_memory(DeviceMemory *m) {
    host_memory("", &m->total, &m->free);
    m->is_measured = true;
    m->on_touch = true;
}

static void open_cpu(Device *d, const Config *c, char *text) {
#ifdef _OPENMP
    if (c->run.threads > 0) omp_set_num_threads(c->run.threads);
#endif
    d->ops = ops_cpu();
    use_host_memory(&d->memory);
    d->memory.total /= job_ranks_here();
    d->memory.free /= job_ranks_here();
    snprintf(text, DEVICE_TEXT_LEN, "cpu, %d thread%s, %s", threads(), threads() > 1 ? "s" : "", cpu_isa_name());
}

static const char *const cpu_identity = "cpu";

/* Ranks on this GPU, how many of them are before this one, and ranks on the fullest GPU of the job. */
static struct { int here, before, most; } sharing = {1, 0, 1};

int device_ranks_sharing(void) {
    return sharing.most;
}

/* What a checkpoint says of its device, when it is another. */
static void note_other(char *note, const char *saved, const char *now) {
    note[0] = 0;
    if (saved && strcmp(saved, now) != 0)
        snprintf(note, DEVICE_NOTE_LEN, "saved on %.100s, this is %.100s: bits differ from here on", saved, now);
}

#ifdef HAVE_CUDA
static char gpu_name[256], gpu_bus[32];

const char *device_built_for(char *text) {
    char nccl[64];
    cuda_built_for(text, DEVICE_TEXT_LEN);
    const size_t used = strlen(text);
    if (comm_nccl_version(nccl, sizeof nccl)[0]) snprintf(text + used, DEVICE_TEXT_LEN - used, ", %s", nccl);
    return text;
}

static void describe_gpu(const CudaDevice *gpu, const DeviceMemory *memory, char *text) {
    char driver[128];
    snprintf(driver, sizeof driver, "for CUDA %d.%d", gpu->driver_version / 1000, gpu->driver_version % 1000 / 10);
    snprintf(text, DEVICE_TEXT_LEN, "%.64s (sm_%d%d, %d SMs, %.0f of %.0f GiB free), driver %s", gpu->name, gpu->major,
             gpu->minor, gpu->n_sms, (double)memory->free / (1 << 30), (double)memory->total / (1 << 30),
             gpu_health_driver()[0] ? gpu_health_driver() : driver);
}

/* ---- ranks and GPUs ---- */

/* Where a rank computes. */
typedef struct {
    char host[64], bus[32];
} Place;

/* Which of the host's GPUs is this rank's: they take them in turn. Its place goes to all ranks. */
static int choose_gpu(void) {
    Place own;
    const int world = job_world(), n_gpus = cuda_device_count(NULL);
    const int device = n_gpus > 0 ? job_rank_here() % n_gpus : 0;
    if (n_gpus == 0) return 0; /* starting it will say why there is none */
    memset(&own, 0, sizeof own);
    gethostname(own.host, sizeof own.host - 1);
    cuda_bus_of(device, own.bus, sizeof own.bus);
    Place *all = (Place *)calloc((size_t)world, sizeof *all);
    CHECK(all, "no memory for the places of %d ranks", world);
    job_gather(all, &own, sizeof own);
    memset(&sharing, 0, sizeof sharing);
    for (int r = 0; r < world; r++) {
        int n = 0;
        for (int other = 0; other < world; other++) n += memcmp(&all[r], &all[other], sizeof own) == 0;
        if (n > sharing.most) sharing.most = n;
        if (memcmp(&all[r], &own, sizeof own) != 0) continue;
        sharing.here = n;
        sharing.before += r < job_rank();
    }
    free(all);
    return device;
}

static void wait_for_all(void) {
    uint64_t nothing = 0;
    job_sum(&nothing, 1);
}

/* Ranks that share a GPU start one after the other, so that each sees what it takes itself. */
static void start_gpu(CudaDevice *gpu) {
    char err[ERR_LEN], hint[ERR_LEN];
    const int device = choose_gpu();
    for (int turn = 0; turn < sharing.most; turn++) {
        if (turn == sharing.before && cuda_start(device, gpu, err, hint) != 0) DIE(hint, "%s", err);
        if (sharing.most > 1) wait_for_all();
    }
}

/* This rank's part of a GPU on which all have started and none has allocated yet. */
static void share_memory(DeviceMemory *m) {
    if (sharing.most == 1) return;
    wait_for_all();
    m->total /= sharing.here;
    m->free /= sharing.here;
    m->held = 0;
    for (int i = 0; i < MEMORY_ROWS; i++)
        if (i != MEMORY_GEMM_KERNELS) m->held += m->row[i]; /* these are to come */
}

static void open_cuda(Device *d, const Config *c, char *text) {
    char err[ERR_LEN], hint[ERR_LEN];
    CudaDevice gpu;
    start_gpu(&gpu);
    if (c->precision.compute == COMPUTE_FP8 && cuda_check_fp8(&gpu, err, hint) != 0) DIE(hint, "%s", err);
    d->ops = ops_cuda();
    d->is_asynchronous = true;
    d->logits_bytes = GPU_LOGITS_BYTES;
    d->range = cuda_range;
    cuda_memory(&d->memory);
    share_memory(&d->memory);
    (void)gpu_health_open(GPU_HEALTH_LIBRARY, gpu.pci_bus_id);
    snprintf(gpu_name, sizeof gpu_name, "%s", gpu.name);
    snprintf(gpu_bus, sizeof gpu_bus, "%s", gpu.pci_bus_id);
    describe_gpu(&gpu, &d->memory, text);
    const size_t used = strlen(text);
    if (sharing.here > 1) snprintf(text + used, DEVICE_TEXT_LEN - used, "; %d ranks share it", sharing.here);
}

/* run.device "auto": a GPU that is there but cannot be used is an error, no GPU is a fact. `why` gets it. */
static bool wants_cuda(const Config *c, char *why) {
    if (c->run.device != DEVICE_AUTO) return c->run.device == DEVICE_CUDA;
    return cuda_device_count(why) > 0;
}

static void close_cuda(void) {
    gpu_health_close();
    cuda_stop();
}

bool device_is_gpu(const Device *d) {
    return d->ops == ops_cuda();
}

const char *device_gpu_name(void) {
    return gpu_name;
}

const char *device_gpu_bus(void) {
    return gpu_bus;
}

const char *device_identity(const Device *d, char *text) {
    if (device_is_gpu(d)) return cuda_gemm_place(text, DEVICE_TEXT_LEN);
    snprintf(text, DEVICE_TEXT_LEN, "%s", cpu_identity);
    return text;
}

char *device_gemms(const Device *d) {
    return device_is_gpu(d) ? cuda_gemm_rows() : NULL;
}

void device_resume(const Device *d, const char *identity, const char *gemms, char *note) {
    char now[DEVICE_TEXT_LEN], err[ERR_LEN];
    note_other(note, identity, device_identity(d, now));
    if (!gemms || !device_is_gpu(d) || cuda_gemm_resume(gemms, err) == 0) return;
    snprintf(note, DEVICE_NOTE_LEN, "its GEMM algorithms are not understood: bits may differ from here on");
}

const Ops *device_rehearsal(const Device *d) {
    return device_is_gpu(d) ? ops_cuda_prepare() : NULL;
}

const char *device_gemm_note(const Device *d, const char *config, char *note) {
    note[0] = 0;
    if (!device_is_gpu(d)) return note;
    const GemmCount n = cuda_gemm_count();
    char more[192] = "";
    if (n.resumed > 0)
        snprintf(more, sizeof more, "; %d as in the checkpoint", n.resumed);
    else if (n.known < n.total)
        snprintf(more, sizeof more, "; for the others: make tune CONFIG=%.100s, SETS=\"...\" for what --set says",
                 config);
    snprintf(note, DEVICE_NOTE_LEN, "gemm table: %d of %d shapes known%s", n.known, n.total, more);
    return note;
}

int device_health(const Device *d, GpuHealth *health) {
    return device_is_gpu(d) ? gpu_health_read(health) : -1;
}

int device_profile(const Device *d, bool on) {
    if (!device_is_gpu(d)) return -1;
    cuda_profiler(on);
    return 0;
}
#else
const char *device_built_for(char *text) {
    snprintf(text, DEVICE_TEXT_LEN, "CPU only");
    return text;
}

static void open_cuda(Device *d, const Config *c, char *text) {
    (void)d, (void)c, (void)text;
    DIE("set run.device to \"auto\" or \"cpu\", or build with nvcc: make CUDA_HOME=...",
        "run.device is cuda, but this binary has no CUDA backend");
}

static bool wants_cuda(const Config *c, char *why) {
    why[0] = 0;
    return c->run.device == DEVICE_CUDA;
}

static void close_cuda(void) {
}

bool device_is_gpu(const Device *d) {
    (void)d;
    return false;
}

const char *device_gpu_name(void) {
    return "";
}

const char *device_gpu_bus(void) {
    return "";
}

const char *device_identity(const Device *d, char *text) {
    (void)d;
    snprintf(text, DEVICE_TEXT_LEN, "%s", cpu_identity);
    return text;
}

char *device_gemms(const Device *d) {
    (void)d;
    return NULL;
}

void device_resume(const Device *d, const char *identity, const char *gemms, char *note) {
    (void)d, (void)gemms;
    note_other(note, identity, cpu_identity);
}

const Ops *device_rehearsal(const Device *d) {
    (void)d;
    return NULL;
}

const char *device_gemm_note(const Device *d, const char *config, char *note) {
    (void)d, (void)config;
    note[0] = 0;
    return note;
}

int device_health(const Device *d, GpuHealth *health) {
    (void)d, (void)health;
    return -1;
}

int device_profile(const Device *d, bool on) {
    (void)d, (void)on;
    return -1;
}
#endif

void device_open(Device *d, const Config *c, char *text) {
    char why[ERR_LEN] = "";
    memset(d, 0, sizeof *d);
    share_cores();
    if (wants_cuda(c, why))
        open_cuda(d, c, text);
    else
        open_cpu(d, c, text);
    if (why[0]) {
        const size_t used = strlen(text);
        snprintf(text + used, DEVICE_TEXT_LEN - used, "; no GPU: %.250s", why);
    }
    ops_check_complete(d->ops);
}

void device_close(Device *d) {
    if (d->ops && d->ops != ops_cpu()) close_cuda();
    d->ops = NULL;
}

void device_for_plan(Device *d, const Config *c, bool is_gpu) {
    char why[ERR_LEN];
    memset(d, 0, sizeof *d);
    d->ops = ops_cpu(); /* only asked for nothing */
    if (!is_gpu && !wants_cuda(c, why)) {
        use_host_memory(&d->memory);
        return;
    }
    device_memory_expected(&d->memory);
    d->logits_bytes = GPU_LOGITS_BYTES;
}
