/* A race detector for the order of streams: train_moe --check-streams. Floor 2.
 *
 * On a CPU all streams are one, so what runs there in the right order may be a race on a GPU. Here every op and every
 * transfer is an event of its stream, and every stream has a vector clock: how far it has seen each of the others. An
 * event that is recorded takes its stream's clock along, and who waits for it sees as far (Lamport 1978; Mattern 1989).
 * Two accesses to the same bytes, one of them a write, are ordered if the later one's stream has seen the earlier one.
 * If not, the process ends and says which. */
#ifndef TRAIN_MOE_CHECK_STREAMS_H
#define TRAIN_MOE_CHECK_STREAMS_H

#include "comm.h"

/* Watches all ops of d from now on (d->watch must be free), and the transfers of the Comm that it returns, which does
 * what `inner` does and frees it with itself. d outlives it. */
Comm *check_streams(Device *d, Comm *inner);

#endif
