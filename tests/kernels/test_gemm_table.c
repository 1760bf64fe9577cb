/* Rows of the GEMM table: text and back, look-up, the file that is compiled in. */
#include "kernels/cuda/gemm_table.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/base/file.h"
#include "tests/test.h"

static const char line[] =
    "sm_90/132 13.1.0 fprop 8192x2048x512 ld 512,512,2048 bf16>bf16 set align 16 sms 132 : id 66 tile 20 stages 36 "
    "splitk 1 reduction 0 swizzle 0 custom -1 inner 0 cluster 3 : 42.14.0.5.0.0.ffffffffffffffff.1";

static GemmRow parsed(const char *text) {
    GemmRow row;
    REQUIRE(gemm_row_parse(&row, text) == 0, "refused: %s", text);
    return row;
}

TEST(gemm_table_row_says_what_its_text_says) {
    const GemmRow row = parsed(line);
    const GemmCall *c = &row.call;
    EXPECT(row.place.arch == 90 && row.place.n_sms == 132 && row.place.library == 130100);
    EXPECT(c->kind == GEMM_FPROP && c->m == 8192 && c->n == 2048 && c->k == 512);
    EXPECT(c->lda == 512 && c->ldb == 512 && c->ldy == 2048);
    EXPECT(c->in == DTYPE_BF16 && c->out == DTYPE_BF16 && !c->accumulate && c->alignment == 16 && c->sms == 132);
    EXPECT(row.attribute[GEMM_ID] == 66 && row.attribute[GEMM_TILE] == 20 && row.attribute[GEMM_CUSTOM] == -1 &&
           row.attribute[GEMM_CLUSTER] == 3);
    EXPECT(row.word[0] == 0x42 && row.word[1] == 0x14 && row.word[6] == UINT64_MAX && row.word[7] == 1);
    char text[GEMM_ROW_LEN], place[64], call[64];
    gemm_row_text(text, &row);
    EXPECT(strcmp(text, line) == 0, "%s", text);
    EXPECT(strcmp(gemm_place_text(place, sizeof place, &row.place), "sm_90, 132 SMs, cuBLASLt 13.1.0") == 0, "%s",
           place);
    EXPECT(strcmp(gemm_call_text(call, sizeof call, c), "fprop 8192x2048x512 bf16>bf16") == 0, "%s", call);
}

/* The longest numbers there are still fit GEMM_ROW_LEN, and come back. */
TEST(gemm_table_longest_row) {
    GemmRow row = parsed(line);
    char text[GEMM_ROW_LEN];
    row.call.m = row.call.n = row.call.k = row.call.lda = row.call.ldb = row.call.ldy = INT64_MAX;
    for (int i = 0; i < GEMM_ATTRIBUTES; i++) row.attribute[i] = INT32_MIN;
    for (int i = 0; i < GEMM_ALGO_WORDS; i++) row.word[i] = UINT64_MAX;
    gemm_row_text(text, &row);
    const GemmRow back = parsed(text);
    EXPECT(gemm_call_equal(&row.call, &back.call) && memcmp(row.word, back.word, sizeof row.word) == 0 &&
           memcmp(row.attribute, back.attribute, sizeof row.attribute) == 0);
}

TEST(gemm_table_refuses_what_is_no_row) {
    static const struct {
        const char *from, *to;
    } edits[] = {{"sm_90", "sm90"},
                 {"fprop", "fprob"},
                 {"bf16>bf16", "bf16:bf16"},
                 {"bf16>bf16", "bf16>bf17"},
                 {" set ", " put "},
                 {"8192x2048", "8192*2048"},
                 {"align 16", "align"},
                 {"splitk 1", "split 1"},
                 {"cluster 3 :", "cluster 3"},
                 {"42.14", "42,14"},
                 {".1", ""},
                 {".5.", ".5x."},
                 {"f.1", "f.1.2"},
                 {"13.1.0", "13.1"},
                 {"sms 132 :", "sms 132"}};
    for (size_t i = 0; i < sizeof edits / sizeof *edits; i++) {
        char text[GEMM_ROW_LEN];
        GemmRow row;
        const char *at = strstr(line, edits[i].from);
        if (strcmp(edits[i].from, ".1") == 0) at = line + sizeof line - 3; /* the last word */
        REQUIRE(at, "no %s in the row", edits[i].from);
        snprintf(text, sizeof text, "%.*s%s%s", (int)(at - line), line, edits[i].to, at + strlen(edits[i].from));
        EXPECT(gemm_row_parse(&row, text) != 0, "accepted: %s", text);
    }
}

