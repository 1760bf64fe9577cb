/* What saving and loading of checkpoints share, for checkpoint.c, checkpoint_load.c and ranks_save.c alone. Floor 5. */
#ifndef TRAIN_MOE_CHECKPOINT_PARTS_H
#define TRAIN_MOE_CHECKPOINT_PARTS_H

#include "data/safetensors.h"
#include "model/state.h"

/* n items of `width` bytes and one more, zeroed; the caller frees them. */
void *checkpoint_array(int64_t n, size_t width);
/* How a dtype is called in the files. */
SafetensorsDtype checkpoint_dtype(Dtype dtype);
/* Elements of the global tensor. */
int64_t checkpoint_numel(const StateTensor *t);

#endif
