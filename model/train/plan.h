/* train_moe plan: what a run would take, without a GPU. Floor 5.
 *
 * plan_make fills one struct from the configuration alone; plan_print and plan_json say it, as lines and as JSON with
 * the keys of plan_help. What this version cannot run is planned all the same, and named. */
#ifndef TRAIN_MOE_PLAN_H
#define TRAIN_MOE_PLAN_H

#include "cluster.h"
#include "hf.h"
#include "model/memory.h"
#include "rates.h"
#include "run.h"
#include "step_time.h"

enum { PLAN_RECOMPUTES = 8, PLAN_NOTES_MAX = 8, PLAN_HOST_ITEMS = 4, PLAN_SET_LEN = 192 };

typedef struct {
    char label[NAME_LEN + 16]; /* "train", "train web", "val austen" */
    const char *path;          /* of the configuration; NULL: synthetic */
    bool is_there;             /* files match the path */
    int n_shards;
    int64_t tokens;        /* in them; 0 if not there */
    double asked;          /* tokens that the run takes from here; 0 = validation */
    char problem[ERR_LEN]; /* why the files that are there will not do, or "" */
} PlanSource;

typedef struct {
    const char *name;
    int64_t bytes;
} PlanItem;

/* One way to set memory.recompute, micro-batch and moments. */
typedef struct {
    int recompute;       /* RECOMPUTE_* bits */
    Moments moments;     /* of the optimizer */
    int64_t micro_batch; /* the largest that fits and divides the batch; 0 = not even 1 */
    int64_t bytes;       /* of the device, with that micro-batch, else with 1 */
    bool has_time;
    StepTime time;
    double tokens_per_s; /* of one GPU, over the steps of the whole run */
} PlanChoice;

typedef struct {
    GpuRates rates;
    int64_t bytes;         /* that a run may plan with */
    PlanChoice configured; /* as the configuration says; micro_batch is its own, whether it fits or not */
    bool fits;
    PlanChoice choices[PLAN_RECOMPUTES]; /* by bits; moments as configured unless nothing fits so */
    const PlanChoice *best;              /* of those the fastest, else the largest micro-batch; NULL = none fits */
    const PlanChoice *chosen;            /* what the forecast is for: configured, else best; NULL = none */
    char sets[PLAN_SET_LEN];             /* "--set ..." that leads from the configuration to best, or "" */
    /* of the chosen, where it has a time */
    double step_s, run_s;     /* of a step at the end of the run; of the run, checkpoints and validation not counted */
    double model_tflops, mfu; /* of one GPU, by count.h; of the BF16 peak, 0..1 */
    double gpu_hours, price;  /* price 0 = run.price_per_gpu_hour is not set */
} PlanGpu;

typedef struct {
    Run *run; /* borrowed */
    int world;
    Mesh mesh;
    int ranks; /* that take samples */
    ModelCount count;
    RunLength length;
    int64_t batch_first, batch_last; /* sequences of a step, at the start and at the end */
    int n_sources;
    PlanSource sources[2 * SOURCES_MAX];
    int64_t device_bytes, host_bytes;
    PlanItem host[PLAN_HOST_ITEMS];
    int64_t checkpoint_bytes, hf_bytes[HF_DTYPES];
    int n_notes;
    char notes[PLAN_NOTES_MAX][256]; /* what this version would refuse */
    bool has_gpu;
    PlanGpu gpu;
    /* What the loads of the run's last checkpoint make of its expert ranks. (plan_experts.c) */
    bool has_experts;
    char experts_of[CHECKPOINT_PATH_LEN]; /* that checkpoint */
    RankBalance consecutive, balanced;
    bool has_cluster; /* of more than one GPU (plan_cluster.h) */
    Cluster cluster;
    char cluster_why[ERR_LEN]; /* there is none, or "" */
} Plan;

/* Of an opened, planned run (run_open_model without allocation). A world that the mesh or the batch does not fit, and
 * rates that cannot be read: DIE. */
void plan_make(Plan *p, Run *r);
/* The part for --gpu. (plan_gpu.c) */
void plan_make_gpu(Plan *p);
/* The part for several expert ranks. */
void plan_make_experts(Plan *p);
void plan_print_experts(const Plan *p, Logger *l);

void plan_print(Plan *p, Logger *l);
/* (plan_json.c) */
void plan_json(const Plan *p, FILE *out);

/* "none", or names as --set takes them: ["norms","swiglu"]; into buf, returned. */
const char *plan_recompute_text(char *buf, size_t buf_len, int bits);

#endif
