/* Tensors are values: what makers, views and predicates say, and what they refuse. */
#include "kernels/tensor.h"

#include <signal.h>
#include <string.h>

#include "op_test.h"

enum { ABORTED = 128 + SIGABRT };

TEST(tensor_dtypes) {
    static const struct {
        Dtype dtype;
        size_t size;
        const char *name;
    } cases[] = {{DTYPE_NONE, 0, "none"}, {DTYPE_F32, sizeof(real), "f32"},
                 {DTYPE_BF16, 2, "bf16"}, {DTYPE_E4M3, 1, "e4m3"},
                 {DTYPE_I32, 4, "i32"},   {DTYPE_F64, 8, "f64"},
                 {DTYPE_E5M6, 0, "e5m6"}};
    EXPECT_EQ(sizeof cases / sizeof *cases, DTYPE_COUNT);
    for (int i = 0; i < DTYPE_COUNT; i++) {
        EXPECT_EQ(dtype_size(cases[i].dtype), cases[i].size);
        EXPECT(strcmp(dtype_name(cases[i].dtype), cases[i].name) == 0, "%s", dtype_name(cases[i].dtype));
    }
    EXPECT(strcmp(dtype_name(DTYPE_COUNT), "?") == 0 && strcmp(dtype_name((Dtype)-1), "?") == 0);
}

TEST(tensor_makers) {
    float x[24];
    Tensor none = tensor_none(), one = tensor_1d(x, DTYPE_F32, 24), two = tensor_2d(x, DTYPE_BF16, 4, 6);
    Tensor three = tensor_3d(x, DTYPE_E4M3, 2, 3, 4), counting = tensor_2d(NULL, DTYPE_F32, 3, 5);
    EXPECT(tensor_is_none(none) && !none.data && tensor_numel(none) == 0 && tensor_bytes(none) == 0);
    EXPECT(!tensor_is_none(one) && !tensor_is_none(counting), "a tensor being laid out is not absent");
    EXPECT(one.ndim == 1 && one.shape[0] == 24 && one.ld == 1 && one.data == x && !one.n_rows && !one.scale);
    EXPECT(two.ndim == 2 && two.shape[0] == 4 && two.shape[1] == 6 && two.ld == 6 && tensor_bytes(two) == 48);
    EXPECT(three.ndim == 3 && three.shape[2] == 4 && three.ld == 4 && tensor_bytes(three) == 24);
    EXPECT_EQ(tensor_bytes(counting), 15 * sizeof(real));
    EXPECT(tensor_is_contiguous(none) && tensor_is_contiguous(one) && tensor_is_contiguous(two));
    EXPECT(tensor_numel(tensor_2d(x, DTYPE_F32, 0, 7)) == 0 && tensor_numel(tensor_1d(NULL, DTYPE_F32, 0)) == 0);
}

/* Extents beyond 32 bits are counted in 64. */
TEST(tensor_sizes_beyond_32_bits) {
    Tensor t = tensor_3d(NULL, DTYPE_I32, 3, 100000, 50000);
    EXPECT_EQ(tensor_numel(t), 15000000000);
    EXPECT_EQ(tensor_bytes(t), 60000000000);
    Tensor wide = tensor_2d((void *)0x1000, DTYPE_BF16, 100000, 50000);
    Tensor last = tensor_cols(tensor_rows(wide, 99999, 1), 49999, 1);
    EXPECT_EQ((uintptr_t)last.data - 0x1000, 2 * (100000LL * 50000 - 1));
    EXPECT_EQ((uintptr_t)tensor_plane(wide, 99999).data - 0x1000, 2 * 99999LL * 50000);
}

