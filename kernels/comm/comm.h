/* Data between ranks: one struct of function pointers, and who is who. Floor 2.
 *
 * Everything that crosses ranks goes through a Comm; grep for comm_ lists every transfer of the program. World size 1
 * runs the same calls. Collectives take a group of the mesh; sums run in rank order, so that equal inputs give equal
 * bits. All calls are asynchronous on STREAM_COMM; buffers stay untouched until an event recorded behind the call.
 *
 * NCCL adds what is large in an order of its own (a ring), which follows from size, layout, library and machine: equal
 * runs give equal bits, but not those of the rank order, unless there are two ranks. What is small (losses, the norm)
 * it adds in rank order like the others. */
#ifndef TRAIN_MOE_COMM_H
#define TRAIN_MOE_COMM_H

#include "kernels/ops.h"

/* Which ranks take part. world: all. expert: the R ranks that share one copy of the experts (EP). expert_data: holders
 * of the same experts. data: holders of the same other tensors. pipe: the stages of one pipeline. embed: first and last
 * stage, where MTP shares the embedding. Under DualPipe two ranks of a pipeline hold the same stages: then the two
 * groups of holders have both. */
typedef enum { GROUP_WORLD, GROUP_EXPERT, GROUP_EXPERT_DATA, GROUP_DATA, GROUP_PIPE, GROUP_EMBED, GROUP_COUNT } Group;

/* rank = (pp*DP + dp)*EP + ep */
typedef struct {
    int rank, world;
    int pp, dp, ep;        /* this rank's coordinates */
    int n_pp, n_dp, n_ep;  /* extents */
    int n_data, data;      /* ranks that take samples of their own (DP x EP), and which of them this one is */
    bool is_mirrored;      /* ranks s and P-1-s of a pipeline hold the same stages (DualPipe) */
    int size[GROUP_COUNT]; /* ranks in each group */
    int rank_in[GROUP_COUNT];
} Mesh;

/* The mesh of a world of `world` ranks; world must be n_pp * n_ep * dp. Pure. */
Mesh mesh_make(int rank, int world, int n_pp, int n_ep);
/* The same for stages that are held by ranks s and P-1-s of each pipeline; n_pp must be even. Pure. */
Mesh mesh_mirrored(Mesh m);

/* Ranks of one number share a group; negative: this rank is in none. Pure. */
int mesh_group_number(const Mesh *m, Group g);
/* Do both cut the whole world into the same sets of ranks, in the same order? Pure. */
bool mesh_groups_are_same(const Mesh *m, Group a, Group b);

/* The largest EP that divides the world (n_pp stages taken) and the experts: parallel.ep "auto". 1 in a dense model
 * (no experts). Pure. */
int mesh_auto_ep(int world, int n_pp, int n_experts);

/* What a dispatch leaves for its combine and for backward: the forward plan is reused. Tensors of the exchange arena.
 */
typedef struct {
    Tensor ids;     /* (R*T, K) i32  global expert ids of the received tokens, -1 = not for this rank or unused */
    Tensor weights; /* (R*T, K) f32  0 where the id is -1 */
    Tensor slot_of_expert; /* (E) i32  expert e is on rank slot_of_expert[e] / (E/R) of GROUP_EXPERT; only read */
} DispatchPlan;

enum { COMM_ABOUT_LEN = 96 };

