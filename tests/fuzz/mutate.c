/* See fuzz.h: the mutator. It works on bytes that need not be JSON: a "value" is what looks like one at some place. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "data/config_table.h"
#include "kernels/base/rng.h"
#include "tests/fuzz/fuzz.h"

enum { CHANGES_MAX = 8, PLACE_TRIES = 64, NESTING_MAX = 200 };

uint64_t fuzz_random(FuzzRandom *r) {
    return mix64(r->state += 0x9E3779B97F4A7C15ull);
}

uint64_t fuzz_below(FuzzRandom *r, uint64_t n) {
    return fuzz_random(r) % n;
}

/* ---- words ------------------------------------------------------------------------------------------------------- */

/* Spellings as they stand in a text: quotes belong to them. */
static const char *const words[] = {
    "0",
    "-0",
    "-1",
    "1",
    "2",
    "1e999",
    "-1e999",
    "1e-400",
    "0.1",
    "1E+5",
    "1.0e2",
    "127",
    "128",
    "255",
    "256",
    "32767",
    "65535",
    "65536",
    "2147483647",
    "2147483648",
    "4294967295",
    "4294967296",
    "4194303",
    "4194304",
    "1e18",
    "9007199254740993",
    "1152921504606846976",
    "9223372036854775807",
    "9223372036854775808",
    "18446744073709551615",
    "18446744073709551616",
    "123456789012345678901234567890123456789012345678901234567890",
    "NaN",
    "-Infinity",
    "true",
    "false",
    "null",
    "[]",
    "{}",
    "[[]]",
    "\"\"",
    "\"//\"",
    "\"a\"",
    "\"\\u0000\"",
    "\"\\ud800\"",
    "\"\\ud83d\\ude00\"",
    "\"\\n\"",
    "\"\\u001b[2J\"",
    "\"auto\"",
    "\"worst\"",
    "\"synthetic\"",
    "\"/dev/null\"",
    "\"inf\"",
    "\"nan\"",
    "\"0123456789abcdef\"",
    "[[0, 1e-3], [10e9, 1e-4]]",
    "{\"name\": \"a\", \"path\": \"b\"}",
    "{\"rope_type\": \"yarn\", \"factor\": 4}",
    "\"tokenizer\"",
    "\"vocab_size\"",
    "\"document_token\"",
    "\"bytes_per_token\"",
    "\"ngram\"",
    "\"version\"",
    "\"format\"",
    "\"state\"",
    "\"files\"",
    "\"tensors\"",
    "\"slices\"",
    "\"offset\"",
    "\"extent\"",
    "\"dtype\"",
    "\"shape\"",
    "\"data_offsets\"",
    "\"__metadata__\"",
    "\"F32\"",
    "\"BF16\"",
    "\"F8_E4M3\"",
    "\"added_tokens\"",
    "\"content\"",
    "\"special\"",
    "\"merges\"",
    "\"vocab\"",
    "\"pre_tokenizer\"",
    "\"Ġ\"",
    "\"a b\"",
    ", ",
    ": ",
    "}",
    "]",
    "\xEF\xBB\xBF",
    "//",
};
enum { N_WORDS = sizeof words / sizeof *words };

const char *fuzz_word(uint64_t random) {
    static char key[128];
    const uint64_t n_rows = (uint64_t)config_n_fields, kind = random % 3, index = random / 3;
    if (kind > 0) return words[index % N_WORDS];
    const Field *f = &config_fields[index % n_rows];
    const bool takes_choice = f->type->has_choices && index / n_rows % 2;
    snprintf(key, sizeof key, "\"%.*s\"", (int)(takes_choice ? strcspn(f->unit, "|") : strlen(f->name)),
             takes_choice ? f->unit : f->name);
    return key;
}

static uint64_t any_integer(FuzzRandom *r) {
    const uint64_t near = fuzz_below(r, 5) - 2, kind = fuzz_below(r, 4);
    if (kind == 0) return fuzz_random(r);
    if (kind == 1) return near;
    return ((uint64_t)1 << fuzz_below(r, 64)) + near;
}

/* ---- editing ----------------------------------------------------------------------------------------------------- */

typedef struct {
    uint8_t *data;
    size_t size;
} Text;

typedef struct {
    size_t at, n;
} Span;

