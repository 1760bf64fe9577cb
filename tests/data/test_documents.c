/* data/documents.c: lengths and repetitions of documents in streams of tokens. */
#include "data/documents.h"

#include <stdlib.h>
#include <string.h>

#include "tests/test.h"

enum { DOC = 9 };

TEST(documents_of_a_stream) {
    /* Headless 2, empty, 1, 3 (cut over pieces), empty, the 1 again, then a new stream of one document of 4. */
    const int32_t ids[] = {1, 2, DOC, DOC, 5, DOC, 6, 7, 8, DOC, DOC, 5}, other[] = {DOC, 1, 2, 3, 4};
    const int64_t n = sizeof ids / sizeof *ids;
    for (int64_t cut = 0; cut <= n; cut++) {
        Documents d;
        documents_init(&d, DOC);
        documents_add(&d, ids, cut, 0, 0);
        documents_add(&d, ids + cut, n - cut, 1, 0);
        documents_end(&d);
        documents_end(&d); /* nothing more to end */
        documents_add(&d, other, 5, 2, 100);
        documents_end(&d);
        EXPECT_EQ(d.n, 7);
        EXPECT_EQ(d.n_headless, 1);
        EXPECT_EQ(d.n_tokens, 11);
        EXPECT_EQ(d.longest, 4);
        EXPECT(d.count[0] == 2 && d.count[1] == 2 && d.count[2] == 2 && d.count[3] == 1, "%lld %lld %lld %lld",
               (long long)d.count[0], (long long)d.count[1], (long long)d.count[2], (long long)d.count[3]);
        EXPECT(d.n_tokens_of[1] == 2 && d.n_tokens_of[2] == 5 && d.n_tokens_of[3] == 4);
        EXPECT_EQ(d.n_compared, 5);
        EXPECT_EQ(d.n_duplicates, 1);
        EXPECT_EQ(d.n_duplicate_tokens, 1);
        const DocumentPlace place = d.duplicates[0];
        EXPECT(place.length == 1 && place.file == (cut <= 10) && place.token == (cut <= 10 ? 10 - cut : 10), "%d %lld",
               place.file, (long long)place.token);
        documents_free(&d);
    }
}

TEST(documents_that_break_off) {
    const int32_t ids[] = {DOC, 1, 2, DOC, 3};
    Documents d;
    documents_init(&d, DOC);
    documents_add(&d, ids, 5, 0, 0);
    documents_drop(&d);
    documents_add(&d, ids, 5, 1, 0);
    documents_end(&d);
    EXPECT_EQ(d.n, 3);
    EXPECT(d.n_duplicates == 1 && d.duplicates[0].file == 1 && d.duplicates[0].token == 0);
    documents_free(&d);
}

/* Many documents, each known number of times: the table grows, nothing is missed and nothing taken for another. */
TEST(documents_duplicates_of_many) {
    enum { KINDS = 30000, ROUNDS = 3 };
    Documents d;
    documents_init(&d, 0);
    for (int round = 0; round < ROUNDS; round++)
        for (int i = 0; i < KINDS; i++) {
            const int32_t ids[] = {0, 1 + i % 7, 1 + i / 7, 5, 1 + (i & 1)}; /* some are permutations of others */
            documents_add(&d, ids, 5, round, 5 * i);
        }
    documents_end(&d);
    EXPECT_EQ(d.n, ROUNDS * KINDS);
    EXPECT_EQ(d.n_compared, ROUNDS * KINDS);
    EXPECT_EQ(d.n_duplicates, (ROUNDS - 1) * KINDS);
    for (int i = 0; i < DUPLICATE_PLACES; i++)
        EXPECT(d.duplicates[i].file == 1 && d.duplicates[i].token == 5 * i && d.duplicates[i].length == 4);
    EXPECT(d.n_places < 4 * KINDS, "%lld places for %d documents", (long long)d.n_places, KINDS);
    documents_free(&d);
}
