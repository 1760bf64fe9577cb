/* See ranks.h. */
#include "ranks.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "device.h"
#include "kernels/base/check.h"
#include "kernels/base/clock.h"
#include "kernels/base/file.h"
#include "kernels/comm/watch.h"
#include "part.h"

enum { TEXT_LEN = 512, LIST_LEN = 128 };

static void *array(int64_t n, size_t width) {
    void *p = calloc((size_t)n + 1, width);
    CHECK(p, "no memory for a list of %lld", (long long)n);
    return p;
}

/* ---- the mesh ---------------------------------------------------------------------------------------------------- */

int ranks_n_ep(const Config *c, int world) {
    const bool is_dense = c->model.first_k_dense_replace >= c->model.num_hidden_layers;
    if (c->parallel.ep > 0) return c->parallel.ep;
    return mesh_auto_ep(world, c->parallel.pp, is_dense ? 1 : c->model.n_routed_experts);
}

/* "1, 2, 4": what divides the ranks of a stage and the experts. */
static void allowed_ep(char *list, int ranks, int n_experts) {
    size_t used = 0;
    for (int ep = 1; ep <= ranks && used < LIST_LEN - 16; ep++)
        if (ranks % ep == 0 && n_experts % ep == 0)
            used += (size_t)snprintf(list + used, LIST_LEN - used, "%s%d", used ? ", " : "", ep);
}

/* A GPU and a CPU do not round alike, and no library moves data between the two. */
static void check_devices(const Device *d) {
    const int world = job_world();
    int own = device_is_gpu(d), *all = (int *)array(world, sizeof *all);
    job_gather(all, &own, sizeof own);
    for (int r = 1; r < world; r++)
        if (all[r] != all[0])
            DIE("set run.device, or take the host out", "rank %d computes on a %s, rank 0 on a %s", r,
                all[r] ? "GPU" : "CPU", all[0] ? "GPU" : "CPU");
    free(all);
}

/* NCCL would refuse ranks that share a GPU in words that name neither. */
static void check_nccl(const Device *d) {
    char text[64], host[64] = "";
    if (!comm_nccl_version(text, sizeof text)[0])
        DIE("make NCCL_HOME=DIR, or set parallel.comm to \"mpi\"",
            "parallel.comm is nccl, but this binary has no NCCL");
    if (!device_is_gpu(d)) DIE("set parallel.comm to \"auto\"", "parallel.comm is nccl, but run.device is a CPU");
    gethostname(host, sizeof host - 1);
    if (device_ranks_sharing() > 1)
        DIE("set parallel.comm to \"mpi\" (slow: for tests), or start as many ranks on a host as it has GPUs",
            "parallel.comm is nccl, which wants a GPU for each rank, but %d ranks share one (%s: %d ranks)",
            device_ranks_sharing(), host, job_ranks_here());
}

/* parallel.comm */
static Comm *open_comm(Device *d, const Config *c, Mesh mesh) {
    char nccl[64];
    const int world = job_world();
    const bool can_nccl = comm_nccl_version(nccl, sizeof nccl)[0] && device_is_gpu(d) && device_ranks_sharing() == 1;
    check_devices(d);
    if (c->parallel.comm == COMM_NCCL) check_nccl(d);
    if (c->parallel.comm == COMM_NCCL || (c->parallel.comm == COMM_AUTO && can_nccl && world > 1)) {
        Comm *comm = comm_nccl(d, mesh, c->run.hang_timeout_s);
        d->memory.row[MEMORY_NCCL] = comm->device_bytes;
        d->memory.free -= comm->device_bytes;
        d->memory.held += comm->device_bytes;
        return comm;
    }
    return world > 1 ? comm_mpi(d, mesh) : comm_self(d);
}

Comm *ranks_open(Device *d, const Config *c, const Launch *launch) {
    const int world = launch->world, pp = c->parallel.pp, ep = ranks_n_ep(c, world);
    const char *are = world == 1 ? " is" : "es are";
    char list[LIST_LEN] = "", hint[LIST_LEN + 128];
    snprintf(hint, sizeof hint, "start a multiple of %d with mpirun -np, or set parallel.pp to 1", pp);
    if (world % pp) DIE(hint, "%d process%s not a multiple of parallel.pp = %d", world, are, pp);
    allowed_ep(list, world / pp, c->model.n_routed_experts);
    snprintf(hint, sizeof hint, "start a multiple of %d with mpirun -np, or set parallel.ep to \"auto\" or one of %s",
             pp * ep, list);
    if (world / pp % ep && pp == 1) DIE(hint, "%d process%s not a multiple of parallel.ep = %d", world, are, ep);
    if (world / pp % ep) DIE(hint, "%d process%s not a multiple of parallel.pp x ep = %d x %d", world, are, pp, ep);
    const Mesh mesh = mesh_make(job_rank(), world, pp, ep);
    const bool is_mirrored = pp > 1 && pp % 2 == 0 && schedule_copies(part_schedule(c)) > 1;
    return open_comm(d, c, is_mirrored ? mesh_mirrored(mesh) : mesh);
}

void ranks_text(const Comm *c, const ModelShape *shape, int n_hosts, char *text, size_t size) {
    const Mesh *m = &c->mesh;
    char experts[48] = "", shards[48] = "";
    if (shape_n_moe(shape)) snprintf(experts, sizeof experts, "; %d experts a rank", shape->n_local);
    if (shape->zero1 && shape->n_data > 1)
        snprintf(shards, sizeof shards, "; AdamW's state in %d shards", shape->n_data);
    snprintf(text, size, "%d rank%s = pp %d x dp %d x ep %d on %d host%s%s%s%s%s", m->world, m->world > 1 ? "s" : "",
             m->n_pp, m->n_dp, m->n_ep, n_hosts, n_hosts > 1 ? "s" : "", experts, shards, c->about[0] ? "; " : "",
             c->about);
}

