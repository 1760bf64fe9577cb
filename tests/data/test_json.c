/* Strict JSON: every message with its place, exact numbers, and what is kept in the tree. */
#include "data/json.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tests/test.h"

typedef struct {
    const char *text;
    size_t size; /* 0: strlen */
    const char *err, *hint;
} Refusal;

static const Refusal refusals[] = {
    /* What follows the value (DaveGamble/cJSON#570, #791, #17). */
    {"{\"a\": 1}}}}", 0, "t.json:1:9: extra text after the end", "one JSON value a file"},
    {"{\"a\": 1}\n{\"a\": 2}", 0, "t.json:2:1: extra text after the end", "one JSON value a file"},
    {"{\"a\": 1} words", 0, "t.json:1:10: extra text", ""},
    {"{\"a\": 1} // end", 0, "t.json:1:10: comment not allowed", "\"//\""},
    /* Equal keys (cJSON#696). */
    {"{\"lr\": 3e-4,\n \"lr\": 3e-5}", 0, "t.json:2:2: key \"lr\" is given twice, first at 1:2", "keep one"},
    {"{\"train\": {\"b\": 1, \"lr\": 3e-4, \"a\": 0, \"lr\": 3e-5}}", 0,
     "t.json:1:40: key \"lr\" is given twice, first at 1:20", ""},
    {"[{\"a\": 1, \"\\u0061\": 2}]", 0, "t.json:1:11: key \"a\" is given twice, first at 1:3", ""},
    /* Commas, comments, quotes, the end (cJSON#346). */
    {"{\"a\": 1,\n}", 0, "t.json:1:8: trailing comma", "remove the comma"},
    {"[1, 2, ]", 0, "t.json:1:6: trailing comma", "remove the comma"},
    {"{ // text\n\"a\": 1}", 0, "t.json:1:3: comment not allowed", "use a key \"//\""},
    {"{\"a\": /* x */ 1}", 0, "t.json:1:7: comment not allowed", ""},
    {"{\"a\": 1} # x", 0, "t.json:1:10: comment not allowed", ""},
    {"{\"a\": \"x,\n\"b\": 1}", 0, "t.json:1:7: this string does not end on its line", "closing quote"},
    {"{\"a\": \"x", 0, "t.json:1:7: this string does not end", "cut off"},
    {"{a: 1}", 0, "t.json:1:2: key without quotes", "\"a\""},
    {"{\"a\": cuda}", 0, "t.json:1:7: cuda has no quotes", "\"cuda\""},
    {"{\"a\": 'cuda'}", 0, "t.json:1:7: single quote where a value", "double"},
    {"{'a': 1}", 0, "t.json:1:2: single quote where a key", "double"},
    {"{\"a\": {\"b\": [1, 2", 0, "t.json:1:18: the text ends inside the list that opens at 1:13", "cut off"},
    {"{\"a\": [1, ", 0, "the text ends inside the list that opens at 1:7", "cut off"},
    {"{\"a\": [", 0, "the text ends inside the list that opens at 1:7", "cut off"},
    {"{\n  \"a\": 1", 0, "t.json:2:9: the text ends inside the object that opens at 1:1", "cut off"},
    {"{\"a\": 1, ", 0, "the text ends inside the object", "cut off"},
    {"{\"a\": ", 0, "the text ends inside the object", "cut off"},
    {"{\"a\"", 0, "the text ends inside the object", "cut off"},
    {"{", 0, "the text ends inside the object that opens at 1:1", "cut off"},
    {"{\"a\": 1\n \"b\": 2}", 0, "t.json:1:8: missing comma", "put a comma"},
    {"[1 2]", 0, "t.json:1:3: missing comma", ""},
    {"{\"a\" 1}", 0, "t.json:1:6: '1' where ':' after a key should be", ""},
    {"{\"a\", \"b\"}", 0, "t.json:1:2: a key without a value", "\"key\": value"},
    {"{\"a\": 1; \"b\": 2}", 0, "t.json:1:8: ';' where ',' or '}' should be", ""},
    {"[1; 2]", 0, "t.json:1:3: ';' where ',' or ']' should be", ""},
    {"{\"a\": }", 0, "t.json:1:7: '}' where a value should be", ""},
    {"{1: 2}", 0, "t.json:1:2: '1' where a key in quotes should be", ""},
    {"{\"a\": \xC3\xA9}", 0, "t.json:1:7: unexpected character where a value should be", ""},
    {"{\"\xC3\xA9\xC3\xA9\": x}", 0, "t.json:1:8: x has no quotes", ""}, /* columns count characters */
    /* Words and numbers. */
    {"{\"lr\": NaN}", 0, "t.json:1:8: NaN is not a JSON number", "finite"},
    {"{\"lr\": -Infinity}", 0, "t.json:1:8: -Infinity is not a JSON number", "finite"},
    {"{\"a\": True}", 0, "t.json:1:7: True is a word of Python", "true"},
    {"{\"a\": None}", 0, "None is a word of Python", "null"},
    {"{\"a\": +1}", 0, "a number must not start with '+'", "3e-4"},
    {"{\"a\": .5}", 0, "a number must not start with '.'", "0.5"},
    {"{\"a\": 5.}", 0, "a digit after its point", ""},
    {"{\"a\": 1e}", 0, "a digit in its exponent", ""},
    {"{\"a\": -}", 0, "a number needs a digit here", ""},
    {"{\"a\": 01}", 0, "must not start with 0", ""},
    {"{\"a\": 0x10}", 0, "t.json:1:7: 0x10 is not a number", ""},
    {"{\"a\": 1_000}", 0, "1_000 is not a number", ""},
    {"{\"a\": 1.2.3}", 0, "1.2.3 is not a number", ""},
    {"1.0000000000000000000000000000000000000000000000000000000000001", 0, "a number of 63 characters; at most 60", ""},
    /* Strings. */
    {"\"a\\q\"", 0, "t.json:1:3: unknown escape", "\\\\"},
    {"\"\\u12G4\"", 0, "unknown escape", ""},
    {"\"\\u0000\"", 0, "\\u0000 in a string", ""},
    {"\"\\uD800\"", 0, "half of a surrogate pair", ""},
    {"\"\\uDC00\\uD800\"", 0, "half of a surrogate pair", ""},
    {"\"a\tb\"", 0, "control character 0x09", "\\t"},
    {"\"\xFF\"", 0, "byte 0xFF is not UTF-8", "UTF-8"},
    {"\"\xC0\x80\"", 0, "byte 0xC0 is not UTF-8", ""},
    {"\"\xED\xA0\x80\"", 0, "byte 0xED is not UTF-8", ""},
    {"\"\xF4\x90\x80\x80\"", 0, "byte 0xF4 is not UTF-8", ""},
    {"\"\xE2\x82\"", 0, "byte 0xE2 is not UTF-8", ""},
    {"\"\xE2\x82", 0, "byte 0xE2 is not UTF-8", ""},
    /* No text at all (cJSON#290). */
    {"", 0, "t.json: the file is empty", "nothing was written"},
    {" \n\t", 0, "t.json: the file holds only white space", ""},
    {"\xEF\xBB\xBF", 0, "holds only white space", ""},
    {"\xFF\xFE{\0}\0", 6, "UTF-16 text (little-endian)", "UTF-8"},
    {"\xFE\xFF\0{\0}", 6, "UTF-16 text (big-endian)", "UTF-8"},
    {"{\0}\0", 4, "UTF-16 text (little-endian, without a mark)", ""},
    {"\0{\0}", 4, "UTF-16 text (big-endian, without a mark)", ""},
    {"\xFF\xFE\0\0{\0\0\0", 8, "UTF-32 text", ""},
    {"\x1F\x8B\x08\x00", 4, "gzip data", ""},
    {"\x28\xB5\x2F\xFD", 0, "zstd data", ""},
    {"PK\x03\x04", 0, "zip archive", ""},
    {"{\"a\": 1}\0", 9, "binary data (byte 0x00 at offset 8)", "text"},
    {"\x7F"
     "ELF\x02\x01",
     0, "binary data (byte 0x02 at offset 4)", ""},
};

