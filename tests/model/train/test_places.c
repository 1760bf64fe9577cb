/* Where ranks run, as a line a host. */
#include "model/train/places.h"

#include <stdio.h>
#include <string.h>

#include "tests/test.h"

static RankPlace place(const char *host, const char *gpu, const char *numa, int cores, int threads) {
    RankPlace p;
    memset(&p, 0, sizeof p);
    snprintf(p.host, sizeof p.host, "%s", host);
    snprintf(p.gpu, sizeof p.gpu, "%s", gpu);
    snprintf(p.numa, sizeof p.numa, "%s", numa);
    p.cores = cores;
    p.threads = threads;
    return p;
}

static void expect_text(const RankPlace *all, int world, int first, const char *expected) {
    char text[256];
    place_text(text, sizeof text, all, world, first);
    EXPECT(strcmp(text, expected) == 0, "%s, expected %s", text, expected);
}

TEST(places_of_hosts) {
    const RankPlace all[] = {place("a", "0000:01:00.0", "0", 16, 8), place("a", "0000:02:00.0", "0", 16, 8),
                             place("b", "0000:01:00.0", "0", 16, 16), place("a", "0000:02:00.0", "1", 4, 4)};
    expect_text(all, 2, 0, "a: ranks 0-1, 2 GPUs, NUMA 0, 16 cores and 8 threads a rank");
    expect_text(all, 4, 0, "a: ranks 0-3 (3 of them), 2 GPUs, 4-16 cores and 4-8 threads a rank");
    expect_text(all, 4, 2, "b: rank 2, 1 GPU, NUMA 0, 16 cores and 16 threads a rank");
    const RankPlace cpu = place("c", "", "", 1, 1);
    expect_text(&cpu, 1, 0, "c: rank 0, 1 core and 1 thread a rank");
}

TEST(places_are_nodes_where_groups_fill_them) {
    const RankPlace a = place("a", "", "", 1, 1), b = place("b", "", "", 1, 1), c = place("c", "", "", 1, 1);
    const RankPlace two[] = {a, a, b, b}, apart[] = {a, b, a, b}, uneven[] = {a, a, a, b},
                    three[] = {a, a, b, b, b, b, c, c};
    EXPECT_EQ(places_n_nodes(two, 4, 4), 2);
    EXPECT_EQ(places_n_nodes(two, 4, 2), 1);
    EXPECT_EQ(places_n_nodes(three, 8, 4), 2);
    EXPECT_EQ(places_n_nodes(apart, 4, 4), 1);
    EXPECT_EQ(places_n_nodes(apart, 4, 2), 2);
    EXPECT_EQ(places_n_nodes(uneven, 4, 4), 1);
    EXPECT_EQ(places_n_nodes(uneven, 4, 2), 1);
    EXPECT_EQ(places_n_nodes(&a, 1, 1), 1);
}

TEST(place_of_this_process) {
    const RankPlace p = place_here("");
    EXPECT(p.host[0] && !p.gpu[0] && p.cores >= 1 && p.threads >= 1, "%s, %d cores, %d threads", p.host, p.cores,
           p.threads);
}
