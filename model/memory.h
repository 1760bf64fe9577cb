/* The memory plan as numbers: does it fit, what is largest in it, what would make it smaller. Floor 3.
 *
 * A plan is the three arenas of a Model on its device, and the rows that the device takes by itself
 * (kernels/device_memory.h). All of it is known before the first arena is allocated. */
#ifndef TRAIN_MOE_MEMORY_H
#define TRAIN_MOE_MEMORY_H

#include "model.h"

/* What memory.recompute names, in the order in which "auto" adds them: cheapest for what they save. */
enum { RECOMPUTE_CHOICES = 3 };
typedef struct {
    const char *name;
    int bit;
} RecomputeChoice;
extern const RecomputeChoice recompute_choices[RECOMPUTE_CHOICES];
/* "norms, swiglu" or "nothing" for RECOMPUTE_* bits, into buf, returned. */
const char *recompute_text(char *buf, size_t buf_len, int bits);

/* Bytes on the device: arenas and rows; the rows alone; one of them. */
int64_t memory_total(const Model *m);
int64_t memory_rows(const Model *m);
int64_t memory_row(const Model *m, MemoryRow row);
/* What one choice of memory.recompute (its bit) saves on the device, the others as the plan has them. */
int64_t memory_saved_by(const Model *m, int bit);
/* Does it fit into what is free and what this process holds already? Yes where that is not known. Where memory is taken
 * when it is touched, only what a step surely writes counts: the state, and the activations without the rows that the
 * experts keep for the worst case. */
bool memory_fits(const Model *m);
/* 0, or -1 with err: the plan's size, the room, the three largest items, who else holds memory; and a hint that names
 * the settings that would make it smaller (ERR_LEN each). */
int memory_check(const Model *m, char *err, char *hint);

#endif
