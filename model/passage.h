/* A micro-batch's way through the blocks of a chunk, phase by phase, and what stands between blocks. Floor 3.
 *
 * A chunk is the model, or a pipeline stage (shape.h). Who drives a passage calls, for each block i of n_blocks in
 * turn, the phases of layer.h, and in front of each block, and behind the last, a seam:
 *
 *     seam_forward(0) attn dispatch experts combine (block 0)  seam_forward(1) ... seam_forward(n_blocks)
 *     seam_backward(n_blocks) combine experts dispatch attn (block n_blocks - 1)  ... seam_backward(0)
 *
 * Two passages may take turns: one forward, one backward, over Acts with scratch of their own. */
#ifndef TRAIN_MOE_PASSAGE_H
#define TRAIN_MOE_PASSAGE_H

#include "model.h"

/* One for a passage that goes forward, one for backward. */
enum { EVENT_PASSAGE = EVENTS_MAX / 2 };

typedef struct {
    Model *model;
    Acts *a; /* pointed at the micro-batch's slots (acts_point) */
    int chunk, n_blocks;
    ForwardMode mode;
    /* (T, D) of the neighbouring stages; none where the chunk embeds, or has the loss. */
    Tensor in, out;          /* read by the first seam, written by the last */
    Tensor dout, dx;         /* their gradients: dout is read by the first seam of backward, dx is written by block 0 */
    Tensor residual, branch; /* between blocks, forward */
    Stream last;             /* of the phase before */
    int event;               /* orders the phases where they change streams */
} Passage;

/* of chunk `chunk` by `a`, with none of the neighbours' tensors. */
Passage passage_of(Model *m, Acts *a, int chunk, ForwardMode mode);

/* In front of block i: the embedding, or the tensor that was received; the MTP module's input. Behind the last block of
 * a depth: final norm, head and loss, or the sum that is sent. */
void passage_seam_forward(Passage *p, int i);
/* The same backwards, between the gradients of block i's input and block i-1's output. */
void passage_seam_backward(Passage *p, int i);
/* All of it, in the order of a lone micro-batch; backward with each block's weights behind its phases. */
void passage_forward(Passage *p);
void passage_backward(Passage *p);

/* A phase of block i. Weight-backward of a phase may come at any time behind its input-backward. */
void passage_phase(Passage *p, int i, Phase phase, Pass pass);

#endif
