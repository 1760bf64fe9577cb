/* Multiple-choice files: what is read, and that a file with anything wrong in it is named and refused. */
#include "data/choice_file.h"

#include <stdlib.h>
#include <string.h>

#include "tests/data/shards.h"
#include "tests/test.h"

enum { VOCAB = 100, ROOM = 256 };

/* The numbers behind the header: two questions. Positions of the second one's parts are named below. */
static const uint32_t two_questions[] = {
    UINT16_MAX, 26, 0, 1, 2, 2, 10, 11, 1,  20, 2,  21, 22,     /* context 10 11; choices 20, and 21 22 */
    UINT16_MAX, 28, 1, 0, 3, 1, 12, 1,  30, 2,  31, 32, 1,  99, /* context 12; choices 30, 31 32, and 99 */
};
enum { N_NUMBERS = sizeof two_questions / sizeof *two_questions, SECOND = 13 };

typedef struct {
    int32_t header[256];
    uint32_t number[ROOM];
    int n;           /* numbers */
    int extra_bytes; /* behind the last number; negative: cut off */
} Image;

static Image image_make(int32_t version) {
    Image image;
    memset(&image, 0, sizeof image);
    image.header[0] = 20240522;
    image.header[1] = version;
    image.header[2] = 2;
    image.header[3] = 28;
    image.n = N_NUMBERS;
    memcpy(image.number, two_questions, sizeof two_questions);
    for (int i = 0; i < N_NUMBERS && version == 7; i++) {
        if (image.number[i] != UINT16_MAX) continue;
        image.number[i] = UINT32_MAX;
        image.number[i + 1] *= 2; /* bytes */
    }
    return image;
}

static void write_image(const Image *image) {
    static unsigned char bytes[1024 + 4 * ROOM + 16];
    const size_t width = image->header[1] == 7 ? 4 : 2;
    memset(bytes, 0, sizeof bytes);
    memcpy(bytes, image->header, 1024);
    for (int i = 0; i < image->n; i++) memcpy(bytes + 1024 + (size_t)i * width, &image->number[i], width);
    test_write_bytes("choice.bin", bytes, (size_t)(1024 + image->n * (int)width + image->extra_bytes));
}

static int open_image(ChoiceFile *f, const Image *image, char *err, char *hint) {
    char path[TEST_PATH_LEN];
    write_image(image);
    return choice_file_open(f, test_path(path, "choice.bin"), VOCAB, err, hint);
}

TEST(choice_file_is_read_in_both_widths) {
    char err[ERR_LEN] = "", hint[ERR_LEN];
    for (int version = 1; version <= 7; version += 6) {
        ChoiceFile f;
        const Image image = image_make(version);
        REQUIRE(open_image(&f, &image, err, hint) == 0, "version %d: %s", version, err);
        EXPECT_EQ(f.n_examples, 2);
        EXPECT_EQ(f.n_ids, 5 + 5);
        EXPECT_EQ(f.examples[0].label, 1);
        EXPECT_EQ(f.examples[0].n_choices, 2);
        EXPECT_EQ(f.examples[0].n_context, 2);
        EXPECT_EQ(f.examples[1].label, 0);
        EXPECT_EQ(f.examples[1].n_choices, 3);
        EXPECT(choice_context(&f, 0)[0] == 10 && choice_context(&f, 0)[1] == 11, "context");
        EXPECT(f.examples[0].length[0] == 1 && choice_ids(&f, 0, 0)[0] == 20, "choice 0");
        EXPECT(f.examples[0].length[1] == 2 && choice_ids(&f, 0, 1)[1] == 22, "choice 1");
        EXPECT(choice_context(&f, 1)[0] == 12 && choice_ids(&f, 1, 1)[1] == 32 && choice_ids(&f, 1, 2)[0] == 99,
               "second");
        EXPECT(!hint[0], "%s", hint);
        choice_file_close(&f);
    }
}

/* 32-bit ids reach beyond 65535, where llm.c's own files end. */
TEST(choice_file_of_a_large_vocabulary) {
    char err[ERR_LEN] = "", hint[ERR_LEN], path[TEST_PATH_LEN];
    ChoiceFile f;
    Image image = image_make(7);
    image.number[9] = 129279;
    write_image(&image);
    REQUIRE(choice_file_open(&f, test_path(path, "choice.bin"), 129280, err, hint) == 0, "%s", err);
    EXPECT_EQ(choice_ids(&f, 0, 0)[0], 129279);
    choice_file_close(&f);
    EXPECT(choice_file_open(&f, path, 129279, err, hint) == -1 && strstr(err, "id 129279, outside"), "%s", err);
}