/* Bytes [from.at, +n) become bytes[0..n_bytes); a result that is too long is cut. `bytes` may lie in the text. */
static void replace(Text *t, Span from, const void *bytes, size_t n_bytes) {
    static uint8_t kept[FUZZ_BYTES_MAX];
    const size_t n = n_bytes < FUZZ_BYTES_MAX - from.at ? n_bytes : FUZZ_BYTES_MAX - from.at;
    size_t tail = t->size - from.at - from.n;
    if (tail > FUZZ_BYTES_MAX - from.at - n) tail = FUZZ_BYTES_MAX - from.at - n;
    memcpy(kept, bytes, n);
    memmove(t->data + from.at + n, t->data + from.at + from.n, tail);
    memcpy(t->data + from.at, kept, n);
    t->size = from.at + n + tail;
}

/* ---- JSON -------------------------------------------------------------------------------------------------------- */

static bool is_word_byte(uint8_t c) {
    return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '-' || c == '.' ||
           c == '+';
}

/* The value that begins at `at`: a string, a bracket with what it holds, or a word; 0 bytes if there is none. */
static size_t value_length(const uint8_t *data, size_t size, size_t at) {
    size_t i = at;
    int depth = 0;
    do {
        const uint8_t c = data[i];
        if (c == '"') {
            for (i++; i < size && data[i] != '"'; i++) i += data[i] == '\\';
            if (i >= size) return 0;
            i++;
        } else if (c == '{' || c == '[') {
            depth++;
            i++;
        } else if (c == '}' || c == ']') {
            depth--;
            i++;
        } else if (is_word_byte(c)) {
            while (i < size && is_word_byte(data[i])) i++;
        } else {
            if (depth == 0) return 0;
            i++;
        }
    } while (depth > 0 && i < size);
    return depth == 0 ? i - at : 0;
}

/* A value somewhere in data, n = 0 if none is found. Words are entered at their first byte. */
static Span any_value(const uint8_t *data, size_t size, FuzzRandom *r) {
    for (int i = 0; i < PLACE_TRIES && size > 0; i++) {
        const size_t at = fuzz_below(r, size);
        if (is_word_byte(data[at]) && at > 0 && is_word_byte(data[at - 1])) continue;
        const size_t n = value_length(data, size, at);
        if (n > 0) return (Span){at, n};
    }
    return (Span){0, 0};
}

/* A value with the key in front of it and the comma behind it, as far as they are there. */
static Span widen_to_member(const Text *t, Span value) {
    size_t begin = value.at, end = value.at + value.n;
    while (begin > 0 && t->data[begin - 1] != '{' && t->data[begin - 1] != '[' && t->data[begin - 1] != ',') begin--;
    while (end < t->size && (t->data[end] == ' ' || t->data[end] == '\n')) end++;
    if (end < t->size && t->data[end] == ',') end++;
    return (Span){begin, end - begin};
}

/* The next number from a place on; n = 0 if none follows. */
static Span any_number(const Text *t, FuzzRandom *r) {
    for (size_t at = t->size ? fuzz_below(r, t->size) : 0; at < t->size; at++) {
        const bool begins = at == 0 || !is_word_byte(t->data[at - 1]);
        if (begins && (t->data[at] == '-' || (t->data[at] >= '0' && t->data[at] <= '9')))
            return (Span){at, value_length(t->data, t->size, at)};
    }
    return (Span){0, 0};
}

/* Its neighbours, its double, or an integer of any size. */
static void change_number(Text *t, FuzzRandom *r) {
    char text[64];
    const Span number = any_number(t, r);
    if (number.n == 0 || number.n >= sizeof text) return;
    memcpy(text, t->data + number.at, number.n);
    text[number.n] = 0;
    const long long x = strtoll(text, NULL, 10);
    const unsigned long long near = (unsigned long long)x + fuzz_below(r, 5) - 2;
    const uint64_t kind = fuzz_below(r, 4);
    if (kind <= 1)
        snprintf(text, sizeof text, "%lld", (long long)near);
    else if (kind == 2)
        snprintf(text, sizeof text, "%llu", 2 * (unsigned long long)x);
    else
        snprintf(text, sizeof text, "%lld", (long long)any_integer(r));
    replace(t, number, text, strlen(text));
}

/* The member behind itself, up to 40 times. */
static void repeat_member(Text *t, Span member, FuzzRandom *r) {
    const uint64_t n = fuzz_below(r, 3) ? 1 : 1 + fuzz_below(r, 40);
    for (uint64_t i = 0; i < n && member.n < 256; i++) replace(t, (Span){member.at, 0}, t->data + member.at, member.n);
}

