/* A Comm of one rank that takes part in a mesh of two: what it sends comes back to it. The results mean nothing, but
 * they follow from all that was sent, in its order: what runs a stage, or half of the experts, can be tested on one
 * GPU. */
#ifndef TRAIN_MOE_TESTS_LOOPBACK_H
#define TRAIN_MOE_TESTS_LOOPBACK_H

#include "kernels/comm/comm.h"

enum { LOOPBACK_BYTES = 1 << 20 };

/* A receive gives what was sent last (zeros before), sums are this rank's part, half of the tokens come from a rank
 * that has the same ones. No reduce_scatter, all_gather or broadcast: parallel.zero1 is false. Messages are at most
 * LOOPBACK_BYTES. malloc'd; comm->free releases it. On a GPU. */
Comm *comm_loopback(const Device *d, Mesh mesh);

#endif
