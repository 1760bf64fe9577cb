#include <string.h>

#include "op_test.h"

enum { V = 11, T = 9, D = 70 }; /* more columns than one thread's share */
static const int ids_list[T] = {3, 0, 10, 3, 3, 7, 10, 0, 3};

TEST(embed_forward_picks_rows) {
    static const Dtype dtypes[] = {DTYPE_F32, DTYPE_BF16};
    for (int i = 0; i < 2; i++) {
        Tensor w = t_normal(T2(dtypes[i], V, D), 1, 1), ids = t_ids(ids_list, T);
        Tensor y = t_poison(t_slice(dtypes[i], T, D, 5));
        op_embed_forward(DEV, y, ids, w, STREAM_COMPUTE);
        for (int64_t t = 0; t < T; t++)
            for (int64_t j = 0; j < D; j++)
                EXPECT(t_get(y, t * D + j) == t_get(w, ids_list[t] * D + j), "token %d column %d", (int)t, (int)j);
        EXPECT(t_gap_is_intact(y, 5), "the gap was written");
    }
}

TEST(embed_backward_adds_in_order) {
    static const Dtype dtypes[] = {DTYPE_F32, DTYPE_BF16};
    for (int i = 0; i < 2; i++) {
        Tensor dw = t_normal(T2(DTYPE_F32, V, D), 1, 2), dy = t_normal(t_slice(dtypes[i], T, D, 3), 1, 3);
        double *want = t_doubles(dw);
        Tensor before = t_copy(dw);
        for (int64_t t = 0; t < T; t++)
            for (int64_t j = 0; j < D; j++) want[ids_list[t] * D + j] += t_get(dy, t * D + j);
        op_embed_backward(DEV, dw, dy, t_ids(ids_list, T), STREAM_COMPUTE);
        EXPECT(t_error(dw, want) < OP_TOLERANCE, "error %g", t_error(dw, want));
        EXPECT(t_same_bits(tensor_rows(dw, 1, 2), tensor_rows(before, 1, 2)), "rows of absent ids were touched");
    }
}

/* One id in every token: the sum must run over the tokens in ascending order, to the bit. */
TEST(embed_backward_order_of_one_id) {
    enum { N = 300 };
    Tensor dw = T2(DTYPE_F32, 2, 3), dy = t_normal(T2(DTYPE_F32, N, 3), 1, 4), ids = t_fill(T1(DTYPE_I32, N), 1);
    op_embed_backward(DEV, dw, dy, ids, STREAM_COMPUTE);
    for (int64_t j = 0; j < 3; j++) {
        real sum = 0;
        for (int64_t t = 0; t < N; t++) sum += ((const real *)dy.data)[t * 3 + j];
        EXPECT(((const real *)dw.data)[3 + j] == sum, "column %d", (int)j);
    }
}

typedef struct {
    Tensor y, w, ids, dw, dy;
} Embed;

static double embed_loss(void *context) {
    Embed *e = (Embed *)context;
    op_embed_forward(DEV, e->y, e->ids, e->w, STREAM_COMPUTE);
    return t_dot_normal(e->y, 9);
}

static void embed_both(void *context) {
    Embed *e = (Embed *)context;
    op_embed_forward(DEV, e->y, e->ids, e->w, STREAM_COMPUTE);
    op_zero(DEV, e->dw, STREAM_COMPUTE);
    op_embed_backward(DEV, e->dw, e->dy, e->ids, STREAM_COMPUTE);
}

TEST(embed_gradient_and_threads) {
    Embed e = {T2(DTYPE_F32, T, D), t_normal(T2(DTYPE_F32, V, D), 1, 1), t_ids(ids_list, T), T2(DTYPE_F32, V, D),
               t_normal(T2(DTYPE_F32, T, D), 1, 9)};
    embed_both(&e);
    fd_check("embed w", e.w, e.dw, embed_loss, NULL, &e, 200, NULL);
    Tensor outputs[] = {e.y, e.dw};
    expect_same_bits("embed", embed_both, &e, outputs, 2);
}