/* An exact-length copy on the heap, so that reading past the end is seen by a sanitizer. */
static cJSON *parse_exact(const char *text, size_t size, char *err, char *hint, char *key) {
    char *copy = (char *)malloc(size ? size : 1);
    memcpy(copy, text, size);
    cJSON *root = json_parse(copy, size, "t.json", err, hint, key);
    free(copy);
    return root;
}

TEST(json_refuses_with_place_and_hint) {
    char err[ERR_LEN], hint[ERR_LEN];
    for (size_t i = 0; i < sizeof refusals / sizeof *refusals; i++) {
        const Refusal *x = &refusals[i];
        cJSON *root = parse_exact(x->text, x->size ? x->size : strlen(x->text), err, hint, NULL);
        EXPECT(!root, "accepted: %s", x->text);
        EXPECT(strstr(err, x->err), "%s\n  gives    %s\n  expected %s", x->text, err, x->err);
        EXPECT(strstr(hint, x->hint), "%s\n  hints    %s\n  expected %s", x->text, hint, x->hint);
        cJSON_Delete(root);
    }
}

TEST(json_accepts) {
    static const char *const texts[] = {
        "{}",
        "[]",
        "1",
        "-0",
        "0.5e-3",
        "true",
        "null",
        "\"\"",
        "\xEF\xBB\xBF{}",
        "\xEF\xBB\xBF 1",
        " { \"a\" : [ ] } \n",
        "{\"//\": 1, \"//\": 2, \"a\": 3}",
        "\"\\u00e9\\uD83D\\uDE00\\n\\/\"",
        "\"\xF0\x9F\x98\x80\"",
        "[[],{},[{}]]",
    };
    char err[ERR_LEN], hint[ERR_LEN];
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        cJSON *root = parse_exact(texts[i], strlen(texts[i]), err, hint, NULL);
        EXPECT(root, "%s: %s", texts[i], err);
        EXPECT(!err[0] && !hint[0], "%s", err);
        cJSON_Delete(root);
    }
}

