/* Tests of data/pretokenize.h and data/unicode_classes.h. */
#include "data/pretokenize.h"

#include <string.h>

#include "data/unicode_classes.h"
#include "data/utf8.h"
#include "tests/test.h"

/* Pieces joined by '|', as the tokenizers library 0.23 cuts them (Unicode 16). */
static const struct {
    PretokenizePattern pattern;
    const char *pieces;
} golden_pieces[] = {
    {PRETOKENIZE_GPT2, "I|'m| don|'t| we|'ll| they|'ve| you|'d| it|'s| '|S| '|LL| x|'re"},
    {PRETOKENIZE_GPT2, "Hello| | world|  | !"},
    {PRETOKENIZE_GPT2, " | two|\n\n| three| \n"},
    {PRETOKENIZE_GPT2, "a|1|b|22| c|333| | 4444| \331\243\302\275"},
    {PRETOKENIZE_GPT2, "\303\251t\303\251|\302\240|\344\270\255\346\226\207|\343\200\200|x"},
    {PRETOKENIZE_GPT2, "!?...| ...|a| --|b"},
    {PRETOKENIZE_GPT2, "tab|\t|here|\r\n\r|\n|end|  "},
    {PRETOKENIZE_GPT2, "\360\237\221\215\342\200\215\360\237\221\215| e|\314\201|x"},
    {PRETOKENIZE_GPT2, "'"},
    {PRETOKENIZE_GPT2, "   "},
    {PRETOKENIZE_GPT2, "''|s| '|t"},
    {PRETOKENIZE_GPT2, "12345678|\344\270\255\343\201\202|\343\203\273|\343\202\253|1|a"},
    {PRETOKENIZE_GPT2, "#|include| <|stdio|.|h|>|\n|\t|int| x|=|1|;|\n"},
    {PRETOKENIZE_GPT2, "\001\002|a|\003| \004\342\200\213|1"},
    {PRETOKENIZE_GPT2, "a|.|b|,|C| _|d| e|-|f|\n\n|\n|g"},
    {PRETOKENIZE_DEEPSEEK_V3, "I|'m| don|'t| we|'ll| they|'ve| you|'d| it|'s| '|S| '|LL| x|'re"},
    {PRETOKENIZE_DEEPSEEK_V3, "Hello| | world|  | !"},
    {PRETOKENIZE_DEEPSEEK_V3, " | two|\n\n| three| \n"},
    {PRETOKENIZE_DEEPSEEK_V3, "a|1|b|22| c|333|  |444|4| |\331\243\302\275"},
    {PRETOKENIZE_DEEPSEEK_V3, "\303\251t\303\251|\302\240|\344\270\255\346\226\207|\343\200\200x"},
    {PRETOKENIZE_DEEPSEEK_V3, "!?...| ...|a| --|b"},
    {PRETOKENIZE_DEEPSEEK_V3, "tab|\there|\r\n\r\n|end|  "},
    {PRETOKENIZE_DEEPSEEK_V3, "\360\237\221\215|\342\200\215|\360\237\221\215| e\314\201x"},
    {PRETOKENIZE_DEEPSEEK_V3, "'"},
    {PRETOKENIZE_DEEPSEEK_V3, "   "},
    {PRETOKENIZE_DEEPSEEK_V3, "''|s| '|t"},
    {PRETOKENIZE_DEEPSEEK_V3, "123|456|78|\344\270\255\343\201\202|\343\203\273|\343\202\253|1|a"},
    {PRETOKENIZE_DEEPSEEK_V3, "#include| <|stdio|.h|>\n|\tint| x|=|1|;\n"},
    {PRETOKENIZE_DEEPSEEK_V3, "\001|\002a|\003| |\004\342\200\213|1"},
    {PRETOKENIZE_DEEPSEEK_V3, "a|.b|,C| _|d| e|-f|\n\n\n|g"},
};

TEST(pretokenizer_cuts_like_the_library) {
    for (size_t k = 0; k < sizeof golden_pieces / sizeof golden_pieces[0]; k++) {
        const char *want = golden_pieces[k].pieces;
        char text[256], got[256];
        size_t n_text = 0, n_got = 0;
        for (const char *c = want; *c; c++)
            if (*c != '|') text[n_text++] = *c;
        Pretokenizer p = pretokenizer_make(golden_pieces[k].pattern, text, n_text);
        const char *piece;
        size_t n;
        while (pretokenizer_next(&p, &piece, &n)) {
            if (n_got) got[n_got++] = '|';
            memcpy(got + n_got, piece, n);
            n_got += n;
        }
        got[n_got] = 0;
        EXPECT(strcmp(got, want) == 0, "pattern %d: got \"%s\", expected \"%s\"", golden_pieces[k].pattern, got, want);
    }
}

TEST(unicode_classes_of_some_characters) {
    static const struct {
        uint32_t code_point;
        UnicodeClass class;
    } cases[] = {
        {'a', UNICODE_LETTER},     {'0', UNICODE_NUMBER},    {'!', UNICODE_PUNCT},      {'+', UNICODE_SYMBOL},
        {' ', UNICODE_SPACE},      {'\t', UNICODE_SPACE},    {0x85, UNICODE_SPACE},     {0x1C, UNICODE_OTHER},
        {0xBD, UNICODE_NUMBER},    {0x2167, UNICODE_NUMBER}, {0x4E2D, UNICODE_LETTER},  {0x301, UNICODE_MARK},
        {0x200B, UNICODE_OTHER},   {0x3000, UNICODE_SPACE},  {0x1F44D, UNICODE_SYMBOL}, {0, UNICODE_OTHER},
        {0x323AF, UNICODE_LETTER}, {0xE01EF, UNICODE_MARK},  {0xE01F0, UNICODE_OTHER},  {UTF8_INVALID, UNICODE_OTHER}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        EXPECT(unicode_class(cases[i].code_point) == cases[i].class, "U+%04X is %d", cases[i].code_point,
               unicode_class(cases[i].code_point));
}
