/* Ranks over NCCL: the calls of comm.h where the GPUs move the bytes, and no host takes part.
 *
 * Every call queues work on STREAM_COMM and returns, so that a step is captured into graphs as on one GPU. Nothing
 * depends on a count: each rank gives all its T rows to every other, so that a token's place is known before it is
 * sent, and the receiver keeps what is meant for its experts. Hence a dispatch is an all-gather, a combine an exchange
 * of planes, and the sum of the routing weights' gradients a reduce-scatter.
 *
 * Groups of the same ranks share a communicator; all are split from the first, which the hosts arrange over MPI.
 * In-switch sums (NVLS) stay off: their order is nobody's, and they need multicast memory. */
#include "checks.h"

#ifdef HAVE_NCCL
#include <nccl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "a2a.h"
#include "kernels/cuda/cuda.h"
#include "watch.h"

#if NCCL_VERSION_CODE < NCCL_VERSION(2, 18, 1)
#error "NCCL 2.18.1 or newer is needed, for ncclCommSplit: NCCL_HOME=DIR of another, or NCCL_HOME=none"
#endif

/* Sums whose parts of all ranks fit in here are gathered, and added in rank order. */
enum { SMALL_BYTES = 1 << 20, HOST_LEN = 64, LATE_LEN = 512 };

typedef struct {
    Comm comm;                     /* first, so that a Comm is one of these */
    ncclComm_t group[GROUP_COUNT]; /* NULL: a rank alone, or in none: see group_of */
    ncclComm_t made[GROUP_COUNT];  /* each once */
    int n_made;
    void *parts; /* SMALL_BYTES on the device */
} Nccl;

static Nccl *nccl_of(Comm *c) {
    return (Nccl *)c;
}

/* NULL: this rank is alone in the group, and has all that there is to have. */
static ncclComm_t group_of(Comm *c, Group g) {
    CHECK(mesh_group_number(&c->mesh, g) >= 0, "group %d without rank %d", (int)g, c->mesh.rank);
    return nccl_of(c)->group[g];
}

/* The thread that watches has said why, and ends the process: what fails now only follows. */
static atomic_bool is_aborted;

static void done(ncclResult_t code, const char *what) {
    while (atomic_load(&is_aborted)) pause();
    if (code == ncclSuccess) return;
    FAIL("NCCL_DEBUG=WARN tells more; another rank may have ended: look for its message", "%s over NCCL: %s (%s)", what,
         ncclGetErrorString(code), ncclGetLastError(NULL));
}

/* ---- around a call ----------------------------------------------------------------------------------------------- */

static void begin(const Comm *c, Stream s) {
    if (c->is_ordered_by_caller) return;
    op_event_record(c->device, EVENT_COMM_BEGIN, STREAM_COMPUTE);
    op_event_wait(c->device, EVENT_COMM_BEGIN, s);
}

static void end(const Comm *c, Stream s) {
    if (c->is_ordered_by_caller) return;
    op_event_record(c->device, EVENT_COMM_END, s);
    op_event_wait(c->device, EVENT_COMM_END, STREAM_COMPUTE);
}

/* How NCCL adds the elements. */
static ncclDataType_t sum_type(Dtype dtype) {
    switch (dtype) {
    case DTYPE_F32: return ncclFloat32;
    case DTYPE_F64: return ncclFloat64;
    case DTYPE_I32: return ncclInt32;
    case DTYPE_BF16: return ncclBfloat16;
    case DTYPE_NONE:
    case DTYPE_E4M3:
    case DTYPE_E5M6:
    case DTYPE_COUNT: break;
    }
    CHECK(false, "%s is not summed over ranks", dtype_name(dtype));
    return ncclFloat32;
}

/* ---- collectives ------------------------------------------------------------------------------------------------- */

/* y = all ranks' x, as bytes. */
static void gather(Comm *c, void *y, Tensor x, Group g, Stream s, const char *what) {
    done(ncclAllGather(x.data, y, tensor_bytes(x), ncclUint8, group_of(c, g), cuda_stream_of(s)), what);
}

static void nccl_all_reduce(Comm *c, Tensor y, Tensor x, Group g, Stream s) {
    const ncclComm_t group = group_of(c, g);
    void *parts = nccl_of(c)->parts;
    const int size = c->mesh.size[g];
    const int64_t n = tensor_numel(x);
    const ncclDataType_t type = sum_type(x.dtype);
    check_flat(y, x, n, n);
    begin(c, s);
    if (!group) {
        copy_alone(c, y, x, s);
    } else if (tensor_bytes(x) <= (size_t)SMALL_BYTES / (size_t)size) {
        gather(c, parts, x, g, s, "all_reduce");
        a2a_sum_in_order(y, parts, size, s);
    } else {
        done(ncclAllReduce(x.data, y.data, (size_t)n, type, ncclSum, group, cuda_stream_of(s)), "all_reduce");
    }
    end(c, s);
}

