/* Where the ranks of a job run: hosts, GPUs, NUMA nodes and cores. Floor 5. (DESIGN 9) */
#ifndef TRAIN_MOE_PLACES_H
#define TRAIN_MOE_PLACES_H

#include <stddef.h>

#include "log.h"

/* One rank's, as all ranks are told it. */
typedef struct {
    char host[64];
    char gpu[32];  /* its PCI bus; "" = it computes on the CPU */
    char numa[32]; /* nodes of its cores: "0", "0,1"; "" = not known */
    int cores, threads;
} RankPlace;

/* This process's. gpu: "" or its PCI bus. */
RankPlace place_here(const char *gpu);
/* Those of all ranks, malloc'd; the caller frees them. All ranks call it. */
RankPlace *places_gather(const char *gpu);
int places_n_hosts(const RankPlace *all, int world);
/* Hosts of each group of n_ep consecutive ranks, where a group fills them one after the other, each with as many ranks;
 * else 1. */
int places_n_nodes(const RankPlace *all, int world, int n_ep);

/* "node01: ranks 0-3, 4 GPUs, NUMA 0,1, 16 cores and 16 threads a rank" of the host of rank `first`, where the ranks of
 * `all` are. Numbers that differ between its ranks are a range. */
void place_text(char *text, size_t size, const RankPlace *all, int world, int first);

/* A banner line a host, PLACES_SHOWN at most, and a warning of the first rank with more threads than cores; of one rank
 * alone, nothing. */
enum { PLACES_SHOWN = 16 };
void places_print(Logger *l, const RankPlace *all, int world);

#endif
