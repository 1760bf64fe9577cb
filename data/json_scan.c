/* See json.h. The grammar of RFC 8259 as a recursive scanner that builds nothing: it records where each value starts,
 * and spends its effort on saying what is wrong: every refusal has a line, a column and, where the mistake is a common
 * one (trailing comma, comment, missing quote, Python's words, a file cut off), advice. */
#include "json.h"

#include <ctype.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/base/check.h"

typedef struct {
    const char *text, *name;
    size_t size, at;
    int depth;
    JsonMark *marks;
    size_t n_marks, marks_max;
    char path[JSON_PATH_LEN]; /* of the value being read */
    char *err, *hint;
} Scanner;

void json_position(const char *text, size_t offset, int *line, int *column) {
    *line = *column = 1;
    for (size_t i = 0; i < offset; i++) {
        if (text[i] == '\n') {
            ++*line;
            *column = 1;
        } else if (((unsigned char)text[i] & 0xC0) != 0x80) { /* continuation bytes of UTF-8 have no column */
            ++*column;
        }
    }
}

PRINTF_LIKE(4, 5) static int refuse(Scanner *s, size_t offset, const char *hint, const char *fmt, ...) {
    char what[ERR_LEN / 2];
    va_list args;
    va_start(args, fmt);
    vsnprintf(what, sizeof what, fmt, args);
    va_end(args);
    int line, column;
    json_position(s->text, offset, &line, &column);
    if (hint) snprintf(s->hint, ERR_LEN, "%s", hint);
    return err_set(s->err, "%s:%d:%d: %s", s->name, line, column, what);
}

/* ------------------------------------------------------------------------------------------------ what is no JSON */

static const char *found_encoding(const unsigned char *t, size_t size) {
    if (size >= 4 && (memcmp(t, "\xFF\xFE\0\0", 4) == 0 || memcmp(t, "\0\0\xFE\xFF", 4) == 0)) return "UTF-32 text";
    if (size >= 2 && t[0] == 0xFF && t[1] == 0xFE) return "UTF-16 text (little-endian)";
    if (size >= 2 && t[0] == 0xFE && t[1] == 0xFF) return "UTF-16 text (big-endian)";
    if (size >= 4 && t[0] && !t[1] && t[2] && !t[3]) return "UTF-16 text (little-endian, without a mark)";
    if (size >= 4 && !t[0] && t[1] && !t[2] && t[3]) return "UTF-16 text (big-endian, without a mark)";
    if (size >= 2 && t[0] == 0x1F && t[1] == 0x8B) return "gzip data";
    if (size >= 4 && memcmp(t, "\x28\xB5\x2F\xFD", 4) == 0) return "zstd data";
    if (size >= 4 && memcmp(t, "PK\x03\x04", 4) == 0) return "a zip archive";
    return NULL;
}

int json_check_text(const char *text, size_t size, const char *name, char *err, char *hint) {
    const unsigned char *t = (const unsigned char *)text;
    const char *found = found_encoding(t, size);
    if (found) {
        snprintf(hint, ERR_LEN, "save the file as plain UTF-8 text");
        return err_set(err, "%s: this is %s, not JSON in UTF-8", name, found);
    }
    size_t start = size >= 3 && memcmp(t, "\xEF\xBB\xBF", 3) == 0 ? 3 : 0, i = start;
    while (i < size && strchr(" \t\r\n", t[i]) && t[i]) i++;
    if (i == size) {
        snprintf(hint, ERR_LEN, "a JSON object is expected; nothing was written here");
        return err_set(err, size == 0 ? "%s: the file is empty" : "%s: the file holds only white space", name);
    }
    for (; i < size; i++) {
        if (t[i] >= 0x20 || t[i] == '\t' || t[i] == '\n' || t[i] == '\r') continue;
        snprintf(hint, ERR_LEN, "a JSON file is text; is this the right file?");
        return err_set(err, "%s: this is binary data (byte 0x%02X at offset %zu), not JSON", name, t[i], i);
    }
    return 0;
}

/* --------------------------------------------------------------------------------------------------------- strings */

