/* See pretokenize.h. Each function tries the alternatives of its expression in their order; all return the end of the
 * match, or `from` where there is none. */
#include "pretokenize.h"

#include <string.h>

#include "kernels/base/check.h"
#include "unicode_classes.h"
#include "utf8.h"

enum {
    LETTER = 1 << UNICODE_LETTER,
    NUMBER = 1 << UNICODE_NUMBER,
    MARK = 1 << UNICODE_MARK,
    PUNCT = 1 << UNICODE_PUNCT,
    SYMBOL = 1 << UNICODE_SYMBOL,
    SPACE = 1 << UNICODE_SPACE,
    ANY = (1 << (UNICODE_SPACE + 1)) - 1
};

/* The class bit of the character at text[at], at < end, and the position behind it. */
static int class_at(const char *text, size_t at, size_t end, size_t *next) {
    uint32_t code_point;
    *next = at + utf8_next(text + at, end - at, &code_point);
    return 1 << unicode_class(code_point);
}

/* The end of the run of characters of the classes in `mask`. */
static size_t run_end(const char *text, size_t at, size_t end, int mask) {
    size_t next;
    while (at < end && (class_at(text, at, end, &next) & mask)) at = next;
    return at;
}

static bool is_newline(char c) {
    return c == '\n' || c == '\r';
}

static bool is_ascii_letter(char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
}

/* \s+(?!\S)|\s+ : white space, less its last character if a word follows and something is left. */
static size_t match_space(const char *text, size_t from, size_t end) {
    size_t at = from, last = from, next;
    while (at < end && (class_at(text, at, end, &next) & SPACE)) {
        last = at;
        at = next;
    }
    return at < end && last > from ? last : at;
}

/* 's|'t|'re|'ve|'m|'ll|'d */
static size_t match_contraction(const char *text, size_t from, size_t end) {
    static const char *const endings[] = {"s", "t", "re", "ve", "m", "ll", "d"};
    if (text[from] != '\'') return from;
    for (size_t i = 0; i < sizeof endings / sizeof endings[0]; i++) {
        size_t length = strlen(endings[i]);
        if (end - from > length && memcmp(text + from + 1, endings[i], length) == 0) return from + 1 + length;
    }
    return from;
}

static size_t match_gpt2(const char *text, size_t from, size_t end) {
    size_t to = match_contraction(text, from, end);
    if (to > from) return to;
    size_t word = text[from] == ' ' && from + 1 < end ? from + 1 : from, next;
    int class = class_at(text, word, end, &next);
    if (class & SPACE) return match_space(text, from, end);
    int mask = class & (LETTER | NUMBER) ? class : ANY & ~(SPACE | LETTER | NUMBER);
    return run_end(text, word, end, mask);
}

/* [^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+ */
static size_t match_deepseek_word(const char *text, size_t from, size_t end) {
    size_t next;
    int class = class_at(text, from, end, &next);
    if (!(class & (LETTER | PUNCT | SYMBOL)) && !is_newline(text[from])) {
        size_t to = run_end(text, next, end, LETTER | MARK);
        if (to > next) return to;
    }
    return run_end(text, from, end, LETTER | MARK);
}

/* \s*[\r\n]+ : white space up to its last line end. */
static size_t match_lines(const char *text, size_t from, size_t end) {
    size_t to = run_end(text, from, end, SPACE);
    while (to > from && !is_newline(text[to - 1])) to--;
    return to;
}

static size_t match_deepseek(const char *text, size_t from, size_t end) {
    if (strchr("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~", text[from]) && text[from]) {
        size_t to = from + 1;
        while (to < end && is_ascii_letter(text[to])) to++;
        if (to > from + 1) return to;
    }
    size_t to = match_deepseek_word(text, from, end);
    if (to > from) return to;
    size_t sign = text[from] == ' ' ? from + 1 : from;
    to = run_end(text, sign, end, PUNCT | SYMBOL);
    if (to > sign) {
        while (to < end && is_newline(text[to])) to++;
        return to;
    }
    to = match_lines(text, from, end);
    return to > from ? to : match_space(text, from, end);
}

static bool is_cjk(const char *text, size_t at, size_t end) {
    uint32_t c;
    utf8_next(text + at, end - at, &c);
    return (c >= 0x4E00 && c <= 0x9FA5) || (c >= 0x3040 && c <= 0x30FF);
}

/* The end of the piece of the first two cuts that starts at `from`, where no number stands. */
static size_t deepseek_segment_end(const char *text, size_t from, size_t end) {
    bool cjk = is_cjk(text, from, end);
    size_t at = from, next;
    while (at < end && !(class_at(text, at, end, &next) & NUMBER) && is_cjk(text, at, end) == cjk) at = next;
    return at;
}

static size_t deepseek_next(Pretokenizer *p) {
    size_t from = p->position, next;
    if (from >= p->segment_end) {
        size_t digits = from;
        for (int i = 0; i < 3 && digits < p->n && (class_at(p->text, digits, p->n, &next) & NUMBER); i++) digits = next;
        if (digits > from) return digits;
        p->segment_end = deepseek_segment_end(p->text, from, p->n);
    }
    size_t to = match_deepseek(p->text, from, p->segment_end);
    if (to > from) return to;
    /* Characters that nothing matches are one piece up to the next match. */
    do {
        class_at(p->text, to, p->segment_end, &next);
        to = next;
    } while (to < p->segment_end && match_deepseek(p->text, to, p->segment_end) == to);
    return to;
}

Pretokenizer pretokenizer_make(PretokenizePattern pattern, const char *text, size_t n) {
    return (Pretokenizer){pattern, text, n, 0, 0};
}

bool pretokenizer_next(Pretokenizer *p, const char **piece, size_t *piece_len) {
    if (p->position >= p->n) return false;
    size_t to = p->pattern == PRETOKENIZE_GPT2 ? match_gpt2(p->text, p->position, p->n) : deepseek_next(p);
    CHECK(to > p->position && to <= p->n, "piece %zu..%zu of %zu bytes", p->position, to, p->n);
    *piece = p->text + p->position;
    *piece_len = to - p->position;
    p->position = to;
    return true;
}
