/* What the ranks of a job have to settle among themselves: their mesh, that they mean the same run, one checkpoint.
 * Alone everything here is what one rank does. Floor 5. */
#ifndef TRAIN_MOE_RANKS_H
#define TRAIN_MOE_RANKS_H

#include "checkpoint.h"
#include "data/config.h"
#include "kernels/comm/comm.h"
#include "log.h"
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

/* "8 ranks = pp 1 x dp 1 x ep 8 on 1 host; 8 experts a rank; AdamW's state in 8 shards" */
void ranks_text(const Comm *c, const ModelShape *shape, int n_hosts, char *text, size_t size);

/* Every rank has found a checkpoint whose part for it is whole: all take the oldest of them. path (CHECKPOINT_PATH_LEN)
 * and its step, -1 = none. Ranks that see different folders: DIE. */
void ranks_agree_on_checkpoint(char *path, int64_t step);

/* checkpoint_save by all ranks, each element from who owns it; rank 0 writes, the others hand it what it asks for.
 * `tensors` are this rank's. Arguments and results of checkpoint_save, equal on all ranks. */
int ranks_save(const char *run_dir, const Device *d, const Comm *c, const Params *params, const StateTensor *tensors,
               int64_t n, const CheckpointInfo *info, char *path, int64_t *bytes, char *err);

/* How this step's own milliseconds of the ranks lie. All ranks call it. */
void ranks_times(RankTimes *times, double own_ms);

/* checkpoint_bytes of what all ranks save. */
int64_t ranks_checkpoint_bytes(const Params *params);

/* What of a checkpoint belongs to a rank. */
CheckpointPart ranks_part(const ModelShape *shape);

#endif
