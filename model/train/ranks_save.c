/* See ranks.h: what the ranks tell each other while they save, on the main thread and between steps. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "checkpoint_parts.h"
#include "kernels/base/check.h"
#include "ranks.h"

int64_t ranks_checkpoint_bytes(const Params *params) {
    Params whole;
    int64_t n;
    Arena counting = arena_make("all ranks' state", NULL, 0);
    params_make_whole(&whole, &params->shape);
    params_layout(&whole, &counting);
    StateTensor *tensors = params_state(&whole, &n);
    const int64_t bytes = checkpoint_bytes(tensors, n);
    free(tensors);
    params_free(&whole);
    return bytes;
}

/* The first failure, with its rank and host, and how many there are. */
static void tell_failure(int n_failed, char *err) {
    char own[ERR_LEN], host[64] = "";
    gethostname(host, sizeof host - 1);
    snprintf(own, sizeof own, "%s", err);
    if (own[0] && job_world() > 1) err_set(err, "rank %d on %s: %.600s", job_rank(), host, own);
    job_first_text(err, ERR_LEN);
    if (n_failed > 1) snprintf(err + strlen(err), ERR_LEN - strlen(err), "; and %d more", n_failed - 1);
}

bool ranks_have_written(SavedPart own, uint64_t *hash, char *err) {
    const int world = job_world();
    SavedPart *all = (SavedPart *)checkpoint_array(world, sizeof *all);
    job_gather(all, &own, sizeof own);
    int n_written = 0, n_failed = 0;
    uint64_t sum = 0;
    for (int r = 0; r < world; r++) {
        n_written += all[r].is_written;
        n_failed += all[r].has_failed;
        sum += all[r].hash;
    }
    free(all);
    if (n_written < world) return false;
    *hash = sum;
    if (n_failed > 0) tell_failure(n_failed, err);
    return true;
}

ManifestPart *ranks_gather_parts(const Manifest *own, int64_t *n) {
    const int world = job_world();
    int64_t n_own, *n_of = (int64_t *)checkpoint_array(world, sizeof *n_of);
    ManifestPart *parts = manifest_parts(own, &n_own), *all = NULL;
    job_gather(n_of, &n_own, sizeof n_own);
    *n = 0;
    for (int r = 0; r < world; r++) *n += n_of[r];
    if (job_rank() > 0) {
        job_send(0, parts, (size_t)n_own * sizeof *parts);
    } else {
        all = (ManifestPart *)checkpoint_array(*n, sizeof *all);
        memcpy(all, parts, (size_t)n_own * sizeof *parts);
        int64_t at = n_own;
        for (int r = 1; r < world; at += n_of[r++]) job_recv(r, all + at, (size_t)n_of[r] * sizeof *all);
    }
    free(parts);
    free(n_of);
    return all;
}
