/* What the ranks of a job have to settle among themselves: their mesh, that they mean the same run, one checkpoint.
 * Alone everything here is what one rank does. Floor 5. */
#ifndef TRAIN_MOE_RANKS_H
#define TRAIN_MOE_RANKS_H

#include "checkpoint.h"
#include "data/config.h"
#include "kernels/comm/comm.h"
#include "log.h"
#include "manifest.h"
#include "model/params.h"

/* The mesh that the configuration asks for in a job of so many ranks, and the Comm of it (parallel.comm), whose memory
 * is noted with the device. What does not fit: DIE. */
Comm *ranks_open(Device *d, const Config *c, const Launch *launch);
/* The expert-parallel ranks of that mesh. */
int ranks_n_ep(const Config *c, int world);

/* Do all ranks read the same configuration with the same binary? Else DIE with the field and the ranks. */
void ranks_check_config(const Config *c, const char *version);
/* Do all ranks read the same data (loader_identity)? Else DIE with the ranks. */
void ranks_check_data(uint64_t identity);

/* Do all ranks see the same folder under this name? Else DIE with the ranks. */
void ranks_check_folder(const char *dir);

/* "8 ranks = pp 1 x dp 1 x ep 8 on 1 host; 8 experts a rank; AdamW's state in 8 shards" */
void ranks_text(const Comm *c, const ModelShape *shape, int n_hosts, char *text, size_t size);

/* Every rank has found a checkpoint whose part for it is whole: all take the oldest of them. path (CHECKPOINT_PATH_LEN)
 * and its step, -1 = none. Ranks that see different folders: DIE. */
void ranks_agree_on_checkpoint(char *path, int64_t step);

/* ---- a checkpoint of all ranks (ranks_save.c); they call each together ---- */

/* What a rank says of its part of a save. */
typedef struct {
    bool is_written, has_failed;
    uint64_t hash; /* params_hash_saved */
} SavedPart;

/* Has every rank written its part, or failed to? Then *hash = the sum over the ranks; and err of a rank that has
 * failed, "" on the others, becomes the same text on all: who has failed, where and why. */
bool ranks_have_written(SavedPart own, uint64_t *hash, char *err);

/* On rank 0, what all ranks have written; malloc'd, the caller frees it. On the others NULL. */
ManifestPart *ranks_gather_parts(const Manifest *own, int64_t *n);

/* How this step's own milliseconds of the ranks lie. All ranks call it. */
void ranks_times(RankTimes *times, double own_ms);

/* checkpoint_bytes of what all ranks save. */
int64_t ranks_checkpoint_bytes(const Params *params);

/* What of a checkpoint belongs to a rank. */
CheckpointPart ranks_part(const ModelShape *shape);

#endif
