/* The configuration of a run: one table (config.c), one row a field. Floor 1.
 *
 * The table drives the JSON reader, --set, --help, range checks, the printed effective configuration, the copy saved
 * with the run and the comparison on resume. Adding a field is adding a member here and a row there. "model" holds
 * Hugging Face DeepseekV3 names, so that a published config.json can be pasted in or named by path. Unknown, misspelt,
 * duplicate or mistyped keys are refused with the nearest known name.
 *
 * Precedence, later wins: defaults of the table, the file, --set from left to right. On resume all of these win over
 * the saved run; what changed is printed, and what contradicts its weights or its data is refused (config_compare). */
#ifndef TRAIN_MOE_CONFIG_H
#define TRAIN_MOE_CONFIG_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

enum {
    NAME_LEN = 64,
    PATH_LEN = 512,
    SCHEDULE_POINTS_MAX = 16,
    SOURCES_MAX = 16,
    PROMPTS_MAX = 8,
    PROMPT_LEN = 512,
    SKIP_RANGES_MAX = 32
};

/* A value over the course of training: a number (n = 1), or points [tokens, value], tokens ascending; two points at one
 * place are a jump. Between points the value follows the field's shape; before the first and after the last it is
 * flat. */
typedef struct {
    int n;
    int64_t tokens[SCHEDULE_POINTS_MAX];
    double value[SCHEDULE_POINTS_MAX];
} Schedule;

typedef struct {
    char name[NAME_LEN]; /* shown in logs; unique in its list */
    char path[PATH_LEN]; /* a file or a glob */
    double weight;       /* share of the tokens, relative */
} Source;

typedef enum { SHAPE_CONSTANT, SHAPE_LINEAR, SHAPE_COSINE, SHAPE_WSD } Shape;
typedef enum { DEVICE_AUTO, DEVICE_CPU, DEVICE_CUDA } DeviceKind;
typedef enum { COMM_AUTO, COMM_MPI, COMM_NCCL } CommKind;
typedef enum { PLACEMENT_CONSECUTIVE, PLACEMENT_BALANCED } PlacementKind;
typedef enum { COMPUTE_FP32, COMPUTE_BF16, COMPUTE_FP8 } Compute;
typedef enum { MOMENTS_FP32, MOMENTS_BF16 } Moments;
typedef enum { SCORING_SIGMOID, SCORING_SOFTMAX } Scoring;
typedef enum { TOPK_NOAUX_TC, TOPK_GROUP_LIMITED_GREEDY, TOPK_GREEDY } TopkMethod;
/* Bits of memory.recompute. AUTO stands alone: the memory plan makes it the least that fits the device. */
enum { RECOMPUTE_NORMS = 1, RECOMPUTE_UP_PROJECTIONS = 2, RECOMPUTE_SWIGLU = 4, RECOMPUTE_AUTO = 8 };

typedef struct {
    char name[NAME_LEN]; /* default: the config file's stem */
    char dir[PATH_LEN];  /* default: runs/NAME */
    uint64_t seed;
    DeviceKind device;
    double stop_after_minutes; /* 0 = no limit */
    int hang_timeout_s;
    double price_per_gpu_hour;
    int threads; /* 0 = all cores this process may use */
    bool graphs;
} RunConfig;

/* YaRN, or rope_type "default" (factor 1). Read from the 4.x form (rope_theta + rope_scaling) and the 5.x form
 * (rope_parameters). */
typedef struct {
    bool yarn;
    double theta;
    double factor, beta_fast, beta_slow, mscale, mscale_all_dim;
    bool has_attention_factor;
    double attention_factor;
    int64_t original_max_position_embeddings;
} RopeConfig;

typedef struct {
    char path[PATH_LEN]; /* "model": "path/to/config.json", else "" */
    int64_t vocab_size, hidden_size, intermediate_size, moe_intermediate_size;
    int num_hidden_layers, num_attention_heads, num_key_value_heads;
    int64_t q_lora_rank; /* 0 = null: direct q_proj */
    int64_t kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim, v_head_dim;
    int first_k_dense_replace, moe_layer_freq;
    int n_routed_experts, num_experts_per_tok, n_shared_experts, n_group, topk_group;
    TopkMethod topk_method;
    Scoring scoring_func;
    bool norm_topk_prob;
    double routed_scaling_factor;
    int num_nextn_predict_layers; /* MTP depth, 0..4 */
    double rms_norm_eps;
    RopeConfig rope;
    int64_t max_position_embeddings;
    int64_t bos_token_id, eos_token_id; /* -1 = not given */
} ModelConfig;

typedef struct {
    bool synthetic; /* "train": "synthetic" */
    int n_train, n_val;
    Source train[SOURCES_MAX], val[SOURCES_MAX];
    char tokenizer[PATH_LEN]; /* folder or tokenizer.json; "" = what the shards' JSON names */
    bool document_mask;       /* attention stays inside a document */
    int64_t document_token;   /* -1 = what the shards' JSON names, else eos_token_id */
    bool shuffle;
    int n_skip;                       /* ranges of samples never trained on: */
    int64_t skip[SKIP_RANGES_MAX][2]; /* [first, last), in consumed-sample numbers */
} DataConfig;