static void nccl_reduce_scatter(Comm *c, Tensor y, Tensor x, Group g, Stream s) {
    const ncclComm_t group = group_of(c, g);
    const int64_t n = tensor_numel(y);
    const ncclDataType_t type = sum_type(x.dtype);
    check_flat(y, x, n, n * c->mesh.size[g]);
    begin(c, s);
    if (group)
        done(ncclReduceScatter(x.data, y.data, (size_t)n, type, ncclSum, group, cuda_stream_of(s)), "reduce_scatter");
    else
        copy_alone(c, y, x, s);
    end(c, s);
}

static void nccl_all_gather(Comm *c, Tensor y, Tensor x, Group g, Stream s) {
    const int64_t n = tensor_numel(x);
    check_flat(y, x, n * c->mesh.size[g], n);
    begin(c, s);
    if (group_of(c, g))
        gather(c, y.data, x, g, s, "all_gather");
    else
        copy_alone(c, y, x, s);
    end(c, s);
}

static void nccl_broadcast(Comm *c, Tensor y, int root, Group g, Stream s) {
    const ncclComm_t group = group_of(c, g);
    check_peer(c, y, root, g, "broadcast");
    begin(c, s);
    if (group)
        done(ncclBroadcast(y.data, y.data, tensor_bytes(y), ncclUint8, root, group, cuda_stream_of(s)), "broadcast");
    end(c, s);
}

static void nccl_send(Comm *c, Tensor x, int to, Group g, Stream s) {
    check_peer(c, x, to, g, "send");
    CHECK(to != c->mesh.rank_in[g], "send: rank %d to itself", to);
    begin(c, s);
    done(ncclSend(x.data, tensor_bytes(x), ncclUint8, to, group_of(c, g), cuda_stream_of(s)), "send");
    end(c, s);
}

static void nccl_recv(Comm *c, Tensor y, int from, Group g, Stream s) {
    check_peer(c, y, from, g, "recv");
    CHECK(from != c->mesh.rank_in[g], "recv: rank %d from itself", from);
    begin(c, s);
    done(ncclRecv(y.data, tensor_bytes(y), ncclUint8, from, group_of(c, g), cuda_stream_of(s)), "recv");
    end(c, s);
}

/* ---- tokens to their experts and back ---------------------------------------------------------------------------- */

/* A column of tiles has its scales together, those of a rank behind those of the one before: each is a gather. */
static void gather_scales(Comm *c, Tensor y, Tensor x, Stream s) {
    const Tensor to = scales_of(y), from = scales_of(x);
    for (int64_t i = 0; i < from.shape[0]; i++)
        gather(c, (int32_t *)to.data + i * to.ld, tensor_rows(from, i, 1), GROUP_EXPERT, s, "dispatch");
}

/* What lies where it would arrive is there. */
static void gather_rows(Comm *c, Tensor y, Tensor x, Stream s) {
    check_sent(y, x, c->mesh.n_ep * tensor_numel(x), tensor_numel(x));
    if (!group_of(c, GROUP_EXPERT)) {
        copy_alone(c, y, x, s);
        return;
    }
    done(ncclGroupStart(), "dispatch"); /* one launch for bytes and scales */
    gather(c, y.data, x, GROUP_EXPERT, s, "dispatch");
    if (x.scale) gather_scales(c, y, x, s);
    done(ncclGroupEnd(), "dispatch");
}

/* On one expert rank. */
static bool is_there(const Comm *c, Tensor y, Tensor x) {
    return c->mesh.n_ep == 1 && y.data == x.data;
}

static void nccl_dispatch(Comm *c, Tensor received, DispatchPlan plan, Tensor x, Tensor ids, Tensor weights, Stream s) {
    check_tokens(c, received, plan);
    if (is_there(c, received, x)) return;
    begin(c, s);
    gather_rows(c, received, x, s);
    if (!tensor_is_none(weights)) {
        gather_rows(c, plan.ids, ids, s);
        gather_rows(c, plan.weights, weights, s);
        a2a_keep_own(plan.ids, plan.weights, plan.slot_of_expert, c->mesh.ep, c->mesh.n_ep, s);
    }
    end(c, s);
}

