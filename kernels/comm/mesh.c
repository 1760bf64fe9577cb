/* Who is who: rank = (pp*DP + dp)*EP + ep. See comm.h. */
#include <stdlib.h>
#include <string.h>

#include "comm.h"
#include "kernels/base/check.h"

Mesh mesh_make(int rank, int world, int n_pp, int n_ep) {
    CHECK(world > 0 && rank >= 0 && rank < world, "rank %d of %d", rank, world);
    CHECK(n_pp > 0 && n_ep > 0 && world % (n_pp * n_ep) == 0, "world %d, pp %d, ep %d", world, n_pp, n_ep);
    Mesh m;
    memset(&m, 0, sizeof m);
    m.rank = rank;
    m.world = world;
    m.n_pp = n_pp;
    m.n_ep = n_ep;
    m.n_dp = world / (n_pp * n_ep);
    m.ep = rank % n_ep;
    m.dp = rank / n_ep % m.n_dp;
    m.pp = rank / (n_ep * m.n_dp);
    m.n_data = m.n_dp * n_ep;
    m.data = m.dp * n_ep + m.ep;
    m.size[GROUP_WORLD] = world, m.rank_in[GROUP_WORLD] = rank;
    m.size[GROUP_EXPERT] = n_ep, m.rank_in[GROUP_EXPERT] = m.ep;
    m.size[GROUP_EXPERT_DATA] = m.n_dp, m.rank_in[GROUP_EXPERT_DATA] = m.dp;
    m.size[GROUP_DATA] = m.n_data, m.rank_in[GROUP_DATA] = m.data;
    m.size[GROUP_PIPE] = n_pp, m.rank_in[GROUP_PIPE] = m.pp;
    m.size[GROUP_EMBED] = n_pp > 1 ? 2 : 1, m.rank_in[GROUP_EMBED] = m.pp == n_pp - 1 && n_pp > 1 ? 1 : 0;
    return m;
}

/* Holders: those of the lower stage first. First and last stage are on the same ranks. */
Mesh mesh_mirrored(Mesh m) {
    CHECK(m.n_pp % 2 == 0 && !m.is_mirrored, "pp %d", m.n_pp);
    const int is_upper = m.pp >= m.n_pp / 2;
    m.is_mirrored = true;
    m.rank_in[GROUP_DATA] += is_upper * m.size[GROUP_DATA];
    m.rank_in[GROUP_EXPERT_DATA] += is_upper * m.size[GROUP_EXPERT_DATA];
    m.size[GROUP_DATA] *= 2;
    m.size[GROUP_EXPERT_DATA] *= 2;
    m.size[GROUP_EMBED] = 1, m.rank_in[GROUP_EMBED] = 0;
    return m;
}

int mesh_group_number(const Mesh *m, Group g) {
    const int holder = m->is_mirrored && m->pp >= m->n_pp / 2 ? m->n_pp - 1 - m->pp : m->pp;
    const bool is_end = m->pp == 0 || m->pp == m->n_pp - 1;
    switch (g) {
    case GROUP_WORLD: return 0;
    case GROUP_EXPERT: return m->pp * m->n_dp + m->dp;
    case GROUP_EXPERT_DATA: return holder * m->n_ep + m->ep;
    case GROUP_DATA: return holder;
    case GROUP_PIPE: return m->data;
    case GROUP_EMBED: return m->is_mirrored ? m->rank : is_end ? m->data : -1;
    case GROUP_COUNT: break;
    }
    return -1;
}

bool mesh_groups_are_same(const Mesh *m, Group a, Group b) {
    int *b_of_a = (int *)malloc((size_t)m->world * sizeof *b_of_a);
    CHECK(b_of_a, "no memory for %d groups", m->world);
    for (int i = 0; i < m->world; i++) b_of_a[i] = -1;
    bool is_same = true;
    for (int r = 0; r < m->world && is_same; r++) {
        const Mesh plain = mesh_make(r, m->world, m->n_pp, m->n_ep);
        const Mesh other = m->is_mirrored ? mesh_mirrored(plain) : plain;
        const int in_a = mesh_group_number(&other, a), in_b = mesh_group_number(&other, b);
        is_same = other.size[a] == other.size[b] && other.rank_in[a] == other.rank_in[b] && (in_a < 0) == (in_b < 0);
        if (!is_same || in_a < 0) continue;
        if (b_of_a[in_a] < 0) b_of_a[in_a] = in_b;
        is_same = b_of_a[in_a] == in_b;
    }
    free(b_of_a);
    return is_same;
}

int mesh_auto_ep(int world, int n_pp, int n_experts) {
    const int left = n_pp > 0 && world % n_pp == 0 ? world / n_pp : 1;
    int ep = 1;
    for (int n = 2; n <= left && n <= n_experts; n++)
        if (left % n == 0 && n_experts % n == 0) ep = n;
    return ep;
}
