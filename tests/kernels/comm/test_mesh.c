/* Who is who, for every way to cut worlds of up to 24 ranks. */
#include <signal.h>

#include "kernels/comm/comm.h"
#include "tests/test.h"

enum { WORLD_MAX = 24 };

/* Are two ranks members of one group g? The definitions of comm.h, in words of coordinates. */
static bool share_group(const Mesh *a, const Mesh *b, Group g) {
    const bool same_pp = a->pp == b->pp, same_dp = a->dp == b->dp, same_ep = a->ep == b->ep;
    const bool is_end_a = a->pp == 0 || a->pp == a->n_pp - 1, is_end_b = b->pp == 0 || b->pp == b->n_pp - 1;
    const bool same_stages = same_pp || (a->is_mirrored && a->pp + b->pp == a->n_pp - 1);
    switch (g) {
    case GROUP_WORLD: return true;
    case GROUP_EXPERT: return same_pp && same_dp;
    case GROUP_EXPERT_DATA: return same_stages && same_ep;
    case GROUP_DATA: return same_stages;
    case GROUP_PIPE: return same_dp && same_ep;
    case GROUP_EMBED: return same_dp && same_ep && (a->is_mirrored ? same_pp : is_end_a && is_end_b);
    case GROUP_COUNT: break;
    }
    return false;
}

/* Members of a rank's group number size; their numbers in it are 0 .. size - 1, ascending with the rank. */
static void check_group(const Mesh *mesh, int rank, Group g) {
    const Mesh *own = &mesh[rank];
    if (g == GROUP_EMBED && own->pp > 0 && own->pp < own->n_pp - 1) return; /* a middle stage has no embedding */
    int n = 0;
    for (int r = 0; r < own->world; r++) {
        const bool same_number = mesh_group_number(own, g) == mesh_group_number(&mesh[r], g);
        EXPECT(share_group(own, &mesh[r], g) == same_number, "world %d, pp %d, ep %d: group %d of ranks %d and %d",
               own->world, own->n_pp, own->n_ep, (int)g, rank, r);
        if (!same_number) continue;
        EXPECT_EQ(mesh[r].rank_in[g], n);
        EXPECT_EQ(mesh[r].size[g], own->size[g]);
        n++;
    }
    EXPECT(n == own->size[g] && own->rank_in[g] < n, "world %d, pp %d, ep %d, rank %d: group %d has %d of %d members",
           own->world, own->n_pp, own->n_ep, rank, (int)g, n, own->size[g]);
}

/* Members have one number, others another; and what two groups have in common is told of the whole world. */
static void check_numbers(const Mesh *mesh, Group a, Group b) {
    bool is_same = true;
    for (int r = 0; r < mesh->world; r++)
        for (int s = 0; s < mesh->world; s++) {
            const int number = mesh_group_number(&mesh[r], a);
            const bool is_shared = number >= 0 && number == mesh_group_number(&mesh[s], a);
            EXPECT(is_shared == share_group(&mesh[r], &mesh[s], a), "ranks %d and %d, group %d", r, s, (int)a);
            is_same = is_same && share_group(&mesh[r], &mesh[s], a) == share_group(&mesh[r], &mesh[s], b);
        }
    EXPECT(mesh_groups_are_same(&mesh[mesh->world - 1], a, b) == is_same, "world %d, pp %d, ep %d: groups %d and %d",
           mesh->world, mesh->n_pp, mesh->n_ep, (int)a, (int)b);
}

static void check_mesh(int world, int n_pp, int n_ep, bool mirrored) {
    Mesh mesh[WORLD_MAX];
    bool seen[WORLD_MAX] = {false};
    for (int rank = 0; rank < world; rank++) {
        const Mesh *m = &mesh[rank];
        mesh[rank] = mesh_make(rank, world, n_pp, n_ep);
        if (mirrored) mesh[rank] = mesh_mirrored(mesh[rank]);
        EXPECT(m->n_data == m->n_dp * n_ep && m->data == m->dp * n_ep + m->ep, "rank %d takes samples", rank);
        EXPECT(m->rank == rank && m->world == world && m->n_pp == n_pp && m->n_ep == n_ep);
        EXPECT_EQ(m->n_pp * m->n_dp * m->n_ep, world);
        EXPECT(m->pp >= 0 && m->pp < m->n_pp && m->dp >= 0 && m->dp < m->n_dp && m->ep >= 0 && m->ep < m->n_ep,
               "rank %d is at (%d, %d, %d)", rank, m->pp, m->dp, m->ep);
        const int back = (m->pp * m->n_dp + m->dp) * m->n_ep + m->ep;
        EXPECT_EQ(back, rank);
        EXPECT(!seen[back], "rank %d twice", back);
        seen[back] = true;
    }
    for (int rank = 0; rank < world; rank++)
        for (int g = 0; g < GROUP_COUNT; g++) check_group(mesh, rank, (Group)g);
    for (int a = 0; a < GROUP_COUNT; a++)
        for (int b = 0; b < GROUP_COUNT; b++) check_numbers(mesh, (Group)a, (Group)b);
}