typedef struct {
    int64_t seq_len;
    int64_t micro_batch_size;   /* sequences of a rank in one forward */
    Schedule global_batch_size; /* sequences of an optimizer step */
    int64_t steps, tokens;      /* exactly one is given; the other is 0 */
    Schedule lr;
    double lr_final; /* end of the decay; of a list of points, its last value */
    int64_t lr_warmup_steps;
    Shape lr_shape;
    double lr_decay_fraction;                          /* wsd: the last share of the budget */
    double weight_decay, beta1, beta2, eps, grad_clip; /* grad_clip 0 = off */
    double init_std;
    Schedule bias_update_speed;
    Shape bias_update_speed_shape;
    double balance_alpha;
    Schedule mtp_loss_weight;
    Shape mtp_loss_weight_shape;
    Shape global_batch_size_shape;
    int max_skipped_in_a_row;
    double skip_if_z; /* 0 = off */
    int z_window;     /* steps */
} TrainConfig;

typedef struct {
    double capacity; /* 0 = "worst"; else times the average */
} MoeConfig;

/* The parts of compute "fp8" that are FP8; false = as in bf16. */
typedef struct {
    bool fprop, dgrad, wgrad;
    bool swiglu_input, attention_output;
} Fp8Config;

typedef struct {
    Compute compute;
    Moments moments;
    Fp8Config fp8;
} PrecisionConfig;

typedef struct {
    int recompute;         /* RECOMPUTE_* bits; "none", "auto", or a list of names */
    int head_chunk_tokens; /* rows of the logits held at once; 0 = chosen */
} MemoryConfig;

typedef struct {
    int pp;
    int ep; /* 0 = "auto" */
    PlacementKind placement;
    bool zero1;
    CommKind comm;
    char schedule[NAME_LEN];
} ParallelConfig;

typedef struct {
    int64_t every_steps;        /* 0 = never */
    int64_t tokens;             /* of each validation set, 0 = all of it */
    int64_t choice_every_steps; /* 0 = never */
    int n_choice;
    Source choice[SOURCES_MAX]; /* multiple-choice sets; path is one file, weight is 1 */
} EvalConfig;

typedef struct {
    int64_t every_steps;
    int n_prompts;
    char prompts[PROMPTS_MAX][PROMPT_LEN];
    int tokens;
    double temperature;
    int top_k; /* 0 = off */
    double top_p;
} SampleConfig;

typedef struct {
    int64_t every_steps; /* 0 = only at the end */
    double every_minutes;
    int keep_last;            /* 0 = keep all */
    int64_t keep_every_steps; /* these are never removed; 0 = none */
    bool keep_best;           /* saves at each best validation; the last of these is never removed */
    bool background;          /* the run goes on while a copy of its state is written */
} CheckpointConfig;

typedef struct {
    int64_t every_steps;
    int64_t hash_every_steps; /* parameter hash in log.jsonl; 0 = with checkpoints only */
    int64_t gpu_every_steps;  /* temperature, clock, power and errors of the GPU in log.jsonl; 0 = never */
    int64_t fp8_every_steps;  /* what FP8 tensors hold in log.jsonl; 0 = never */
} LogConfig;

typedef struct {
    int version;
    char path[PATH_LEN]; /* where it was read from */
    RunConfig run;
    ModelConfig model;
    DataConfig data;
    TrainConfig train;
    MoeConfig moe;
    PrecisionConfig precision;
    MemoryConfig memory;
    ParallelConfig parallel;
    EvalConfig eval;
    SampleConfig sample;
    CheckpointConfig checkpoint;
    LogConfig log;
    int n_overrides;
    char overrides[1024]; /* "train.lr, run.dir" */
    char ignored[1024];   /* model keys that were named and ignored */
} Config;

/* Reads `path`, applies the `n_sets` overrides "section.field=value" in order (values are JSON, else strings; a set of
 * train.steps or train.tokens drops the file's other), fills defaults, checks types, ranges and the rules between
 * fields. Returns 0, or -1 with one line in err and a hint in hint (both ERR_LEN, hint may end empty). */
int config_load(Config *c, const char *path, const char *const *sets, int n_sets, char *err, char *hint);
/* The same from text; `name` stands in messages for the path. */
int config_parse(Config *c, const char *text, size_t size, const char *name, const char *const *sets, int n_sets,
                 char *err, char *hint);

/* The effective configuration as JSON that config_parse reads back to the same values, all defaults and the model
 * written out. malloc'd; the caller frees it. */
char *config_to_json(const Config *c);

/* What a resume has to know: walks the table and compares. Fields of kind "architecture" or "data" that differ are
 * refused: returns -1 with the first difference in err. Other differences are listed in `changed` ("train.lr 3e-4 ->
 * 1e-4; ..."). */
int config_compare(const Config *saved, const Config *now, char *changed, size_t changed_len, char *err);

/* The first field in which two configurations differ, whatever its kind: "train.lr is 0.003 on rank 0, but 0.001 here"
 * into text; text stays as it is if none does. */
void config_first_difference(const Config *first, const Config *here, char *text, size_t text_len);

/* --help: every section and field with type, default, range and unit. `word` NULL prints all; "section" or
 * "section.field" or any word that occurs prints the matching rows. Returns the number of rows printed. */
int config_help(FILE *out, const char *word);

/* The value of a schedule after `tokens`, joined by `shape` (SHAPE_CONSTANT = steps). */
double schedule_at(const Schedule *s, Shape shape, int64_t tokens);

#endif