/* Length of the UTF-8 sequence at t, 0 if there is none: no overlong forms, no surrogates, nothing above U+10FFFF. */
static size_t utf8_length(const unsigned char *t, size_t left) {
    static const uint32_t smallest[5] = {0, 0, 0x80, 0x800, 0x10000};
    size_t n = t[0] < 0x80 ? 1 : (t[0] & 0xE0) == 0xC0 ? 2 : (t[0] & 0xF0) == 0xE0 ? 3 : (t[0] & 0xF8) == 0xF0 ? 4 : 0;
    if (n <= 1 || n > left) return n == 1;
    uint32_t point = t[0] & (0x7Fu >> n);
    for (size_t i = 1; i < n; i++) {
        if ((t[i] & 0xC0) != 0x80) return 0;
        point = point << 6 | (t[i] & 0x3F);
    }
    return point < smallest[n] || point > 0x10FFFF || (point >= 0xD800 && point <= 0xDFFF) ? 0 : n;
}

/* The four digits of a \u escape whose backslash is at `at`; -1 if it is none. */
static int unicode_escape(const Scanner *s, size_t at) {
    if (at + 6 > s->size || s->text[at] != '\\' || s->text[at + 1] != 'u') return -1;
    int value = 0;
    for (size_t i = at + 2; i < at + 6; i++) {
        unsigned char ch = (unsigned char)s->text[i];
        if (!isxdigit(ch)) return -1;
        value = value * 16 + (isdigit(ch) ? ch - '0' : tolower(ch) - 'a' + 10);
    }
    return value;
}

static int scan_escape(Scanner *s) {
    size_t at = s->at;
    if (at + 1 < s->size && s->text[at + 1] && strchr("\"\\/bfnrt", s->text[at + 1])) {
        s->at += 2;
        return 0;
    }
    int unit = unicode_escape(s, at);
    if (unit < 0) return refuse(s, at, "write a backslash as \\\\", "unknown escape in a string");
    if (unit == 0) return refuse(s, at, NULL, "\\u0000 in a string");
    s->at += 6;
    if (unit < 0xD800 || unit > 0xDFFF) return 0;
    int low = unit < 0xDC00 ? unicode_escape(s, s->at) : -1;
    if (low < 0xDC00 || low > 0xDFFF) return refuse(s, at, NULL, "half of a surrogate pair in a string");
    s->at += 6;
    return 0;
}

static int scan_string(Scanner *s) {
    size_t start = s->at++;
    while (s->at < s->size && s->text[s->at] != '"') {
        unsigned char ch = (unsigned char)s->text[s->at];
        if (ch == '\n') return refuse(s, start, "a closing quote is missing", "this string does not end on its line");
        if (ch == '\\') {
            if (scan_escape(s) != 0) return -1;
            continue;
        }
        if (ch < 0x20) return refuse(s, s->at, "write a tab as \\t", "control character 0x%02X in a string", ch);
        size_t n = utf8_length((const unsigned char *)s->text + s->at, s->size - s->at);
        if (n == 0) return refuse(s, s->at, "save the file as UTF-8", "byte 0x%02X is not UTF-8", ch);
        s->at += n;
    }
    if (s->at >= s->size)
        return refuse(s, start, "a closing quote is missing, or the file is cut off", "this string does not end");
    s->at++;
    return 0;
}

/* ------------------------------------------------------------------------------------------- numbers and bare words */

/* Copies the word at the cursor (letters, digits, _ - + .) for a message. */
static const char *word_at(const Scanner *s, char word[32]) {
    size_t n = 0;
    for (size_t i = s->at; i < s->size && n < 31; i++) {
        unsigned char ch = (unsigned char)s->text[i];
        if (!isalnum(ch) && !strchr("_-+.", ch)) break;
        word[n++] = (char)ch;
    }
    word[n] = 0;
    return word;
}

static size_t scan_digits(Scanner *s) {
    size_t start = s->at;
    while (s->at < s->size && isdigit((unsigned char)s->text[s->at])) s->at++;
    return s->at - start;
}

