/* A job of one agrees with itself. Several ranks: tests/ranks. */
#include <string.h>

#include "kernels/comm/comm.h"
#include "tests/test.h"

TEST(job_of_one_agrees_with_itself) {
    int64_t own = 5, all = 0;
    uint64_t sum = 7;
    char text[16] = "";
    EXPECT(job_rank() == 0 && job_world() == 1 && job_ranks_here() == 1);
    job_gather(&all, &own, sizeof own);
    job_sum(&sum, 1);
    job_spread(&own, sizeof own);
    EXPECT(all == 5 && sum == 7 && own == 5);
    EXPECT_EQ(job_first_text(text, sizeof text), -1);
    strcpy(text, "here");
    EXPECT_EQ(job_first_text(text, sizeof text), 0);
    EXPECT(strcmp(text, "here") == 0);
}
