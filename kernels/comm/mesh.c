/* Who is who: rank = (pp*DP + dp)*EP + ep. See comm.h. */
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
    m.size[GROUP_WORLD] = world, m.rank_in[GROUP_WORLD] = rank;
    m.size[GROUP_EXPERT] = n_ep, m.rank_in[GROUP_EXPERT] = m.ep;
    m.size[GROUP_EXPERT_DATA] = m.n_dp, m.rank_in[GROUP_EXPERT_DATA] = m.dp;
    m.size[GROUP_DATA] = m.n_dp * n_ep, m.rank_in[GROUP_DATA] = m.dp * n_ep + m.ep;
    m.size[GROUP_PIPE] = n_pp, m.rank_in[GROUP_PIPE] = m.pp;
    m.size[GROUP_EMBED] = n_pp > 1 ? 2 : 1, m.rank_in[GROUP_EMBED] = m.pp == n_pp - 1 && n_pp > 1 ? 1 : 0;
    return m;
}

int mesh_auto_ep(int world, int n_pp, int n_experts) {
    const int left = n_pp > 0 && world % n_pp == 0 ? world / n_pp : 1;
    int ep = 1;
    for (int n = 2; n <= left && n <= n_experts; n++)
        if (left % n == 0 && n_experts % n == 0) ep = n;
    return ep;
}
