/* manifest.json: what a checkpoint holds, and where. Floor 5.
 *
 *     {"format": 1, "step": 1000, "ranks": 1, "data_identity": "hex", "param_hash": "hex",
 *      "state": {"tokens": 8192000, ..., "loss_z": {"size": .., "n": .., "head": .., "value": [..]},
 *                "best_val": "inf"},
 *      "device": "sm_90, 132 SMs, cuBLASLt 13.1.0", "gemms": ["a row of gemm_table.h", ...],
 *      "expert_load": [[of each expert], of each MoE layer],
 *      "config": {the effective configuration}, "files": {"state_00000.safetensors": bytes, ...},
 *      "tensors": {"model.norm.weight": {"dtype": "F32", "shape": [64], "slices": [{"offset": 0, "extent": 64,
 *                  "file": "state_00000.safetensors", "hash": "hex"}]}, ...}, "manifest_hash": "hex"}
 *
 * device, gemms and expert_load (loads.h) may be missing. A slice is elements [offset, offset + extent) of the
 * flattened tensor, stored in `file` under the tensor's name. The slices of a tensor cover it exactly, whichever ranks
 * wrote them. Its hash is manifest_hash_block over blocks of MANIFEST_HASH_BLOCK bytes, the last one shorter.
 * manifest_hash is hash_bytes of all text before it, so that no number here can change unnoticed. */
#ifndef TRAIN_MOE_MANIFEST_H
#define TRAIN_MOE_MANIFEST_H

#include "checkpoint.h"
#include "data/safetensors.h"

enum { MANIFEST_FORMAT = 1, MANIFEST_FILE_LEN = 64, MANIFEST_HASH_BLOCK = 1 << 22 };

typedef struct {
    int64_t offset, extent; /* elements */
    int64_t file;           /* index into files */
    uint64_t hash;
} ManifestSlice;

typedef struct {
    char name[TENSOR_NAME_LEN];
    SafetensorsDtype dtype;
    int ndim;
    int64_t shape[2];
    int64_t n_slices;
    ManifestSlice *slices; /* ascending offsets; owned */
} ManifestTensor;

typedef struct {
    char name[MANIFEST_FILE_LEN];
    int64_t bytes;
} ManifestFile;

typedef struct {
    CheckpointInfo info;
    int64_t ranks; /* that wrote it */
    int64_t n_files, n_tensors;
    ManifestFile *files;     /* owned */
    ManifestTensor *tensors; /* owned; read: sorted by name */
} Manifest;

/* The next link of a slice's hash: `hash` so far (0 at first), `bytes` of the next block. */
uint64_t manifest_hash_block(uint64_t hash, const void *data, int64_t bytes);

/* Writes folder/manifest.json durably. The configuration is not owned by the manifest. Returns 0, or -1 with err. */
int manifest_write(const Manifest *m, const char *folder, char *err);

/* Reads and checks folder/manifest.json: every member is there, every number in its range, every tensor covered.
 * Returns 0; -1 with err if the folder or its manifest is not there or the format is newer; CHECKPOINT_DAMAGED with
 * err. Then nothing needs freeing. */
int manifest_read(Manifest *m, const char *folder, char *err);
/* Frees what manifest_read made. */
void manifest_free(Manifest *m);

/* The tensor of this name in a manifest that was read, or NULL. */
const ManifestTensor *manifest_find(const Manifest *m, const char *name);

int64_t manifest_numel(const ManifestTensor *t);

/* ---- of several ranks (manifest_parts.c) ---- */

/* A slice, with what belongs to it: what a rank tells another of what it has written. No pointers. */
typedef struct {
    char name[TENSOR_NAME_LEN];
    SafetensorsDtype dtype;
    int ndim;
    int64_t shape[2];
    ManifestSlice slice; /* its file is that below */
    ManifestFile file;
} ManifestPart;

/* The *n slices of a manifest. malloc'd; the caller frees them. */
ManifestPart *manifest_parts(const Manifest *m, int64_t *n);
/* The manifest of n slices that `ranks` ranks have written, without its info; the parts are sorted. Returns 0, or -1
 * with err: an element is missing, or there twice. manifest_free in either case. */
int manifest_join(Manifest *m, ManifestPart *parts, int64_t n, int64_t ranks, char *err);

/* Are all files there, in their exact sizes? Returns 0, or CHECKPOINT_DAMAGED with the first that is not in err. */
int manifest_check_files(const Manifest *m, const char *folder, char *err);

#endif