TEST(json_depth_is_limited) {
    char err[ERR_LEN], hint[ERR_LEN], text[2 * JSON_DEPTH_MAX + 3];
    for (int extra = 0; extra < 2; extra++) {
        int depth = JSON_DEPTH_MAX + extra;
        memset(text, '[', (size_t)depth);
        memset(text + depth, ']', (size_t)depth);
        cJSON *root = parse_exact(text, 2 * (size_t)depth, err, hint, NULL);
        EXPECT((root != NULL) == (extra == 0), "depth %d", depth);
        if (extra) EXPECT(strstr(err, "t.json:1:65: nested deeper than 64 levels"), "%s", err);
        cJSON_Delete(root);
    }
}

TEST(json_keeps_lines_and_spellings) {
    char err[ERR_LEN], hint[ERR_LEN], text[96];
    const char *source = "\xEF\xBB\xBF{\n \"a\": 1.50,\n \"b\": [\n  \"x\",\n 14800000000000]}";
    cJSON *root = parse_exact(source, strlen(source), err, hint, NULL);
    REQUIRE(root, "%s", err);
    const cJSON *a = cJSON_GetObjectItem(root, "a"), *b = cJSON_GetObjectItem(root, "b");
    EXPECT_EQ(json_line(a), 2);
    EXPECT_EQ(json_line(b), 3);
    EXPECT_EQ(json_line(b->child->next), 5);
    EXPECT(strcmp(json_spelling(a), "1.50") == 0, "%s", json_spelling(a));
    EXPECT(strcmp(json_spelling(b), "") == 0, "a list has no spelling");
    EXPECT(strcmp(json_describe(a, text, sizeof text), "the number 1.50") == 0, "%s", text);
    EXPECT(strcmp(json_describe(b->child, text, sizeof text), "the string \"x\"") == 0, "%s", text);
    EXPECT(strcmp(json_describe(b, text, sizeof text), "a list") == 0, "%s", text);
    json_set_line(root, -3);
    EXPECT_EQ(json_line(b->child), -3);
    cJSON_Delete(root);
}

