/* data/batch.c: targets, positions and document starts of a micro-batch. */
#include "data/batch.h"

#include <stdio.h>
#include <string.h>

#include "tests/test.h"

static void expect_row(const char *what, const int32_t *got, const int32_t *expected, int n) {
    for (int t = 0; t < n; t++)
        EXPECT(got[t] == expected[t], "%s[%d] is %d, expected %d", what, t, got[t], expected[t]);
}

/* Three short documents, D = 9: their MTP losses never use a target from another document, and the main loss keeps all.
 *   t        0  1  2  3  4  5  6  7  8 | 9 10 11 */
static const int32_t three_documents[12] = {9, 1, 2, 3, 9, 4, 9, 5, 6, 7, 9, 8};

TEST(batch_of_three_documents) {
    enum { S = 9, D = 9 };
    static const int32_t expected_targets[3][S] = {
        {1, 2, 3, 9, 4, 9, 5, 6, 7},      /* the next id, document tokens included */
        {2, 3, 9, -1, 9, -1, 6, 7, 9},    /* the last token of each document has nothing two ahead */
        {3, 9, -1, -1, -1, -1, 7, 9, -1}, /* nor its last two three ahead */
    };
    static const int32_t expected_position[S] = {0, 1, 2, 3, 0, 1, 0, 1, 2};
    static const int32_t expected_start[S] = {0, 0, 0, 0, 4, 4, 6, 6, 6};
    MicroBatch mb;
    char err[ERR_LEN];
    REQUIRE(micro_batch_alloc(&mb, 1, S, 2, err) == 0, "%s", err);
    micro_batch_set(&mb, 0, three_documents, D, S);
    micro_batch_count(&mb);
    for (int k = 0; k < 3; k++) {
        char what[32];
        snprintf(what, sizeof what, "targets%d", k);
        expect_row(what, mb.targets + k * S, expected_targets[k], S);
        expect_row("tokens", mb.tokens + k * S, three_documents + k, S);
        int64_t n = 0;
        for (int t = 0; t < S; t++) n += expected_targets[k][t] >= 0;
        EXPECT_EQ(mb.n_targets[k], n);
    }
    expect_row("position", mb.position, expected_position, S);
    expect_row("doc_start", mb.doc_start, expected_start, S);

    /* Without the mask, as V3: nothing is masked, one sequence. */
    micro_batch_set(&mb, 0, three_documents, NO_DOCUMENT_MASK, S);
    micro_batch_count(&mb);
    for (int k = 0; k < 3; k++) {
        expect_row("targets", mb.targets + k * S, three_documents + k + 1, S);
        EXPECT_EQ(mb.n_targets[k], S);
    }
    for (int t = 0; t < S; t++) EXPECT(mb.position[t] == t && mb.doc_start[t] == 0);
    micro_batch_free(&mb);
}

/* The rule by its definition, over every window of 0 and D there is. */
TEST(batch_masks_by_the_rule) {
    enum { S = 6, DEPTH = 4, N = S + 1 + DEPTH, D = 1 };
    MicroBatch mb;
    char err[ERR_LEN];
    REQUIRE(micro_batch_alloc(&mb, 2, S, DEPTH, err) == 0, "%s", err);
    for (int bits = 0; bits < 1 << N; bits++) {
        int32_t window[N];
        for (int i = 0; i < N; i++) window[i] = bits >> i & 1;
        micro_batch_set(&mb, 1, window, D, S);
        for (int t = 0; t < S; t++) {
            int start = t;
            while (start > 0 && window[start] != D) start--;
            EXPECT(mb.doc_start[S + t] == S + start && mb.position[S + t] == t - start, "window %x, t %d", bits, t);
            for (int k = 0; k <= DEPTH; k++) {
                bool is_crossed = false;
                for (int i = t + 1; i <= t + k; i++) is_crossed = is_crossed || window[i] == D;
                int32_t expected = is_crossed ? -1 : window[t + k + 1];
                int32_t got = mb.targets[k * 2 * S + S + t];
                EXPECT(got == expected, "window %x, t %d, depth %d: %d", bits, t, k, got);
            }
        }
    }
    micro_batch_free(&mb);
}

/* Empty documents: two document tokens in a row, at the start, in the middle, at the end; and nothing else at all. */
TEST(batch_of_empty_documents) {
    enum { S = 6, D = 9 };
    const int32_t window[S + 2] = {9, 9, 1, 9, 9, 9, 9, 2};
    const int32_t targets0[S] = {9, 1, 9, 9, 9, 9}, targets1[S] = {-1, 9, -1, -1, -1, -1};
    const int32_t position[S] = {0, 0, 1, 0, 0, 0}, start[S] = {0, 1, 1, 3, 4, 5};
    MicroBatch mb;
    char err[ERR_LEN];
    REQUIRE(micro_batch_alloc(&mb, 1, S, 1, err) == 0, "%s", err);
    micro_batch_set(&mb, 0, window, D, S);
    expect_row("targets0", mb.targets, targets0, S);
    expect_row("targets1", mb.targets + S, targets1, S);
    expect_row("position", mb.position, position, S);
    expect_row("doc_start", mb.doc_start, start, S);
    const int32_t only[S + 2] = {9, 9, 9, 9, 9, 9, 9, 9};
    micro_batch_set(&mb, 0, only, D, S);
    micro_batch_count(&mb);
    EXPECT_EQ(mb.n_targets[0], S);
    EXPECT_EQ(mb.n_targets[1], 0);
    micro_batch_free(&mb);
}

TEST(batch_scored_part_and_padding) {
    enum { S = 4, T = 12 };
    const int32_t window[S + 3] = {1, 2, 3, 4, 5, 6, 7};
    MicroBatch mb;
    char err[ERR_LEN];
    REQUIRE(micro_batch_alloc(&mb, 3, S, 2, err) == 0, "%s", err);
    micro_batch_set(&mb, 0, window, NO_DOCUMENT_MASK, S);
    micro_batch_set(&mb, 1, window, NO_DOCUMENT_MASK, 3);
    micro_batch_set(&mb, 2, window, NO_DOCUMENT_MASK, S);
    micro_batch_pad(&mb, 2);
    micro_batch_count(&mb);
    const int32_t targets2[T] = {4, 5, 6, 7, 4, 5, 6, -1, -1, -1, -1, -1};
    const int32_t tokens2[T] = {3, 4, 5, 6, 3, 4, 5, 6, 0, 0, 0, 0};
    const int32_t position[T] = {0, 1, 2, 3, 0, 1, 2, 3, -1, -1, -1, -1};
    const int32_t start[T] = {0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8};
    expect_row("targets2", mb.targets + 2 * T, targets2, T);
    expect_row("tokens2", mb.tokens + 2 * T, tokens2, T);
    expect_row("position", mb.position, position, T);
    expect_row("doc_start", mb.doc_start, start, T);
    for (int k = 0; k < 3; k++) EXPECT_EQ(mb.n_targets[k], 7);
    micro_batch_free(&mb);
    EXPECT(micro_batch_alloc(&mb, 1 << 20, 1 << 12, 0, err) == -1 && strstr(err, "more than"), "%s", err);
}
