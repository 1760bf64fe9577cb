/* See places.h. */
#define _GNU_SOURCE
#include "places.h"

#ifdef _OPENMP
#include <omp.h>
#endif
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "kernels/base/check.h"
#include "kernels/comm/comm.h"

/* ---- this rank --------------------------------------------------------------------------------------------------- */

/* Does a list of the kernel, "0-15,32-47", name a core that this process may use? */
static bool has_own_core(FILE *list, const cpu_set_t *own) {
    int first, last, n;
    while ((n = fscanf(list, "%d-%d", &first, &last)) >= 1) {
        if (n == 1) last = first;
        for (int core = first; core <= last && core < CPU_SETSIZE; core++)
            if (CPU_ISSET(core, own)) return true;
        if (fgetc(list) != ',') break;
    }
    return false;
}

static void numa_of(char *text, size_t size, const cpu_set_t *own) {
    enum { NODES_MAX = 64 };
    size_t used = 0;
    text[0] = 0;
    for (int node = 0; node < NODES_MAX; node++) {
        char path[64];
        snprintf(path, sizeof path, "/sys/devices/system/node/node%d/cpulist", node);
        FILE *list = fopen(path, "r");
        if (!list) continue;
        if (has_own_core(list, own) && used < size)
            used += (size_t)snprintf(text + used, size - used, "%s%d", used ? "," : "", node);
        fclose(list);
    }
}

RankPlace place_here(const char *gpu) {
    RankPlace p;
    cpu_set_t own;
    memset(&p, 0, sizeof p);
    gethostname(p.host, sizeof p.host - 1);
    snprintf(p.gpu, sizeof p.gpu, "%s", gpu);
    p.cores = p.threads = 1;
    if (sched_getaffinity(0, sizeof own, &own) == 0) {
        p.cores = CPU_COUNT(&own);
        numa_of(p.numa, sizeof p.numa, &own);
    }
#ifdef _OPENMP
    p.threads = omp_get_max_threads();
#endif
    return p;
}

/* ---- a host ------------------------------------------------------------------------------------------------------ */

static bool is_on(const RankPlace *all, int rank, int first) {
    return strcmp(all[rank].host, all[first].host) == 0;
}

/* "0-3", or "0-6 (4 of them)" where other hosts' ranks lie between. */
static void ranks_of(char *text, size_t size, const RankPlace *all, int world, int first, int *n_gpus) {
    int last = first, n = 0;
    *n_gpus = 0;
    for (int r = first; r < world; r++) {
        if (!is_on(all, r, first)) continue;
        bool is_new = all[r].gpu[0] != 0;
        for (int other = first; other < r; other++)
            if (is_on(all, other, first) && strcmp(all[r].gpu, all[other].gpu) == 0) is_new = false;
        *n_gpus += is_new;
        last = r, n++;
    }
    if (n == 1)
        snprintf(text, size, "rank %d", first);
    else if (n == last - first + 1)
        snprintf(text, size, "ranks %d-%d", first, last);
    else
        snprintf(text, size, "ranks %d-%d (%d of them)", first, last, n);
}

/* "16", or "1-16". */
static void range_of(char *text, size_t size, const RankPlace *all, int world, int first, size_t offset) {
    int least = 0, most = 0;
    for (int r = first; r < world; r++) {
        if (!is_on(all, r, first)) continue;
        int value;
        memcpy(&value, (const char *)&all[r] + offset, sizeof value);
        if (r == first || value < least) least = value;
        if (r == first || value > most) most = value;
    }
    snprintf(text, size, least == most ? "%d" : "%d-%d", least, most);
}

void place_text(char *text, size_t size, const RankPlace *all, int world, int first) {
    char ranks[64], cores[32], threads[32], gpus[32] = "", numa[48] = "";
    int n_gpus;
    bool one_numa = all[first].numa[0] != 0;
    ranks_of(ranks, sizeof ranks, all, world, first, &n_gpus);
    range_of(cores, sizeof cores, all, world, first, offsetof(RankPlace, cores));
    range_of(threads, sizeof threads, all, world, first, offsetof(RankPlace, threads));
    for (int r = first; r < world; r++)
        if (is_on(all, r, first) && strcmp(all[r].numa, all[first].numa) != 0) one_numa = false;
    if (n_gpus > 0) snprintf(gpus, sizeof gpus, ", %d GPU%s", n_gpus, n_gpus > 1 ? "s" : "");
    if (one_numa) snprintf(numa, sizeof numa, ", NUMA %s", all[first].numa);
    snprintf(text, size, "%s: %s%s%s, %s core%s and %s thread%s a rank", all[first].host, ranks, gpus, numa, cores,
             strcmp(cores, "1") ? "s" : "", threads, strcmp(threads, "1") ? "s" : "");
}

/* ---- all hosts --------------------------------------------------------------------------------------------------- */

RankPlace *places_gather(const char *gpu) {
    const int world = job_world();
    const RankPlace own = place_here(gpu);
    RankPlace *all = (RankPlace *)calloc((size_t)world, sizeof *all);
    CHECK(all, "no memory for the places of %d ranks", world);
    job_gather(all, &own, sizeof own);
    return all;
}

static bool is_first_of_host(const RankPlace *all, int rank) {
    for (int other = 0; other < rank; other++)
        if (is_on(all, rank, other)) return false;
    return true;
}

int places_n_hosts(const RankPlace *all, int world) {
    int n = 0;
    for (int r = 0; r < world; r++) n += is_first_of_host(all, r);
    return n;
}

int places_n_nodes(const RankPlace *all, int world, int n_ep) {
    int n = 1;
    while (n < n_ep && is_on(all, n, 0)) n++; /* ranks a host */
    if (n_ep % n) return 1;
    for (int r = 0; r < world; r++) {
        const int group = r - r % n_ep, run = r - r % n;
        if (!is_on(all, r, run)) return 1;
        for (int before = group; before < run; before++)
            if (is_on(all, r, before)) return 1;
    }
    return n_ep / n;
}

static void warn_of_crowd(Logger *l, const RankPlace *all, int world) {
    for (int r = 0; r < world; r++) {
        if (all[r].threads <= all[r].cores) continue;
        log_warn(l, 0, "rank %d on %s has %d threads on %d core%s: lower run.threads, or mpirun --bind-to none", r,
                 all[r].host, all[r].threads, all[r].cores, all[r].cores > 1 ? "s" : "");
        return;
    }
}

void places_print(Logger *l, const RankPlace *all, int world) {
    int n_hosts = 0;
    if (world == 1) return;
    for (int r = 0; r < world; r++) {
        if (!is_first_of_host(all, r) || n_hosts++ >= PLACES_SHOWN) continue;
        char text[256];
        place_text(text, sizeof text, all, world, r);
        log_banner(l, "", "%s", text);
    }
    if (n_hosts > PLACES_SHOWN) log_banner(l, "", "and %d hosts more", n_hosts - PLACES_SHOWN);
    warn_of_crowd(l, all, world);
}
