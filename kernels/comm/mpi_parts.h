/* What mpi.c and mpi_tokens.c share; nobody else includes this. */
#ifndef TRAIN_MOE_MPI_PARTS_H
#define TRAIN_MOE_MPI_PARTS_H

#include <mpi.h>

#include "comm.h"

enum {
    BUFFER_BYTES = 8 << 20,
    TOKEN_BYTES_MIN = 16, /* counted for a token, so that flags of all tokens of a block are few */
    FLAGS = BUFFER_BYTES / TOKEN_BYTES_MIN,
    SLOTS_MAX = 1 << 16
};

typedef struct {
    Comm comm; /* first, so that a Comm is one of these */
    MPI_Comm group[GROUP_COUNT];
    char *out, *in, *block;             /* BUFFER_BYTES each: to send, received, one block of a tensor */
    char *sent, *received;              /* FLAGS each: (R, tokens of a block), 1 = the row travels */
    int *n_out, *at_out, *n_in, *at_in; /* bytes of an exchange by rank, and where they start */
    int32_t *slots;                     /* SLOTS_MAX: the host's copy of slot_of_expert */
} Mpi;

static inline Mpi *mpi_of(Comm *c) {
    return (Mpi *)c;
}

/* Ends the process unless code is MPI_SUCCESS. */
void mpi_done(int code, const char *what);

/* Before and behind a call. Whatever was launched before may be what is sent: the host waits for all of it, and what it
 * launches behind the call finds all there. The wait for its own device is no wait for others. */
void mpi_begin(Comm *c, const char *name);
void mpi_end(void);

/* n elements from `first` on, between a tensor and the host. */
void mpi_to_host(Comm *c, void *host, Tensor x, int64_t first, int64_t n, Stream s);
void mpi_to_device(Comm *c, Tensor y, int64_t first, const void *host, int64_t n, Stream s);

/* Rank r's piece of n elements of m->out comes to it from everybody and is summed into `sum`. */
void mpi_exchange_and_sum(Mpi *m, void *sum, int64_t n, Dtype dtype, Group g);

/* dispatch and combine of a Comm. */
void mpi_dispatch(Comm *c, Tensor received, DispatchPlan plan, Tensor x, Tensor ids, Tensor weights, Stream s);
void mpi_combine(Comm *c, Tensor y, Tensor dw, Tensor rows, Tensor dweights, DispatchPlan plan, Stream s);

#endif