static void add_member(Text *t, Span member, FuzzRandom *r) {
    char text[512];
    const int n_key = snprintf(text, sizeof text, "%s: ", fuzz_word(fuzz_random(r)));
    const int n = n_key + snprintf(text + n_key, sizeof text - (size_t)n_key, "%s, ", fuzz_word(fuzz_random(r)));
    replace(t, (Span){member.at, 0}, text, (size_t)n);
}

static void nest(Text *t, Span value, FuzzRandom *r) {
    static uint8_t nested[2 * NESTING_MAX + 1];
    const size_t n = 1 + (size_t)fuzz_below(r, fuzz_below(r, 4) ? 3 : NESTING_MAX);
    memset(nested, '[', n);
    nested[n] = '1';
    memset(nested + n + 1, ']', n);
    replace(t, value, nested, 2 * n + 1);
}

static void change_json(Text *t, const Text *other, FuzzRandom *r) {
    const Span value = any_value(t->data, t->size, r);
    const Text *from = fuzz_below(r, 2) ? other : t;
    const Span elsewhere = any_value(from->data, from->size, r);
    if (value.n == 0 || elsewhere.n == 0) return;
    const char *word = fuzz_word(fuzz_random(r));
    switch (fuzz_below(r, 10)) {
    case 0:
    case 1: replace(t, value, word, strlen(word)); break;
    case 2: replace(t, value, from->data + elsewhere.at, elsewhere.n); break;
    case 3: replace(t, widen_to_member(t, value), "", 0); break;
    case 4: repeat_member(t, widen_to_member(t, value), r); break;
    case 5: add_member(t, widen_to_member(t, value), r); break;
    case 6: nest(t, value, r); break;
    default: change_number(t, r);
    }
}

/* ---- bytes ------------------------------------------------------------------------------------------------------- */

static void change_bytes(Text *t, const Text *other, FuzzRandom *r) {
    const uint64_t kind = fuzz_below(r, 8);
    const size_t at = t->size ? fuzz_below(r, t->size) : 0, left = t->size - at;
    const size_t n = left ? 1 + fuzz_below(r, left < 64 || kind == 7 ? left : 64) : 0;
    if (kind <= 2) { /* an integer, often at a multiple of its width and near the beginning */
        const uint64_t value = any_integer(r);
        const size_t width = (size_t)2 << fuzz_below(r, 3);
        size_t place = fuzz_below(r, 4) ? at / width * width : at;
        if (fuzz_below(r, 2)) place = place % 64 / width * width;
        if (place + width <= t->size) memcpy(t->data + place, &value, width);
    } else if (kind == 3) {
        if (left) t->data[at] ^= (uint8_t)(1u << fuzz_below(r, 8));
    } else if (kind == 4) {
        if (left) t->data[at] = (uint8_t)fuzz_random(r);
    } else if (kind == 5) { /* a piece from elsewhere */
        const Text *from = fuzz_below(r, 2) ? other : t;
        const size_t start = from->size ? fuzz_below(r, from->size) : 0, n_from = from->size - start;
        replace(t, (Span){at, fuzz_below(r, 2) ? n : 0}, from->data + start,
                n_from ? 1 + fuzz_below(r, n_from < 256 ? n_from : 256) : 0);
    } else if (kind == 6) {
        replace(t, (Span){at, n}, "", 0);
    } else { /* cut off */
        t->size -= fuzz_below(r, 2) ? n : left < 16 ? left : fuzz_below(r, 16);
    }
}

size_t fuzz_mutate(uint8_t *data, size_t size, const uint8_t *other, size_t other_size, FuzzRandom *r) {
    Text t = {data, size};
    const Text from = {(uint8_t *)(uintptr_t)other, other_size};
    const uint64_t n_changes = 1 + fuzz_below(r, fuzz_below(r, 3) ? 2 : CHANGES_MAX);
    const uint64_t kind = fuzz_below(r, 3); /* JSON alone, bytes alone, both: one changed byte may spoil a whole text */
    for (uint64_t i = 0; i < n_changes; i++) {
        if (kind == 0 || (kind == 2 && fuzz_below(r, 2)))
            change_json(&t, &from, r);
        else
            change_bytes(&t, &from, r);
    }
    return t.size;
}