TEST(json_names_the_key_of_an_error) {
    char err[ERR_LEN], hint[ERR_LEN], key[JSON_PATH_LEN];
    const char *source = "{\"run\": {\"seed\": 1}, \"train\": {\"steps\": 2, \"lr\": NaN}}";
    EXPECT(!parse_exact(source, strlen(source), err, hint, key), "NaN accepted");
    EXPECT(strcmp(key, "train.lr") == 0, "%s", key);
}

TEST(json_exact_integers) {
    static const struct {
        const char *text;
        JsonInteger kind;
        bool negative;
        uint64_t magnitude;
    } numbers[] = {
        {"0", JSON_INTEGER_EXACT, false, 0},
        {"-0.0e5", JSON_INTEGER_EXACT, false, 0},
        {"12", JSON_INTEGER_EXACT, false, 12},
        {"-12", JSON_INTEGER_EXACT, true, 12},
        {"14800000000000", JSON_INTEGER_EXACT, false, 14800000000000u},
        {"9007199254740993", JSON_INTEGER_EXACT, false, 9007199254740993u},
        {"18446744073709551615", JSON_INTEGER_EXACT, false, UINT64_MAX},
        {"18446744073709551616", JSON_INTEGER_TOO_LARGE, false, 0},
        {"99999999999999999999", JSON_INTEGER_TOO_LARGE, false, 0},
        {"100e9", JSON_INTEGER_EXACT, false, 100000000000u},
        {"1.5e3", JSON_INTEGER_EXACT, false, 1500},
        {"1.50", JSON_INTEGER_FRACTION, false, 0},
        {"2.00", JSON_INTEGER_EXACT, false, 2},
        {"1000e-3", JSON_INTEGER_EXACT, false, 1},
        {"1e-3", JSON_INTEGER_FRACTION, false, 0},
        {"0.1e1", JSON_INTEGER_EXACT, false, 1},
        {"1e999", JSON_INTEGER_TOO_LARGE, false, 0},
        {"0e999", JSON_INTEGER_EXACT, false, 0},
        {"1e-999999999999999999999", JSON_INTEGER_FRACTION, false, 0},
        {"1e999999999999999999999", JSON_INTEGER_TOO_LARGE, false, 0},
        {"1.8446744073709551615E+19", JSON_INTEGER_EXACT, false, UINT64_MAX},
    };
    char err[ERR_LEN], hint[ERR_LEN];
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
        cJSON *item = parse_exact(numbers[i].text, strlen(numbers[i].text), err, hint, NULL);
        REQUIRE(item, "%s", err);
        bool negative;
        uint64_t magnitude;
        JsonInteger kind = json_integer(item, &negative, &magnitude);
        EXPECT(kind == numbers[i].kind, "%s is of kind %d", numbers[i].text, (int)kind);
        if (kind == JSON_INTEGER_EXACT)
            EXPECT(negative == numbers[i].negative && magnitude == numbers[i].magnitude, "%s", numbers[i].text);
        cJSON_Delete(item);
    }
}

static int int64_of(const char *text, int64_t *value) {
    char err[ERR_LEN], hint[ERR_LEN];
    cJSON *item = parse_exact(text, strlen(text), err, hint, NULL);
    int result = json_int64(item, value);
    cJSON_Delete(item);
    return result;
}

TEST(json_int64_limits) {
    int64_t x = 0;
    EXPECT(int64_of("9223372036854775807", &x) == 0 && x == INT64_MAX, "%lld", (long long)x);
    EXPECT(int64_of("-9223372036854775808", &x) == 0 && x == INT64_MIN, "%lld", (long long)x);
    EXPECT(int64_of("9223372036854775808", &x) == -1, "one above the limit");
    EXPECT(int64_of("-9223372036854775809", &x) == -1, "one below the limit");
    EXPECT(int64_of("\"8\"", &x) == -1, "a string is no number");
}

