/* Tests of data/utf8.h. */
#include "data/utf8.h"

#include <string.h>

#include "tests/test.h"

TEST(utf8_takes_valid_characters_and_no_others) {
    for (uint32_t c = 0; c < 0x110000; c++) {
        if (c >= 0xD800 && c < 0xE000) continue;
        char bytes[4];
        uint32_t back;
        size_t n = utf8_put(bytes, c);
        REQUIRE(utf8_next(bytes, n, &back) == n && back == c, "U+%04X became U+%04X", c, back);
    }
    static const char *const invalid[] = {"\x80",
                                          "\xBF",
                                          "\xC0\x80",
                                          "\xC1\xBF",
                                          "\xC3",
                                          "\xE0\x9F\xBF",
                                          "\xED\xA0\x80",
                                          "\xE2\x82",
                                          "\xF0\x8F\xBF\xBF",
                                          "\xF4\x90\x80\x80",
                                          "\xF5\x80\x80\x80",
                                          "\xFF",
                                          "\xC3"
                                          "a",
                                          "\xF0\x9F\x91"
                                          "a"};
    for (size_t i = 0; i < sizeof invalid / sizeof invalid[0]; i++) {
        uint32_t c;
        EXPECT(utf8_next(invalid[i], strlen(invalid[i]), &c) == 1 && c == UTF8_INVALID, "case %zu is U+%04X", i, c);
    }
}

/* Puts the bytes in steps of `step`. */
static size_t stream_all(const char *bytes, size_t n, size_t step, char *out) {
    Utf8Stream s = {0};
    size_t n_out = 0;
    for (size_t at = 0; at < n; at += step)
        n_out += utf8_stream_put(&s, bytes + at, n - at < step ? n - at : step, out + n_out);
    return n_out + utf8_stream_end(&s, out + n_out);
}

TEST(utf8_stream_holds_back_partial_characters) {
    Utf8Stream s = {0};
    char out[64];
    EXPECT_EQ(utf8_stream_put(&s, "a\xF0\x9F", 3, out), 1);
    EXPECT_EQ(utf8_stream_put(&s, "\x91", 1, out), 0);
    EXPECT_EQ(utf8_stream_put(&s, "\x8D", 1, out), 4);
    EXPECT(memcmp(out, "\xF0\x9F\x91\x8D", 4) == 0, "the character is put together");
    EXPECT_EQ(utf8_stream_end(&s, out), 0);
    static const char mixed[] = "x\xC3\xA9\xFFy\xE2\x82z\xF0\x9F\x91\x8D\xED\xA0\x80!\xE2\x82";
    static const char want[] = "x\xC3\xA9\xEF\xBF\xBDy\xEF\xBF\xBD\xEF\xBF\xBDz\xF0\x9F\x91\x8D\xEF\xBF\xBD\xEF\xBF\xBD"
                               "\xEF\xBF\xBD!\xEF\xBF\xBD\xEF\xBF\xBD";
    for (size_t step = 1; step < sizeof mixed; step++) {
        char text[UTF8_STREAM_OUT_MAX(sizeof mixed)];
        size_t n = stream_all(mixed, sizeof mixed - 1, step, text);
        EXPECT(n == sizeof want - 1 && memcmp(text, want, n) == 0, "steps of %zu bytes: %.*s", step, (int)n, text);
    }
}