typedef struct Comm Comm;
struct Comm {
    const char *name;
    /* y = sum over the ranks of x, in rank order; y may be x. f32, f64, i32, or bf16 (summed in f32, rounded once). */
    void (*all_reduce)(Comm *c, Tensor y, Tensor x, Group g, Stream s);
    /* y (n / size) = this rank's slice of the sum of x (n). */
    void (*reduce_scatter)(Comm *c, Tensor y, Tensor x, Group g, Stream s);
    /* y (n * size) = the ranks' x (n), in rank order; x may be its own slice of y. */
    void (*all_gather)(Comm *c, Tensor y, Tensor x, Group g, Stream s);
    void (*broadcast)(Comm *c, Tensor y, int root, Group g, Stream s);
    void (*send)(Comm *c, Tensor x, int to, Group g, Stream s);
    void (*recv)(Comm *c, Tensor y, int from, Group g, Stream s);
    /* Tokens (x (T, D), ids and weights (T, K)) to the ranks of GROUP_EXPERT that hold one of their experts, one copy
     * to each: received (R*T, D), row [source rank][token]; rows that no rank sent hold nothing. plan.ids and .weights
     * are written alike. Backward gives no weights: then the plan stands, and rows travel as they did when it was
     * written. T is the same on all ranks of the group. x and received are rows of one dtype, or both E4M3 tiles, whose
     * scales travel beside the bytes of their rows: neither is computed anew (V3 3.3.3). On one rank of GROUP_EXPERT
     * nothing is queued for what lies where it would arrive, nor in combine: nobody has to order it. */
    void (*dispatch)(Comm *c, Tensor received, DispatchPlan plan, Tensor x, Tensor ids, Tensor weights, Stream s);
    /* The way back, never tiles: y (R, T, D), plane r = the rows that rank r computed for this rank's tokens; zero
     * where it had none. Rows of tokens that nobody sent may be overwritten. dweights (R*T, K) travels along in
     * backward (else none): dw (T, K) = its sum over the ranks, in their order. */
    void (*combine)(Comm *c, Tensor y, Tensor dw, Tensor rows, Tensor dweights, DispatchPlan plan, Stream s);
    /* Memory that every rank allocates at the same size; world size 1: plain device memory. */
    void *(*alloc_symmetric)(Comm *c, const Device *d, size_t bytes);
    void (*free)(Comm *c);
    Mesh mesh;
    const Device *device;
    /* The host takes part in every call: no graph can hold one. */
    bool needs_host;
    /* Each call comes after all that STREAM_COMPUTE was given before, and before what it is given next. Who lets
     * transfers run beside the mathematics sets this, and orders the streams by events of its own. */
    bool is_ordered_by_caller;
    int64_t device_bytes;       /* memory of the device that it holds: a row of the memory plan */
    char about[COMM_ABOUT_LEN]; /* "NCCL 2.28.9, NVLS off": for who reads the log */
};

/* What stands on both sides of a call whose caller orders nothing; events from the end of the device's. */
enum { EVENT_COMM_BEGIN = EVENTS_MAX - 2, EVENT_COMM_END };

/* A mesh of one: copies and nothing else. malloc'd; comm->free releases it. */
Comm *comm_self(const Device *d);

/* The same mesh on device `d`, but every call does nothing: for ops that compute nothing. Owns nothing. */
Comm comm_silent(const Comm *c, const Device *d);

/* All ranks of the job over MPI, cut as the mesh says (kernels/comm/mpi.c). The host takes part: a call returns when
 * this rank's share is done. What is on a GPU goes through pinned host buffers of a fixed size, so that messages are
 * cut and nothing is allocated later. malloc'd; comm->free releases it. Called by all ranks. */
Comm *comm_mpi(const Device *d, Mesh mesh);

/* All ranks over NCCL (kernels/comm/nccl.c), which wants a GPU for each. No host takes part. Ranks that are not
 * connected after timeout_s seconds end the process. A binary without NCCL: DIE. malloc'd; comm->free releases it.
 * Called by all ranks; one alone may. */
Comm *comm_nccl(const Device *d, Mesh mesh, int timeout_s);
/* "NCCL 2.28.9", and what it was built with if that is another; "" without NCCL. Into text, returned. */
const char *comm_nccl_version(char *text, size_t size);

/* ---- the process and its job (kernels/comm/launch.c) ------------------------------------------------------------- */

typedef struct {
    int rank, world;
    bool mpi_started;
} Launch;

/* Reads the environment of Open MPI, PMI, PMIx and Slurm: 1 task or none starts nothing; more start MPI. A launcher
 * that says N tasks where MPI says 1 (or where this binary has no MPI) is refused: DIE, exit 2. */
Launch launch_start(int *argc, char ***argv);
void launch_end(Launch *l);
/* "Open MPI 4.1.4", or "no MPI". */
const char *launch_mpi_version(void);

/* ---- agreement between the hosts (kernels/comm/job.c) ------------------------------------------------------------
 * Over all ranks, on the main thread, on host memory, outside the model's step. Alone, each is what one rank gives. */

/* This rank and how many there are: MPI's word once it is started, else 0 of 1. */
int job_rank(void);
int job_world(void);
/* Ranks on this rank's host, and which of them this is. */
int job_ranks_here(void);
int job_rank_here(void);
/* all (world * bytes) = every rank's `own`, in rank order. */
void job_gather(void *all, const void *own, size_t bytes);
/* x[i] = sum over the ranks of x[i], wrapping. */
void job_sum(uint64_t *x, int n);
/* Rank 0's bytes to all. */
void job_spread(void *data, size_t bytes);
/* The text (size bytes with its end) of the first rank that has one, on all ranks. Returns that rank, or -1: all "". */
int job_first_text(char *text, size_t size);
/* A message between two ranks. */
void job_send(int to, const void *data, size_t bytes);
void job_recv(int from, void *data, size_t bytes);

#endif