TEST(json_doubles_are_finite) {
    static const struct {
        const char *text;
        int result;
        double value;
    } numbers[] = {
        {"1e999", -1, 0},        {"-1e999", -1, 0}, {"1e-999", -1, 0}, {"-0.00001e-400", -1, 0},
        {"0e999", 0, 0},         {"0.000", 0, 0},   {"3e-4", 0, 3e-4}, {"5e-324", 0, 5e-324},
        {"1.7e308", 0, 1.7e308}, {"null", -1, 0},   {"\"1\"", -1, 0},
    };
    char err[ERR_LEN], hint[ERR_LEN];
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
        cJSON *item = parse_exact(numbers[i].text, strlen(numbers[i].text), err, hint, NULL);
        REQUIRE(item, "%s", err);
        double x = 0;
        int result = json_double(item, &x);
        EXPECT(result == numbers[i].result, "%s gives %d", numbers[i].text, result);
        if (result == 0) EXPECT(x == numbers[i].value, "%s gives %g", numbers[i].text, x);
        cJSON_Delete(item);
    }
}

TEST(json_writes_what_it_reads) {
    static const double values[] = {0,    1,    -1,   0.1,     1.0 / 3, 3e-4,         5e-324, 1.7976931348623157e308,
                                    1e15, 1e14, 1e-7, 14.8e12, 2.446,   123456789.125};
    char *text = NULL, err[ERR_LEN], hint[ERR_LEN];
    size_t size;
    const char *special = "a\"b\\c\n\t\x01\x7F\xC3\xA9/";
    FILE *out = open_memstream(&text, &size);
    fputc('[', out);
    json_write_string(out, special);
    for (size_t i = 0; i < sizeof values / sizeof *values; i++) {
        fputc(',', out);
        json_write_double(out, values[i]);
    }
    fputc(']', out);
    fclose(out);
    cJSON *root = parse_exact(text, size, err, hint, NULL);
    REQUIRE(root, "%s in %s", err, text);
    EXPECT(strcmp(root->child->valuestring, special) == 0, "%s", root->child->valuestring);
    const cJSON *item = root->child->next;
    for (size_t i = 0; i < sizeof values / sizeof *values; i++, item = item->next) {
        double x = 0;
        EXPECT(json_double(item, &x) == 0 && x == values[i], "%.17g came back as %.17g", values[i], x);
    }
    EXPECT(strstr(text, ",14800000000000,"), "whole numbers have no exponent: %s", text);
    cJSON_Delete(root);
    free(text);
}

/* Many equal-length keys: the search for equal ones is a sort, and names the right pair. */
TEST(json_finds_equal_keys_among_many) {
    enum { N = 20000 };
    char *text = NULL, err[ERR_LEN], hint[ERR_LEN];
    size_t size;
    FILE *out = open_memstream(&text, &size);
    fputc('{', out);
    for (int i = 0; i < N; i++) fprintf(out, "\"k%06d\": %d,\n", i, i);
    fputs("\"k012345\": 0}", out);
    fclose(out);
    EXPECT(!parse_exact(text, size, err, hint, NULL), "accepted");
    EXPECT(strstr(err, "t.json:20001:1: key \"k012345\" is given twice, first at 12346:1"), "%s", err);
    free(text);
}

TEST(json_load_names_the_file) {
    char path[512], err[ERR_LEN], hint[ERR_LEN];
    snprintf(path, sizeof path, "%s/x.json", test_tmp_dir());
    EXPECT(!json_load(path, 100, err, hint) && strstr(err, path), "%s", err);
    FILE *f = fopen(path, "wb");
    REQUIRE(f, "%s", path);
    fputs("{\"a\": 1}", f);
    fclose(f);
    cJSON *root = json_load(path, 100, err, hint);
    EXPECT(root, "%s", err);
    cJSON_Delete(root);
    EXPECT(!json_load(path, 7, err, hint) && strstr(err, path), "8 bytes where 7 are allowed");
}