TEST(tensor_views_point_where_they_should) {
    Tensor m = T2(DTYPE_I32, 6, 5);
    for (int64_t i = 0; i < 30; i++) t_set(m, i, (double)i);
    const int32_t n = 4;
    m.n_rows = &n;

    Tensor cols = tensor_cols(m, 2, 3);
    EXPECT(cols.shape[0] == 6 && cols.shape[1] == 3 && cols.ld == 5 && !tensor_is_contiguous(cols));
    EXPECT(cols.n_rows == &n, "columns of all rows keep the count");
    for (int64_t i = 0; i < 18; i++) EXPECT_EQ(t_get(cols, i), i / 3 * 5 + 2 + i % 3);

    Tensor rows = tensor_rows(cols, 1, 4);
    EXPECT(rows.shape[0] == 4 && rows.ld == 5 && !rows.n_rows, "the count belongs to the whole");
    for (int64_t i = 0; i < 12; i++) EXPECT_EQ(t_get(rows, i), (i / 3 + 1) * 5 + 2 + i % 3);

    Tensor row = tensor_plane(m, 3);
    EXPECT(row.ndim == 1 && row.shape[0] == 5 && row.shape[1] == 0 && row.ld == 1 && !row.n_rows);
    EXPECT_EQ(t_get(row, 4), 19);
    Tensor tail = tensor_rows(row, 2, 3);
    EXPECT(tail.shape[0] == 3 && t_get(tail, 0) == 17);

    Tensor planes = tensor_3d(m.data, DTYPE_I32, 3, 2, 5), plane = tensor_plane(planes, 2);
    EXPECT(plane.ndim == 2 && plane.shape[0] == 2 && plane.shape[1] == 5 && plane.shape[2] == 0 && plane.ld == 5);
    EXPECT_EQ(t_get(plane, 9), 29);

    Tensor again = tensor_reshape2(planes, 10, 3);
    EXPECT(again.ndim == 2 && again.ld == 3 && again.data == m.data && t_get(again, 29) == 29);
    EXPECT(tensor_is_contiguous(tensor_cols(m, 0, 5)), "all columns are no gap");
}

TEST(tensor_views_of_nothing) {
    Tensor counting = tensor_2d(NULL, DTYPE_F32, 6, 5);
    EXPECT(!tensor_cols(counting, 2, 2).data && !tensor_rows(counting, 3, 1).data && !tensor_plane(counting, 5).data,
           "a view of memory that is not there yet points nowhere");
    Tensor t = T2(DTYPE_F32, 6, 5);
    EXPECT(tensor_numel(tensor_rows(t, 6, 0)) == 0 && tensor_numel(tensor_cols(t, 5, 0)) == 0, "empty at the end");
}

static Tensor matrix(void) {
    return tensor_2d((void *)0x1000, DTYPE_F32, 6, 5);
}
static void rows_behind_end(void *arg) {
    (void)arg;
    tensor_rows(matrix(), 3, 4);
}
static void rows_before_start(void *arg) {
    (void)arg;
    tensor_rows(matrix(), -1, 2);
}
static void rows_of_planes(void *arg) {
    (void)arg;
    tensor_rows(tensor_3d(NULL, DTYPE_F32, 2, 2, 2), 0, 1);
}
static void cols_behind_end(void *arg) {
    (void)arg;
    tensor_cols(matrix(), 3, 3);
}
static void cols_of_vector(void *arg) {
    (void)arg;
    tensor_cols(tensor_1d(NULL, DTYPE_F32, 4), 0, 1);
}
static void plane_behind_end(void *arg) {
    (void)arg;
    tensor_plane(matrix(), 6);
}
static void plane_of_slice(void *arg) {
    (void)arg;
    tensor_plane(tensor_cols(matrix(), 0, 4), 0);
}
static void plane_of_vector(void *arg) {
    (void)arg;
    tensor_plane(tensor_1d(NULL, DTYPE_F32, 4), 0);
}
static void reshape_to_other_size(void *arg) {
    (void)arg;
    tensor_reshape2(matrix(), 4, 7);
}
static void reshape_of_slice(void *arg) {
    (void)arg;
    tensor_reshape2(tensor_cols(matrix(), 0, 4), 4, 6);
}
static void negative_extent(void *arg) {
    (void)arg;
    tensor_2d(NULL, DTYPE_F32, 3, -1);
}

TEST(tensor_refuses_what_is_outside) {
    EXPECT(expect_exit(ABORTED, "rows [3, +4) of 6", rows_behind_end, NULL));
    EXPECT(expect_exit(ABORTED, "rows [-1, +2) of 6", rows_before_start, NULL));
    EXPECT(expect_exit(ABORTED, "rows [0, +1)", rows_of_planes, NULL));
    EXPECT(expect_exit(ABORTED, "columns [3, +3) of 5", cols_behind_end, NULL));
    EXPECT(expect_exit(ABORTED, "columns", cols_of_vector, NULL));
    EXPECT(expect_exit(ABORTED, "plane 6 of 6", plane_behind_end, NULL));
    EXPECT(expect_exit(ABORTED, "plane 0 of 6", plane_of_slice, NULL));
    EXPECT(expect_exit(ABORTED, "plane", plane_of_vector, NULL));
    EXPECT(expect_exit(ABORTED, "reshape of 30 elements to (4, 7)", reshape_to_other_size, NULL));
    EXPECT(expect_exit(ABORTED, "reshape", reshape_of_slice, NULL));
    EXPECT(expect_exit(ABORTED, "shape (3, -1, 0)", negative_extent, NULL));
}