/* Block r of x goes to rank r, whose block for this rank arrives in block r of y. */
static void exchange(Comm *c, char *y, const char *x, size_t block, Group g, Stream s, const char *what) {
    const ncclComm_t group = group_of(c, g);
    done(ncclGroupStart(), what);
    for (int r = 0; r < c->mesh.size[g]; r++) {
        done(ncclSend(x + (size_t)r * block, block, ncclUint8, r, group, cuda_stream_of(s)), what);
        done(ncclRecv(y + (size_t)r * block, block, ncclUint8, r, group, cuda_stream_of(s)), what);
    }
    done(ncclGroupEnd(), what);
}

static void nccl_combine(Comm *c, Tensor y, Tensor dw, Tensor rows, Tensor dweights, DispatchPlan plan, Stream s) {
    const int R = c->mesh.n_ep;
    const ncclComm_t group = group_of(c, GROUP_EXPERT);
    CHECK(y.ndim == 3 && y.shape[0] == R, "combine on %d ranks writes a plane of each", R);
    CHECK(R == 1 || y.data != rows.data, "planes are not exchanged in place");
    check_tokens(c, rows, plan);
    check_flat(y, rows, tensor_numel(rows), tensor_numel(rows));
    if (is_there(c, y, rows)) return;
    begin(c, s);
    a2a_zero_absent(rows, plan.ids, s);
    if (!group)
        copy_alone(c, tensor_plane(y, 0), rows, s);
    else
        exchange(c, (char *)y.data, (const char *)rows.data, tensor_bytes(rows) / (size_t)R, GROUP_EXPERT, s,
                 "combine");
    if (!tensor_is_none(dweights)) {
        check_flat(dw, dweights, tensor_numel(dw), R * tensor_numel(dw));
        if (group) /* each weight's gradient is one rank's, the others give zero: no sum is rounded */
            done(ncclReduceScatter(dweights.data, dw.data, (size_t)tensor_numel(dw), sum_type(dw.dtype), ncclSum, group,
                                   cuda_stream_of(s)),
                 "combine");
        else
            copy_alone(c, dw, dweights, s);
    }
    end(c, s);
}

/* ---- who waits for whom ------------------------------------------------------------------------------------------ */

/* Asked by the thread that watches: NCCL's own threads see a connection break. */
static const char *trouble(void *arg) {
    const Nccl *m = (const Nccl *)arg;
    for (int i = 0; i < m->n_made; i++) {
        ncclResult_t state = ncclSuccess;
        if (ncclCommGetAsyncError(m->made[i], &state) != ncclSuccess) continue;
        if (state != ncclSuccess && state != ncclInProgress) return ncclGetErrorString(state);
    }
    return NULL;
}

static void *abort_one(void *group) {
    ncclCommAbort((ncclComm_t)group);
    return NULL;
}

/* An abort may wait for kernels that another communicator holds up: each has a thread of its own, and nobody waits. */
static void abort_all(void *arg) {
    const Nccl *m = (const Nccl *)arg;
    atomic_store(&is_aborted, true);
    for (int i = 0; i < m->n_made; i++) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, abort_one, m->made[i]) == 0) pthread_detach(thread);
    }
}

/* ---- start ------------------------------------------------------------------------------------------------------- */

const char *comm_nccl_version(char *text, size_t size) {
    int v = 0;
    char built[32] = "";
    if (ncclGetVersion(&v) != ncclSuccess) v = 0;
    if (v != NCCL_VERSION_CODE)
        snprintf(built, sizeof built, " (built with %d.%d.%d)", NCCL_MAJOR, NCCL_MINOR, NCCL_PATCH);
    snprintf(text, size, "NCCL %d.%d.%d%s", v / 10000, v / 100 % 100, v % 100, built);
    return text;
}

/* Before the first call, as NCCL reads its environment once. All paths between ranks are opened at the start: what they
 * take belongs to the memory plan, and no step waits for them. */
static void set_environment(void) {
    setenv("NCCL_NVLS_ENABLE", "0", 1);
    setenv("NCCL_RUNTIME_CONNECT", "0", 0);
}

/* Connecting waits for ever for one that does not come: a signal ends it. */
static char late_text[LATE_LEN];

static void is_late(int number) {
    (void)number;
    if (write(STDERR_FILENO, late_text, strlen(late_text)) < 0) _exit(EXIT_FAILED);
    _exit(EXIT_FAILED);
}

static void begin_deadline(const Mesh *mesh, int timeout_s) {
    enum { FOR_RANK_0_S = 5 }; /* one rank speaks, the launcher ends the others */
    char host[HOST_LEN] = "";
    gethostname(host, sizeof host - 1);
    snprintf(late_text, sizeof late_text,
             "error: NCCL has not connected the %d ranks for %d s (run.hang_timeout_s), says rank %d on %s\n"
             "hint:  NCCL_SOCKET_IFNAME=NAME chooses the network interface, NCCL_DEBUG=INFO shows it and its address\n",
             mesh->world, timeout_s, mesh->rank, host);
    signal(SIGALRM, is_late);
    alarm((unsigned)timeout_s + (mesh->rank > 0 ? FOR_RANK_0_S : 0));
}