/* ---- the same run ------------------------------------------------------------------------------------------------ */

/* "1, 3" : the ranks whose word is not rank 0's; "" if all agree. */
static void who_differs(char list[LIST_LEN], uint64_t word) {
    const int world = job_world();
    uint64_t *all = (uint64_t *)array(world, sizeof *all);
    job_gather(all, &word, sizeof word);
    size_t used = 0;
    list[0] = 0;
    for (int r = 1; r < world && used < LIST_LEN - 24; r++)
        if (all[r] != all[0]) used += (size_t)snprintf(list + used, LIST_LEN - used, "%s%d", used ? ", " : "", r);
    free(all);
}

static const char *ranks_word(const char *list) {
    return strchr(list, ',') ? "ranks" : "rank";
}

/* What rank 0 has and this rank has not, as text; "" on the ranks that agree with it. */
static void difference(char *text, const Config *c, const char *own_json) {
    int64_t size = (int64_t)strlen(own_json) + 1;
    job_spread(&size, sizeof size);
    char *json = (char *)array(size, 1), err[ERR_LEN], hint[ERR_LEN];
    if (job_rank() == 0) memcpy(json, own_json, (size_t)size);
    job_spread(json, (size_t)size);
    Config first;
    text[0] = 0;
    if (strcmp(json, own_json) != 0) {
        snprintf(text, TEXT_LEN, "another configuration than rank 0");
        if (config_parse(&first, json, strlen(json), "rank 0", NULL, 0, err, hint) == 0)
            config_first_difference(&first, c, text, TEXT_LEN);
    }
    free(json);
    job_first_text(text, TEXT_LEN);
}

void ranks_check_config(const Config *c, const char *version) {
    if (job_world() == 1) return;
    char list[LIST_LEN], text[TEXT_LEN];
    who_differs(list, hash_bytes(version, strlen(version), 0));
    if (list[0])
        DIE("copy one binary to all hosts", "%s %s run another train_moe than rank 0 (%s)", ranks_word(list), list,
            version);
    char *json = config_to_json(c);
    who_differs(list, hash_bytes(json, strlen(json), 0));
    if (list[0]) {
        difference(text, c, json);
        DIE("start all ranks with one configuration", "%s %s: %s", ranks_word(list), list, text);
    }
    free(json);
}

void ranks_check_data(uint64_t identity) {
    char list[LIST_LEN];
    who_differs(list, identity);
    if (list[0])
        DIE("all ranks have to see the same files", "%s %s: other data than rank 0 (names, sizes or contents differ)",
            ranks_word(list), list);
}

/* Rank 0 makes a file in it, of a name that was not there before. */
void ranks_check_folder(const char *dir) {
    char name[PATH_LEN + 64], list[LIST_LEN], err[ERR_LEN];
    if (job_world() == 1) return;
    snprintf(name, sizeof name, "%s/.seen_%d_%.0f", dir, getpid(), 1e6 * clock_s());
    if (job_rank() == 0 && file_write_durable(name, "", 0, err) != 0) DIE("choose another run.dir", "%s", err);
    job_spread(name, sizeof name);
    who_differs(list, path_exists(name));
    if (job_rank() == 0) unlink(name);
    if (list[0])
        DIE("run.dir has to be a folder that all hosts share", "%s %s: %s is not the folder that rank 0 has there",
            ranks_word(list), list, dir);
}

void ranks_agree_on_checkpoint(char *path, int64_t step) {
    const int world = job_world();
    int64_t *steps = (int64_t *)array(world, sizeof *steps);
    job_gather(steps, &step, sizeof step);
    int oldest = 0, newest = 0;
    for (int r = 1; r < world; r++) {
        if (steps[r] < steps[oldest]) oldest = r;
        if (steps[r] > steps[newest]) newest = r;
    }
    if (steps[oldest] < 0 && steps[newest] >= 0)
        DIE("run.dir has to be a folder that all hosts share",
            "rank %d sees step %lld as the last checkpoint, rank %d sees none", newest, (long long)steps[newest],
            oldest);
    if (step > steps[oldest]) path[0] = 0;
    free(steps);
    job_first_text(path, CHECKPOINT_PATH_LEN);
}

CheckpointPart ranks_part(const ModelShape *s) {
    const bool has_all = s->R == 1 && !(s->zero1 && s->n_data > 1) && shape_holds_all(s);
    return has_all ? CHECKPOINT_ALL : CHECKPOINT_SHARE;
}

static int compare_doubles(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

void ranks_times(RankTimes *times, double own_ms) {
    const int world = job_world();
    memset(times, 0, sizeof *times);
    if (world == 1) return;
    double *all = (double *)array(world, sizeof *all);
    job_gather(all, &own_ms, sizeof own_ms);
    for (int r = 1; r < world; r++)
        if (all[r] > all[times->slowest]) times->slowest = r;
    if (job_rank() == times->slowest) gethostname(times->host, sizeof times->host - 1);
    job_first_text(times->host, sizeof times->host);
    qsort(all, (size_t)world, sizeof *all, compare_doubles);
    times->n = world;
    times->least_ms = all[0];
    times->median_ms = (all[(world - 1) / 2] + all[world / 2]) / 2;
    times->most_ms = all[world - 1];
    free(all);
}