static const struct {
    int at; /* of the number that is changed; -1: of the header */
    int header_at;
    int64_t value;
    int extra_bytes;
    const char *says;
} broken[] = {
    {-1, 0, 20240520, 0, "but a token shard"},
    {-1, 0, 7, 0, "magic 7 found, 20240522 expected"},
    {-1, 1, 2, 0, "version 2 found, 1 (16-bit ids) or 7 (32-bit ids) expected"},
    {-1, 2, 0, 0, "0 examples according to its header"},
    {-1, 2, -1, 0, "-1 examples according to its header"},
    {-1, 2, 2000000000, 0, "2000000000 examples according to its header"},
    {-1, 2, 1, 0, "bytes behind the last of its 1 examples"},
    {0, 0, 65534, 0, "example 0: does not begin with the mark"},
    {1, 0, 28, 0, "example 0: is 26 bytes long, but says 28"},
    {2, 0, 1, 0, "example 0: has the index 1"},
    {3, 0, 2, 0, "example 0: label 2 of 2 choices"},
    {3, 0, 65535, 0, "example 0: label 65535 of 2 choices"},
    {4, 0, 1, 0, "example 0: label 1 of 1 choices; 2 to 32 are understood"},
    {4, 0, 33, 0, "example 0: label 1 of 33 choices"},
    {4, 0, 3, 0, "example 0: a choice of 65535 ids, but the file ends before"},
    {5, 0, 0, 0, "example 0: a context without an id"},
    {5, 0, 60000, 0, "example 0: a context of 60000 ids, but the file ends before"},
    {8, 0, 0, 0, "example 0: a choice without an id"},
    {6, 0, 100, 0, "example 0: id 100, outside the vocabulary of 100 (model.vocab_size)"},
    {SECOND + 9, 0, 65535, 0, "example 1: a choice of 65535 ids"},
    {SECOND + 13, 0, 65535, 0, "example 1: id 65535, outside"},
    {SECOND + 2, 0, 0, 0, "example 1: has the index 0"},
    {-1, 2, 2, -1, "example 1: a choice of 1 ids, but the file ends before"},
    {-1, 2, 2, -2 * 5, "example 1: the file ends in it: truncated"},
    {-1, 2, 2, 1, "1 bytes behind the last of its 2 examples"},
};

TEST(choice_file_that_is_broken_is_refused) {
    char err[ERR_LEN], hint[ERR_LEN];
    for (size_t i = 0; i < sizeof broken / sizeof *broken; i++) {
        Image image = image_make(1);
        if (broken[i].at >= 0)
            image.number[broken[i].at] = (uint32_t)broken[i].value;
        else
            image.header[broken[i].header_at] = (int32_t)broken[i].value;
        image.extra_bytes = broken[i].extra_bytes;
        ChoiceFile f;
        err[0] = hint[0] = 0;
        EXPECT(open_image(&f, &image, err, hint) == -1, "case %zu (%s) was read", i, broken[i].says);
        EXPECT(strstr(err, broken[i].says) && strstr(err, "choice.bin"), "case %zu: '%s' instead of '%s'", i, err,
               broken[i].says);
        EXPECT(hint[0] && !f.examples && !f.ids, "case %zu: hint '%s'", i, hint);
    }
}

TEST(choice_file_short_header_and_no_file) {
    char err[ERR_LEN], hint[ERR_LEN], path[TEST_PATH_LEN];
    const Image image = image_make(1);
    ChoiceFile f;
    test_write_bytes("short.bin", image.header, 900);
    EXPECT(choice_file_open(&f, test_path(path, "short.bin"), VOCAB, err, hint) == -1 &&
               strstr(err, "truncated header: 900 bytes"),
           "%s", err);
    test_write_bytes("empty.bin", "", 0);
    EXPECT(choice_file_open(&f, test_path(path, "empty.bin"), VOCAB, err, hint) == -1 && strstr(err, "magic 0 found"),
           "%s", err);
    EXPECT(choice_file_open(&f, test_path(path, "none.bin"), VOCAB, err, hint) == -1 && strstr(err, "none.bin"), "%s",
           err);
}

/* Whatever bytes a file has: it is read or refused, nothing else. */
TEST(choice_file_with_every_number_changed) {
    static const uint32_t values[] = {0, 1, 2, 32, 33, 99, 100, 1000, 32767, 32768, 65534, 65535};
    char err[ERR_LEN], hint[ERR_LEN];
    int n_read = 0, n_refused = 0;
    for (int at = 0; at < N_NUMBERS; at++) {
        for (size_t v = 0; v < sizeof values / sizeof *values; v++) {
            Image image = image_make(1);
            image.number[at] = values[v];
            ChoiceFile f;
            if (open_image(&f, &image, err, hint) == 0) {
                n_read++;
                choice_file_close(&f);
            } else {
                n_refused++;
            }
        }
    }
    EXPECT(n_read > 40 && n_refused > 200, "%d read, %d refused", n_read, n_refused);
}