/* A row is for its GPU, its library and exactly its call. */
TEST(gemm_table_finds_the_row_of_the_call) {
    GemmRows rows = {0, NULL};
    const GemmRow row = parsed(line);
    gemm_rows_put(&rows, &row);
    EXPECT(gemm_rows_find(&rows, &row.place, &row.call) == &rows.row[0]);
    GemmPlace place = row.place;
    place.library++;
    EXPECT(!gemm_rows_find(&rows, &place, &row.call), "another library");
    place = row.place;
    place.n_sms = 114;
    EXPECT(!gemm_rows_find(&rows, &place, &row.call), "fewer SMs");
    place = row.place;
    place.arch = 80;
    EXPECT(!gemm_rows_find(&rows, &place, &row.call), "another architecture");
    for (int i = 0; i < 12; i++) {
        GemmCall call = row.call;
        switch (i) {
        case 0: call.kind = GEMM_WGRAD; break;
        case 1: call.m++; break;
        case 2: call.n++; break;
        case 3: call.k++; break;
        case 4: call.lda++; break;
        case 5: call.ldb++; break;
        case 6: call.ldy++; break;
        case 7: call.in = DTYPE_F32; break;
        case 8: call.out = DTYPE_F32; break;
        case 9: call.accumulate = true; break;
        case 10: call.alignment = 8; break;
        case 11: call.sms = 100; break;
        }
        EXPECT(!gemm_rows_find(&rows, &row.place, &call), "difference %d", i);
    }
    GemmRow newer = row;
    newer.word[0] = 7;
    gemm_rows_put(&rows, &newer);
    EXPECT(rows.n == 1 && rows.row[0].word[0] == 7, "the newer algorithm takes the place of the older");
    gemm_rows_free(&rows);
}

TEST(gemm_table_lines) {
    char text[4 * GEMM_ROW_LEN], err[ERR_LEN];
    GemmRows rows;
    snprintf(text, sizeof text, "\n%s\n\n", line);
    EXPECT(gemm_rows_parse(&rows, text, err) == 0 && rows.n == 1, "%s", err);
    gemm_rows_free(&rows);
    EXPECT(gemm_rows_parse(&rows, "", err) == 0 && rows.n == 0);
    snprintf(text, sizeof text, "%s\nsm_90/132 nonsense\n", line);
    EXPECT(gemm_rows_parse(&rows, text, err) != 0 && strstr(err, "nonsense") && !rows.row, "%s", err);
    memset(text, '7', sizeof text);
    memcpy(text, line, sizeof line - 1); /* a row with a word that never ends */
    text[sizeof text - 1] = 0;
    EXPECT(gemm_rows_parse(&rows, text, err) != 0, "a line longer than any row");
}

/* What `make tune` writes is read again, sorted, and is what a compiler takes for one string of these lines. */
TEST(gemm_table_file) {
    char path[512], err[ERR_LEN] = "", *text;
    size_t size;
    GemmRows rows = {0, NULL}, back;
    snprintf(path, sizeof path, "%s/rows.inc", test_tmp_dir());
    EXPECT(gemm_rows_read(&back, path, err) == 0 && back.n == 0, "none yet: %s", err);
    GemmRow row = parsed(line);
    for (int64_t m = 3; m > 0; m--) {
        row.call.m = m;
        row.word[0] = (uint64_t)m;
        gemm_rows_put(&rows, &row);
    }
    REQUIRE(gemm_rows_write(&rows, path, err) == 0 && gemm_rows_read(&back, path, err) == 0, "%s", err);
    EXPECT_EQ(back.n, 3);
    for (int i = 0; i < back.n; i++)
        EXPECT(back.row[i].call.m == i + 1 && back.row[i].word[0] == (uint64_t)(i + 1), "row %d: m %lld", i,
               (long long)back.row[i].call.m);
    REQUIRE(file_read_all(&text, &size, path, 1 << 20, err) == 0, "%s", err);
    EXPECT(strncmp(text, "/* ", 3) == 0 && strstr(text, "*/\n\"sm_90/132 ") && strstr(text, ".1\\n\"\n\"sm_90"), "%s",
           text);
    free(text);
    gemm_rows_free(&rows);
    gemm_rows_free(&back);
}

/* No row splits its sums, but in FP8, where the library offers nothing else: then it keeps the pieces and adds them in
 * order (CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE is 2). */
TEST(gemm_table_that_is_built_in) {
    GemmRows rows, file;
    char err[ERR_LEN] = "";
    gemm_rows_builtin(&rows);
    REQUIRE(gemm_rows_read(&file, "kernels/cuda/gemm_rows.inc", err) == 0, "%s", err);
    EXPECT_EQ(rows.n, file.n);
    for (int i = 0; i < rows.n; i++) {
        const GemmRow *r = &rows.row[i];
        const int32_t reduction = r->attribute[GEMM_REDUCTION];
        EXPECT((reduction <= 0 && r->attribute[GEMM_SPLITK] <= 1) || (r->call.in == DTYPE_E4M3 && reduction == 2),
               "row %d splits its sums", i);
        EXPECT(r->call.sms <= r->place.n_sms, "row %d: %d of %d SMs", i, r->call.sms, r->place.n_sms);
        EXPECT(gemm_rows_find(&file, &r->place, &r->call), "row %d is not in the file", i);
    }
    gemm_rows_free(&rows);
    gemm_rows_free(&file);
}