TEST(mesh_is_a_bijection_with_consistent_groups) {
    int n_meshes = 0;
    for (int world = 1; world <= WORLD_MAX; world++)
        for (int n_pp = 1; n_pp <= world; n_pp++)
            for (int n_ep = 1; n_ep <= world; n_ep++) {
                if (world % (n_pp * n_ep) != 0) continue;
                check_mesh(world, n_pp, n_ep, false);
                if (n_pp % 2 == 0) check_mesh(world, n_pp, n_ep, true);
                n_meshes++;
            }
    EXPECT_EQ(n_meshes, 203); /* the sum over worlds of the ways to write them as pp * dp * ep */
}

TEST(mesh_of_sixteen_by_hand) {
    Mesh m = mesh_make(11, 16, 2, 4); /* 11 = (1*2 + 0)*4 + 3 */
    EXPECT(m.pp == 1 && m.dp == 0 && m.ep == 3 && m.n_dp == 2);
    EXPECT(m.rank_in[GROUP_EXPERT] == 3 && m.rank_in[GROUP_EXPERT_DATA] == 0 && m.rank_in[GROUP_DATA] == 3);
    EXPECT(m.rank_in[GROUP_PIPE] == 1 && m.rank_in[GROUP_EMBED] == 1 && m.rank_in[GROUP_WORLD] == 11);
    EXPECT(m.size[GROUP_EMBED] == 2 && m.size[GROUP_DATA] == 8 && m.size[GROUP_EXPERT_DATA] == 2);
}

typedef struct {
    int rank, world, n_pp, n_ep;
} MeshArgs;

static void make_mesh(void *arg) {
    const MeshArgs *a = (const MeshArgs *)arg;
    mesh_make(a->rank, a->world, a->n_pp, a->n_ep);
}

TEST(mesh_refuses_what_does_not_fit) {
    static const struct {
        MeshArgs args;
        const char *text;
    } cases[] = {
        {{0, 8, 3, 1}, "world 8, pp 3, ep 1"},
        {{0, 8, 4, 4}, "world 8, pp 4, ep 4"},
        {{0, 4, 0, 1}, "pp 0"},
        {{0, 4, 1, 0}, "ep 0"},
        {{0, 4, -2, -2}, "pp -2, ep -2"},
        {{4, 4, 1, 1}, "rank 4 of 4"},
        {{-1, 4, 1, 1}, "rank -1 of 4"},
        {{0, 0, 1, 1}, "rank 0 of 0"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        EXPECT(expect_exit(128 + SIGABRT, cases[i].text, make_mesh, (void *)(uintptr_t)&cases[i].args), "case %zu", i);
}

/* parallel.ep "auto", against all divisors of worlds of up to 24 ranks. */
TEST(mesh_auto_ep_is_the_largest_that_divides_both) {
    for (int world = 1; world <= WORLD_MAX; world++)
        for (int n_experts = 1; n_experts <= 16; n_experts++) {
            const int ep = mesh_auto_ep(world, 1, n_experts);
            EXPECT(world % ep == 0 && n_experts % ep == 0, "world %d, %d experts: %d", world, n_experts, ep);
            for (int more = ep + 1; more <= world; more++)
                EXPECT(world % more || n_experts % more, "world %d, %d experts: %d, not %d", world, n_experts, ep,
                       more);
        }
    EXPECT_EQ(mesh_auto_ep(8, 2, 64), 4);
    EXPECT_EQ(mesh_auto_ep(6, 1, 256), 2);
    EXPECT_EQ(mesh_auto_ep(8, 1, 1), 1);
}
