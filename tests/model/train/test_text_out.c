/* What a generated text looks like on its way out: whole characters, colours that end, the table of experts. */
#include "model/train/text_out.h"

#include <cjson/cJSON.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/base/file.h"
#include "tests/test.h"

/* GPT-2's, the part of it that the golden texts need: emoji and Arabic letters are several tokens each. */
static Tokenizer *gpt2(void) {
    char err[ERR_LEN] = "", *file;
    size_t size;
    REQUIRE(file_read_all(&file, &size, "tests/golden/tokenizer_gpt2.json", 1 << 20, err) == 0, "%s", err);
    cJSON *root = cJSON_ParseWithLength(file, size);
    char *json = cJSON_PrintUnformatted(cJSON_GetObjectItem(root, "tokenizer"));
    Tokenizer *t;
    REQUIRE(json && tokenizer_parse(&t, json, strlen(json), "gpt2", err) == 0, "%s", err);
    free(json);
    cJSON_Delete(root);
    free(file);
    return t;
}

typedef struct {
    char *text;
    size_t size;
    FILE *file;
} Memory;

static Memory *memory_open(void) {
    static Memory m;
    m.file = open_memstream(&m.text, &m.size);
    REQUIRE(m.file, "no memory stream");
    return &m;
}

static void memory_close(Memory *m) {
    fclose(m->file);
    free(m->text);
}

static void expect_whole_characters(const char *text, size_t n) {
    uint32_t code_point;
    for (size_t i = 0; i < n;) {
        const size_t length = utf8_next(text + i, n - i, &code_point);
        EXPECT(code_point != UTF8_INVALID, "byte %zu of \"%s\"", i, text);
        i += length;
    }
}

TEST(text_out_prints_whole_characters) {
    static const char text[] = "a\U0001f600\U0001f468\u200d\U0001f469 \u0645\u0631\u062d\u0628\u0627 \u216b!";
    Tokenizer *t = gpt2();
    int32_t ids[64];
    const int64_t n = tokenizer_encode(t, text, strlen(text), true, ids, 64);
    REQUIRE(n > 14 && n <= 64, "%lld tokens", (long long)n);
    Memory *m = memory_open();
    TextOut out = text_out_make(m->file, t);
    int n_silent = 0;
    for (int64_t i = 0; i < n; i++) {
        const size_t before = m->size;
        text_out_token(&out, ids[i], -1);
        n_silent += m->size == before;
        expect_whole_characters(m->text, m->size);
        EXPECT(strncmp(m->text, text, m->size) == 0, "after token %d: \"%s\"", (int)i, m->text);
    }
    EXPECT(n_silent >= 3, "only %d tokens ended inside a character", n_silent);
    text_out_token(&out, 50256, -1); /* special: not a part of the text */
    text_out_end(&out);
    EXPECT(m->size == strlen(text) + 1 && m->text[m->size - 1] == '\n', "\"%s\"", m->text);

    text_out_token(&out, ids[1], -1); /* the text ends inside a character */
    text_out_end(&out);
    expect_whole_characters(m->text, m->size);
    EXPECT(strstr(m->text, "\uFFFD\n"), "\"%s\"", m->text);
    memory_close(m);
    tokenizer_free(t);
}

/* The text without its escapes; counts those that start and end a colour. */
static char *without_colours(const char *text, int *n_on, int *n_off) {
    char *plain = malloc(strlen(text) + 1), *to = plain;
    REQUIRE(plain, "no memory");
    *n_on = *n_off = 0;
    while (*text) {
        if (*text != '\033') {
            *to++ = *text++;
            continue;
        }
        *(strncmp(text, "\033[0m", 4) == 0 ? n_off : n_on) += 1;
        text += strcspn(text, "m") + 1;
    }
    *to = 0;
    return plain;
}

static void put(TextOut *out, const char *const *tokens, const int *experts, int n) {
    for (int i = 0; i < n; i++) {
        int32_t id;
        REQUIRE(tokenizer_encode(out->tokenizer, tokens[i], strlen(tokens[i]), true, &id, 1) == 1, "%s", tokens[i]);
        text_out_token(out, id, experts[i]);
    }
}

TEST(text_out_shows_experts) {
    static const char *const tokens[] = {"<|endoftext|>", "\n", "a", "b", "a", "\n", "c", "\x01", "a"};
    static const int experts[] = {7, 3, 7, 3, 7, 3, 7, 0, -1};
    static const char want[] = "legend\n\nab a\nc\x01"
                               "a\n"
                               "3 of 8 experts came first for 8 tokens\n"
                               "expert    7      4 tokens  50.0 %  'a' '<|endoftext|>' 'c'\n"
                               "expert    3      3 tokens  37.5 %  '\\n' 'b'\n"
                               "expert    0      1 tokens  12.5 %  '\\x01'\n";
    Tokenizer *t = gpt2();
    for (int coloured = 0; coloured < 2; coloured++) {
        unsetenv("NO_COLOR");
        if (coloured)
            setenv("CLICOLOR_FORCE", "1", 1);
        else
            unsetenv("CLICOLOR_FORCE"); /* a memory stream is no terminal */
        Memory *m = memory_open();
        TextOut out = text_out_make(m->file, t);
        text_out_show_experts(&out, 8, 9, "legend");
        put(&out, tokens, experts, 4);
        put(&out, (const char *const[]){" "}, (const int[]){-1}, 1);
        put(&out, tokens + 4, experts + 4, 5);
        text_out_end(&out);
        text_out_table(&out, 12);
        int n_on, n_off;
        char *plain = without_colours(m->text, &n_on, &n_off);
        EXPECT(strcmp(plain, want) == 0, "\"%s\"", plain);
        EXPECT(n_on == n_off && n_on == (coloured ? 10 : 0), "%d colours begin, %d end", n_on, n_off);
        free(plain);
        memory_close(m);
    }
    setenv("NO_COLOR", "1", 1);
    Memory *m = memory_open();
    TextOut out = text_out_make(m->file, t);
    text_out_show_experts(&out, 8, 1, "legend");
    put(&out, tokens + 2, experts + 2, 2); /* more than there is room for: printed, not counted */
    text_out_table(&out, 12);
    EXPECT(!strchr(m->text, '\033') && strstr(m->text, "legend\nab1 of 8 experts came first for 1 tokens\n"), "\"%s\"",
           m->text);
    memory_close(m);
    tokenizer_free(t);
}

/* Experts next to each other, and any two of a small model, have colours of their own. */
TEST(text_out_colours_differ) {
    static const char *const token[] = {"a"};
    Tokenizer *t = gpt2();
    setenv("CLICOLOR_FORCE", "1", 1);
    unsetenv("NO_COLOR");
    bool is_used[256] = {false};
    for (int expert = 0; expert < 64; expert++) {
        Memory *m = memory_open();
        TextOut out = text_out_make(m->file, t);
        text_out_show_experts(&out, 64, 1, "");
        put(&out, token, &expert, 1);
        int colour = -1;
        EXPECT(sscanf(m->text, "\n\033[38;5;%dma\033[0m", &colour) == 1 && colour >= 16 && colour < 232, "\"%s\"",
               m->text);
        EXPECT(!is_used[colour], "expert %d has the colour %d of another", expert, colour);
        is_used[colour] = true;
        text_out_table(&out, 1);
        memory_close(m);
    }
    tokenizer_free(t);
}
