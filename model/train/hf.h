/* Hugging Face folders: what the world serves and what it publishes, out of and into our runs. Floor 5.
 *
 *     DIR/config.json                      the architecture, every key written out, in the form of transformers 4
 *         model.safetensors                or model-00001-of-0000N.safetensors with model.safetensors.index.json
 *         generation_config.json
 *         tokenizer.json, tokenizer_config.json ...
 *
 * Names and shapes are those of the parameter table (model/params.h), whose rows carry Hugging Face's names: one 2-D
 * tensor per expert, RoPE rows in neighbouring pairs (interleaved), the router's correction bias in F32. The MTP layer
 * of depth k stands at index L + k with full copies of embedding and head, as DeepSeek released it; transformers has no
 * MTP module and reports exactly those tensors as unexpected. Both ways stream: one tensor in memory at a time. */
#ifndef TRAIN_MOE_HF_H
#define TRAIN_MOE_HF_H

#include "bar.h"
#include "data/config.h"
#include "kernels/base/check.h"
#include "model/params.h"

enum { HF_PATH_LEN = 1024, HF_NOTE_LEN = 1536 };
#define HF_SHARD_BYTES ((int64_t)5000000000)

/* What the matrices of blocks are stored as. In a BF16 or FP8 folder all else is BF16 but the correction bias. */
typedef enum { HF_BF16, HF_FP8, HF_FP32, HF_DTYPES } HfDtype;
const char *hf_dtype_name(HfDtype dtype); /* "bf16", "fp8", "fp32" */
int hf_dtype_find(const char *name);      /* or -1 */

/* ---- export ------------------------------------------------------------------------------------------------------ */

typedef struct {
    const Config *config;
    const Params *params; /* the list of names alone */
    HfDtype dtype;
    int64_t shard_bytes_max; /* of the tensors of a file; a larger tensor has a file of its own */
    const char *tokenizer;   /* path of a tokenizer.json, or NULL: none is copied */
    /* Fills out with the t->numel elements of a tensor. Returns -1 with err. */
    int (*read)(void *arg, const NamedTensor *t, float *out, char *err);
    void *arg;
    Bar *bar; /* or NULL */
} HfExport;

typedef struct {
    int64_t n_tensors, n_files, bytes; /* bytes of the tensors */
    char note[HF_NOTE_LEN];            /* lines for the user, each with a line end, or "" */
} HfReport;

/* Writes the folder `out`, which is not there or empty before; made under a temporary name beside it and renamed when
 * all of it is durable. BF16 is the f32 master rounded to nearest even; FP8 is E4M3 with F32 scales of 128 x 128 blocks
 * (kernels/base/small_floats.h) beside it. Returns 0, or -1 with err and hint; then nothing is left. Refused: a folder
 * that holds something, too little room, a weight that is not finite. */
int hf_export(const HfExport *x, const char *out, HfReport *report, char *err, char *hint);
/* Bytes of the tensors of such a folder; of x only config, params (no memory behind them needed) and dtype are read. */
int64_t hf_export_bytes(const HfExport *x);

/* The two JSON files of the architecture, into a folder that is there. (hf_config.c) */
int hf_config_write(const char *folder, const Config *c, HfDtype dtype, char *err);
/* tokenizer.json and what lies beside it, into a folder that is there; tokenizer_config.json names
 * PreTrainedTokenizerFast, the one class that every version reads byte-level BPE with. (hf_tokenizer.c) */
int hf_tokenizer_write(const char *folder, const char *tokenizer, const Config *c, char *err);

/* ---- import ------------------------------------------------------------------------------------------------------ */

typedef struct HfWeights HfWeights;

/* A folder with model.safetensors or its index: what --init-from takes beside checkpoints. */
bool hf_is_folder(const char *dir);

/* Opens the weights of a folder and holds every tensor against the list of names: BF16, F32, F16, or E4M3 with
 * weight_scale_inv; one file or many with an index; per-expert matrices or the stacked ones of transformers 5. Returns
 * 0, or -1 with err and hint, which name the first tensor that is unknown, missing, of another shape or dtype, and how
 * many more there are. Left out, and told in note (HF_NOTE_LEN) where it matters: rotary_emb.inv_freq, MTP's copies of
 * embedding and head, MTP layers beyond num_nextn_predict_layers. `p` is borrowed. */
int hf_open(HfWeights **w, const char *dir, const Params *p, const ModelConfig *m, char *note, char *err, char *hint);
void hf_close(HfWeights *w); /* NULL is fine */
/* out = elements [first, first + n) of named tensor `index`; FP8 is multiplied by its scales in f32. A correction bias
 * that the folder need not have (a V2 gate) is zero. Returns -1 with err. From one thread. */
int hf_read(HfWeights *w, int64_t index, int64_t first, int64_t n, float *out, char *err);

/* All of it into the masters. Returns -1 with err. */
int hf_load(HfWeights *w, const Params *p, const Device *d, Bar *bar, char *err);

/* The configuration of a run in the folder `out` that goes on with the model of dir/config.json: its model, a cautious
 * learning rate, and synthetic data until somebody names their own. `sets` as in config_load. Returns -1 with err and
 * hint. (hf_config.c) */
int hf_import_config(Config *c, const char *dir, const char *out, const char *const *sets, int n_sets, char *err,
                     char *hint);

/* Makes the run folder `out` (not there or empty before, made under a temporary name): config.json, the tokenizer's
 * files and step_00000000, a checkpoint of the weights without moments and without data (data_identity 0), from which a
 * run starts. Fills config, and report->note. Returns 0, or -1 with err and hint; then nothing is left. */
int hf_import(const char *dir, const char *out, const char *const *sets, int n_sets, Bar *bar, Config *config,
              HfReport *report, char *err, char *hint);

/* ---- shared ------------------------------------------------------------------------------------------------------ */

/* A folder that appears when it is whole: `unfinished` (HF_PATH_LEN) is made for `bytes` bytes. Returns -1 with err and
 * hint if `out` holds something, or cannot be written. */
int hf_folder_begin(char *unfinished, const char *out, int64_t bytes, char *err, char *hint);
/* Renames it to `out`, durably. */
int hf_folder_commit(const char *unfinished, const char *out, char *err);
/* One more line for the user. */
void hf_note(char *note, const char *fmt, ...) PRINTF_LIKE(2, 3);

#endif