static int scan_number(Scanner *s) {
    size_t start = s->at;
    const char *hint = "numbers look like 12, -0.5, 3e-4 or 100e9";
    if (s->text[s->at] == '-') s->at++;
    bool zero = s->at < s->size && s->text[s->at] == '0';
    size_t n = scan_digits(s);
    if (n == 0) return refuse(s, start, hint, "a number needs a digit here");
    if (zero && n > 1) return refuse(s, start, hint, "a number must not start with 0");
    if (s->at < s->size && s->text[s->at] == '.') {
        s->at++;
        if (scan_digits(s) == 0) return refuse(s, start, hint, "a number needs a digit after its point");
    }
    if (s->at < s->size && (s->text[s->at] == 'e' || s->text[s->at] == 'E')) {
        s->at++;
        if (s->at < s->size && (s->text[s->at] == '+' || s->text[s->at] == '-')) s->at++;
        if (scan_digits(s) == 0) return refuse(s, start, hint, "a number needs a digit in its exponent");
    }
    if (s->at < s->size && (isalnum((unsigned char)s->text[s->at]) || strchr("_.", s->text[s->at]))) {
        char word[32];
        s->at = start;
        return refuse(s, start, hint, "%s is not a number", word_at(s, word));
    }
    if (s->at - start > JSON_NUMBER_LEN_MAX)
        return refuse(s, start, NULL, "a number of %zu characters; at most %d are read", s->at - start,
                      JSON_NUMBER_LEN_MAX);
    return 0;
}

static int refuse_word(Scanner *s) {
    static const char *const not_finite[] = {"NaN", "nan",  "NAN", "Infinity", "-Infinity",
                                             "inf", "-inf", "Inf", "-Inf"};
    char word[32], hint[96];
    word_at(s, word);
    for (size_t i = 0; i < sizeof not_finite / sizeof *not_finite; i++)
        if (strcmp(word, not_finite[i]) == 0)
            return refuse(s, s->at, "numbers are finite", "%s is not a JSON number", word);
    if (strcmp(word, "True") == 0 || strcmp(word, "False") == 0 || strcmp(word, "None") == 0)
        return refuse(s, s->at, "JSON writes true, false and null", "%s is a word of Python", word);
    snprintf(hint, sizeof hint, "a string needs double quotes: \"%s\"", word);
    return refuse(s, s->at, hint, "%s has no quotes and is no number", word);
}

/* ---------------------------------------------------------------------------------------------------------- values */

static void skip_space(Scanner *s) {
    while (s->at < s->size && s->text[s->at] && strchr(" \t\r\n", s->text[s->at])) s->at++;
}

/* Anything that cannot stand at the cursor, where `expected` should. */
static int refuse_here(Scanner *s, const char *expected) {
    char ch = s->text[s->at];
    if (ch == '/' || ch == '#')
        return refuse(s, s->at, "JSON has no comments: use a key \"//\" with the text as its value",
                      "comment not allowed");
    if (ch == '\'')
        return refuse(s, s->at, "JSON quotes are double: \"...\"", "single quote where %s should be", expected);
    if ((unsigned char)ch >= 0x80) return refuse(s, s->at, NULL, "unexpected character where %s should be", expected);
    return refuse(s, s->at, NULL, "'%c' where %s should be", ch, expected);
}

static int refuse_end(Scanner *s, size_t opened, const char *what) {
    int line, column;
    json_position(s->text, opened, &line, &column);
    return refuse(s, s->size, "the file is cut off, or a closing bracket is missing",
                  "the text ends inside the %s that opens at %d:%d", what, line, column);
}

static int scan_value(Scanner *s, size_t key);

/* After a member: moves past a comma, or stops at the closing bracket. Returns 1 for another member, 0 for the end. */
static int scan_separator(Scanner *s, char closing, size_t opened, size_t member_end) {
    const char *what = closing == '}' ? "object" : "list";
    skip_space(s);
    if (s->at >= s->size) return refuse_end(s, opened, what);
    char ch = s->text[s->at];
    if (ch == closing) return 0;
    if (ch == ',') {
        size_t comma = s->at++;
        skip_space(s);
        if (s->at >= s->size) return refuse_end(s, opened, what);
        if (s->text[s->at] == '}' || s->text[s->at] == ']')
            return refuse(s, comma, "remove the comma after the last member", "trailing comma");
        return 1;
    }
    if (ch == '"' || ch == '{' || ch == '[' || isalnum((unsigned char)ch) || ch == '-')
        return refuse(s, member_end, "put a comma between two members", "missing comma");
    return refuse_here(s, closing == '}' ? "',' or '}'" : "',' or ']'");
}

static int scan_key(Scanner *s) {
    char word[32], hint[96];
    if (s->text[s->at] == '"') return scan_string(s);
    if (isalpha((unsigned char)s->text[s->at]) || s->text[s->at] == '_') {
        snprintf(hint, sizeof hint, "a key needs double quotes: \"%s\"", word_at(s, word));
        return refuse(s, s->at, hint, "key without quotes");
    }
    return refuse_here(s, "a key in quotes");
}

