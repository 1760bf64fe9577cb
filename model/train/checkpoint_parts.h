/* What saving and loading of checkpoints share, and the halves of a save by several ranks, for checkpoint*.c,
 * manifest_parts.c, ranks_save.c and saver.c alone. Floor 5. */
#ifndef TRAIN_MOE_CHECKPOINT_PARTS_H
#define TRAIN_MOE_CHECKPOINT_PARTS_H

#include "manifest.h"

/* n items of `width` bytes and one more, zeroed; the caller frees them. */
void *checkpoint_array(int64_t n, size_t width);
/* How a dtype is called in the files. */
SafetensorsDtype checkpoint_dtype(Dtype dtype);
/* Elements of the global tensor. */
int64_t checkpoint_numel(const StateTensor *t);

/* Their memory on the device, read on STREAM_COPY. */
CheckpointSource checkpoint_source(const Device *d);

/* Writes the tensors, this rank's parts of them, durably into the unfinished folder of `step`, which it makes if it is
 * not there, as state_<rank>.safetensors and, where one would be larger than file_bytes_max, more. *part: what has been
 * written, without its info; manifest_free in either case. Returns 0, or -1 with err. */
int checkpoint_write_part(const char *run_dir, int64_t step, int rank, const CheckpointSource *source,
                          const StateTensor *tensors, int64_t n, int64_t file_bytes_max, Manifest *part, char *err);
/* Makes the checkpoint of info->state.step of an unfinished folder whose files are those of m: arguments and results of
 * checkpoint_save. The folder stays if it cannot. */
int checkpoint_commit(const char *run_dir, const CheckpointInfo *info, Manifest *m, char *path, int64_t *bytes,
                      char *err);

#endif
