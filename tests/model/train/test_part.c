/* Which ranks are pipelined, and of how many micro-batches a step may be. */
#include "model/train/part.h"

#include <stdio.h>
#include <string.h>

#include "model/train/lr.h"
#include "tests/model/model_test.h"

static Config config_of(int pp, const char *schedule) {
    Config c;
    memset(&c, 0, sizeof c);
    c.parallel.pp = pp;
    snprintf(c.parallel.schedule, sizeof c.parallel.schedule, "%s", schedule);
    return c;
}

/* On one pipeline rank only what hides an exchange of tokens, or holds two chunks, is worth a second micro-batch. */
TEST(part_is_pipelined_where_it_pays) {
    static const struct {
        const char *schedule;
        bool alone, ep;
    } cases[] = {{"paired", false, true},
                 {"1f1b", false, false},
                 {"zb1p", false, false},
                 {"dualpipev", true, true},
                 {"dualpipe", false, false}};
    const Mesh alone = mesh_make(0, 1, 1, 1), ep = mesh_make(0, 4, 1, 4), pp = mesh_make(0, 4, 4, 1);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const Config one = config_of(1, cases[i].schedule), four = config_of(4, cases[i].schedule);
        EXPECT(part_is_pipelined(&one, &alone) == cases[i].alone, "%s", cases[i].schedule);
        EXPECT(part_is_pipelined(&one, &ep) == cases[i].ep, "%s with experts over ranks", cases[i].schedule);
        EXPECT(part_is_pipelined(&four, &pp), "%s over stages", cases[i].schedule);
    }
}

/* Both directions of dualpipe take as many; a batch that grows between two points keeps to that. */
TEST(part_batches_divide_by_what_the_schedule_takes) {
    Config c = config_of(2, "1f1b"), dual = config_of(2, "dualpipe");
    EXPECT_EQ(part_batch_unit(&c, 3), 3);
    EXPECT_EQ(part_batch_unit(&dual, 3), 6);
    dual.train.micro_batch_size = 1;
    dual.train.seq_len = 10;
    dual.train.global_batch_size = (Schedule){.n = 2, .tokens = {0, 10000}, .value = {24, 48}};
    for (int64_t tokens = 0; tokens < 12000; tokens += 100)
        EXPECT_EQ(batch_at(&dual, tokens, part_batch_unit(&dual, 3)) / 3 % 2, 0);
}

/* The largest batch of a ramp decides how much is held. */
TEST(part_has_room_for_the_largest_batch) {
    Fixture f;
    fixture_open(&f,
                 (const char *const[]){"model.num_hidden_layers=7", "parallel.pp=2", "parallel.schedule=dualpipe",
                                       "train.micro_batch_size=1", "train.global_batch_size=[[0,4],[1e6,12]]", NULL});
    const Mesh mesh = mesh_mirrored(mesh_make(1, 2, 2, 1));
    const RankPart part = part_make(&f.config, &mesh, 0);
    EXPECT_EQ(part.n_batches, 12);
    EXPECT(part.n_chunks == 2 && part.is_copy && part.pairs && part.embedding && !part.shares_embedding);
    EXPECT_EQ(part.chunk[0].end - part.chunk[0].first + part.chunk[1].end - part.chunk[1].first, 7);
    fixture_close(&f);
}