static int scan_object(Scanner *s) {
    size_t opened = s->at++, path_end = strlen(s->path);
    skip_space(s);
    if (s->at < s->size && s->text[s->at] == '}') {
        s->at++;
        return 0;
    }
    int more = 1;
    while (more == 1) {
        skip_space(s);
        if (s->at >= s->size) return refuse_end(s, opened, "object");
        size_t key = s->at;
        if (scan_key(s) != 0) return -1;
        snprintf(s->path + path_end, sizeof s->path - path_end, "%s%.*s", path_end ? "." : "", (int)(s->at - key - 2),
                 s->text + key + 1);
        skip_space(s);
        if (s->at >= s->size) return refuse_end(s, opened, "object");
        if (s->text[s->at] != ':') {
            if (s->text[s->at] != ',' && s->text[s->at] != '}') return refuse_here(s, "':' after a key");
            return refuse(s, key, "a member is \"key\": value", "a key without a value");
        }
        s->at++;
        skip_space(s);
        if (s->at >= s->size) return refuse_end(s, opened, "object");
        if (scan_value(s, key) != 0) return -1;
        s->path[path_end] = 0;
        more = scan_separator(s, '}', opened, s->at);
    }
    s->at += more == 0;
    return more;
}

static int scan_list(Scanner *s) {
    size_t opened = s->at++;
    skip_space(s);
    if (s->at < s->size && s->text[s->at] == ']') {
        s->at++;
        return 0;
    }
    int more = 1;
    while (more == 1) {
        skip_space(s);
        if (s->at >= s->size) return refuse_end(s, opened, "list");
        if (scan_value(s, s->at) != 0) return -1;
        more = scan_separator(s, ']', opened, s->at);
    }
    s->at += more == 0;
    return more;
}

static int add_mark(Scanner *s, size_t key) {
    if (s->n_marks == s->marks_max) {
        size_t wanted = s->marks_max ? 2 * s->marks_max : 64;
        JsonMark *grown = (JsonMark *)realloc(s->marks, wanted * sizeof *grown);
        if (!grown) return err_set(s->err, "%s: out of memory", s->name);
        s->marks = grown;
        s->marks_max = wanted;
    }
    s->marks[s->n_marks++] = (JsonMark){key, s->at};
    return 0;
}

static int scan_value(Scanner *s, size_t key) {
    static const char *const words[] = {"true", "false", "null"};
    char word[32], ch = s->text[s->at];
    if (add_mark(s, key) != 0) return -1;
    if (ch == '{' || ch == '[') {
        if (s->depth == JSON_DEPTH_MAX) return refuse(s, s->at, NULL, "nested deeper than %d levels", JSON_DEPTH_MAX);
        s->depth++;
        int result = ch == '{' ? scan_object(s) : scan_list(s);
        s->depth--;
        return result;
    }
    if (ch == '"') return scan_string(s);
    if (isalpha((unsigned char)ch) ||
        (ch == '-' && s->at + 1 < s->size && isalpha((unsigned char)s->text[s->at + 1]))) {
        for (int i = 0; i < 3; i++) {
            if (strcmp(word_at(s, word), words[i]) != 0) continue;
            s->at += strlen(word);
            return 0;
        }
        return refuse_word(s);
    }
    if (isdigit((unsigned char)ch) || ch == '-') return scan_number(s);
    if (ch == '+' || ch == '.')
        return refuse(s, s->at, "numbers look like 12, -0.5, 3e-4 or 100e9", "a number must not start with '%c'", ch);
    return refuse_here(s, "a value");
}

int json_scan(const char *text, size_t size, const char *name, JsonMark **marks, size_t *n_marks, char *err, char *hint,
              char *key) {
    Scanner s = {.text = text, .name = name, .size = size, .err = err, .hint = hint};
    skip_space(&s);
    if (scan_value(&s, s.at) != 0) goto failed;
    skip_space(&s);
    if (s.at < s.size) {
        char ch = s.text[s.at];
        if (ch == '/' || ch == '#')
            refuse_here(&s, "the end");
        else
            refuse(&s, s.at, "one JSON value a file: remove what follows it, or a bracket too many before it",
                   "extra text after the end of the JSON");
        goto failed;
    }
    *marks = s.marks;
    *n_marks = s.n_marks;
    return 0;
failed:
    if (key) memcpy(key, s.path, sizeof s.path);
    free(s.marks);
    return -1;
}
