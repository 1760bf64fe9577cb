/* Agreement between the hosts: see comm.h. Plain MPI on the world, never on a device's data; sums are of integers, so
 * that their order is of no matter. */
#include <stdlib.h>
#include <string.h>

#include "comm.h"
#include "kernels/base/check.h"

#ifdef HAVE_MPI
#include <mpi.h>

#include "watch.h"

enum { JOB_TAG = 7, MESSAGE_MAX = 1 << 30 };

/* Around every call: waiting for the others is seen, and told apart from work. */
static void done(int code) {
    watch_transfer(NULL);
    if (code == MPI_SUCCESS) return;
    char text[MPI_MAX_ERROR_STRING] = "";
    int length;
    MPI_Error_string(code, text, &length);
    FAIL("another rank may have ended: look for its message", "the ranks cannot agree: %s", text);
}

static void begin(void) {
    watch_transfer("an agreement");
}

static bool is_started(void) {
    int started = 0, ended = 0;
    MPI_Initialized(&started);
    MPI_Finalized(&ended);
    return started && !ended;
}

int job_rank(void) {
    int rank = 0;
    if (is_started()) MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    return rank;
}

int job_world(void) {
    int world = 1;
    if (is_started()) MPI_Comm_size(MPI_COMM_WORLD, &world);
    return world;
}

static void find_here(int *rank, int *n) {
    MPI_Comm host;
    *rank = 0, *n = 1;
    if (!is_started()) return;
    begin();
    done(MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &host));
    MPI_Comm_rank(host, rank);
    MPI_Comm_size(host, n);
    MPI_Comm_free(&host);
}

int job_ranks_here(void) {
    int rank, n;
    find_here(&rank, &n);
    return n;
}

int job_rank_here(void) {
    int rank, n;
    find_here(&rank, &n);
    return rank;
}

void job_gather(void *all, const void *own, size_t bytes) {
    CHECK(bytes <= MESSAGE_MAX, "%zu bytes", bytes);
    if (job_world() == 1) {
        memcpy(all, own, bytes);
        return;
    }
    begin();
    done(MPI_Allgather(own, (int)bytes, MPI_BYTE, all, (int)bytes, MPI_BYTE, MPI_COMM_WORLD));
}

void job_sum(uint64_t *x, int n) {
    if (job_world() == 1) return;
    begin();
    done(MPI_Allreduce(MPI_IN_PLACE, x, n, MPI_UINT64_T, MPI_SUM, MPI_COMM_WORLD));
}

static void spread_from(int rank, void *data, size_t bytes) {
    CHECK(bytes <= MESSAGE_MAX, "%zu bytes", bytes);
    begin();
    done(MPI_Bcast(data, (int)bytes, MPI_BYTE, rank, MPI_COMM_WORLD));
}

void job_spread(void *data, size_t bytes) {
    if (job_world() > 1) spread_from(0, data, bytes);
}

int job_first_text(char *text, size_t size) {
    const int world = job_world();
    int first = text[0] ? job_rank() : world;
    if (world == 1) return text[0] ? 0 : -1;
    begin();
    done(MPI_Allreduce(MPI_IN_PLACE, &first, 1, MPI_INT, MPI_MIN, MPI_COMM_WORLD));
    if (first == world) return -1;
    spread_from(first, text, size);
    return first;
}

void job_send(int to, const void *data, size_t bytes) {
    CHECK(bytes <= MESSAGE_MAX, "%zu bytes", bytes);
    begin();
    done(MPI_Send(data, (int)bytes, MPI_BYTE, to, JOB_TAG, MPI_COMM_WORLD));
}

void job_recv(int from, void *data, size_t bytes) {
    CHECK(bytes <= MESSAGE_MAX, "%zu bytes", bytes);
    begin();
    done(MPI_Recv(data, (int)bytes, MPI_BYTE, from, JOB_TAG, MPI_COMM_WORLD, MPI_STATUS_IGNORE));
}

#else
int job_rank(void) {
    return 0;
}

int job_world(void) {
    return 1;
}

int job_ranks_here(void) {
    return 1;
}

int job_rank_here(void) {
    return 0;
}

void job_gather(void *all, const void *own, size_t bytes) {
    memcpy(all, own, bytes);
}

void job_sum(uint64_t *x, int n) {
    (void)x, (void)n;
}

void job_spread(void *data, size_t bytes) {
    (void)data, (void)bytes;
}

int job_first_text(char *text, size_t size) {
    (void)size;
    return text[0] ? 0 : -1;
}

void job_send(int to, const void *data, size_t bytes) {
    (void)data;
    CHECK(false, "%zu bytes to rank %d of a job of one", bytes, to);
}

void job_recv(int from, void *data, size_t bytes) {
    (void)data;
    CHECK(false, "%zu bytes from rank %d of a job of one", bytes, from);
}
#endif