static void end_deadline(void) {
    alarm(0);
    signal(SIGALRM, SIG_DFL);
}

/* Called by all ranks alike, in or out of the group. */
static void open_group(Nccl *m, Group g) {
    const Mesh *mesh = &m->comm.mesh;
    for (int other = 0; other < (int)g; other++)
        if (mesh_groups_are_same(mesh, g, (Group)other)) {
            m->group[g] = m->group[other];
            return;
        }
    if (mesh->size[g] == 1) return;
    const int number = mesh_group_number(mesh, g);
    done(ncclCommSplit(m->group[GROUP_WORLD], number < 0 ? NCCL_SPLIT_NOCOLOR : number, mesh->rank_in[g], &m->group[g],
                       NULL),
         "cutting the mesh");
    if (m->group[g]) m->made[m->n_made++] = m->group[g];
}

/* Sends and receives connect two ranks at their first one. */
static void connect_peers(Nccl *m, Group g) {
    const int size = m->comm.mesh.size[g];
    char *room = (char *)m->parts;
    if (m->group[g] && 2 * size <= SMALL_BYTES)
        exchange(&m->comm, room, room + size, 1, g, STREAM_COMM, "a first exchange");
}

static void open_groups(Nccl *m) {
    const Mesh *mesh = &m->comm.mesh;
    ncclUniqueId id;
    memset(&id, 0, sizeof id);
    if (mesh->rank == 0) done(ncclGetUniqueId(&id), "the start");
    job_spread(&id, sizeof id);
    done(ncclCommInitRank(&m->group[GROUP_WORLD], mesh->world, id, mesh->rank), "the start");
    m->made[m->n_made++] = m->group[GROUP_WORLD];
    for (int g = GROUP_WORLD + 1; g < GROUP_COUNT; g++) open_group(m, (Group)g);
    connect_peers(m, GROUP_EXPERT);
    connect_peers(m, GROUP_PIPE);
    op_synchronize(m->comm.device, STREAM_COMM);
}

static void *nccl_alloc_symmetric(Comm *c, const Device *d, size_t bytes) {
    (void)c;
    return op_alloc(d, bytes);
}

static void nccl_free(Comm *c) {
    Nccl *m = nccl_of(c);
    watch_guard(NULL);
    op_synchronize(c->device, STREAM_COMM);
    while (m->n_made > 0) done(ncclCommDestroy(m->made[--m->n_made]), "the end");
    op_release(c->device, m->parts);
    free(m);
}

static int64_t bytes_free(void) {
    DeviceMemory memory;
    cuda_memory(&memory);
    return memory.free;
}

Comm *comm_nccl(const Device *d, Mesh mesh, int timeout_s) {
    Nccl *m = (Nccl *)calloc(1, sizeof *m);
    CHECK(m, "no memory for a Comm");
    Comm *c = &m->comm;
    c->name = "nccl";
    c->all_reduce = nccl_all_reduce;
    c->reduce_scatter = nccl_reduce_scatter;
    c->all_gather = nccl_all_gather;
    c->broadcast = nccl_broadcast;
    c->send = nccl_send;
    c->recv = nccl_recv;
    c->dispatch = nccl_dispatch;
    c->combine = nccl_combine;
    c->alloc_symmetric = nccl_alloc_symmetric;
    c->free = nccl_free;
    c->device = d;
    c->mesh = mesh;
    const int64_t before = bytes_free();
    m->parts = op_alloc(d, SMALL_BYTES);
    CHECK(m->parts, "no device memory for NCCL");
    set_environment();
    begin_deadline(&c->mesh, timeout_s);
    open_groups(m);
    end_deadline();
    const int64_t taken = before - bytes_free(); /* who else is on the GPU may have given some back meanwhile */
    c->device_bytes = taken > 0 ? taken : 0;
    char version[64];
    snprintf(c->about, sizeof c->about, "%s, NVLS off", comm_nccl_version(version, sizeof version));
    watch_guard(&(WatchGuard){trouble, abort_all, m});
    return c;
}

#else
const char *comm_nccl_version(char *text, size_t size) {
    if (size > 0) text[0] = 0;
    return text;
}

Comm *comm_nccl(const Device *d, Mesh mesh, int timeout_s) {
    (void)d, (void)mesh, (void)timeout_s;
    DIE("make NCCL_HOME=DIR, or set parallel.comm to \"mpi\"", "parallel.comm is nccl, but this binary has no NCCL");
}
#endif
