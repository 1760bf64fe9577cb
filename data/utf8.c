/* See utf8.h. The table of well-formed sequences is table 3-7 of the Unicode Standard: only the second byte has bounds
 * of its own, which exclude overlong forms, surrogates and code points above U+10FFFF. */
#include "utf8.h"

#include <stdbool.h>
#include <string.h>

/* Length of the character at p; 0 if p[0] starts none. If the n bytes end before the character does, *whole is false
 * and the length is n. */
static size_t scan(const unsigned char *p, size_t n, bool *whole) {
    unsigned lead = p[0], low = 0x80, high = 0xBF;
    size_t length;
    *whole = true;
    if (lead < 0x80) return 1;
    if (lead >= 0xC2 && lead <= 0xDF) {
        length = 2;
    } else if (lead >= 0xE0 && lead <= 0xEF) {
        length = 3;
        if (lead == 0xE0) low = 0xA0;
        if (lead == 0xED) high = 0x9F;
    } else if (lead >= 0xF0 && lead <= 0xF4) {
        length = 4;
        if (lead == 0xF0) low = 0x90;
        if (lead == 0xF4) high = 0x8F;
    } else {
        return 0;
    }
    for (size_t i = 1; i < length; i++) {
        if (i == n) {
            *whole = false;
            return n;
        }
        if (p[i] < low || p[i] > high) return 0;
        low = 0x80;
        high = 0xBF;
    }
    return length;
}

size_t utf8_next(const char *text, size_t n, uint32_t *code_point) {
    const unsigned char *p = (const unsigned char *)text;
    if (p[0] < 0x80) {
        *code_point = p[0];
        return 1;
    }
    bool whole;
    size_t length = scan(p, n, &whole);
    if (length == 0 || !whole) {
        *code_point = UTF8_INVALID;
        return 1;
    }
    uint32_t value = p[0] & (0xFFu >> (length + 1));
    for (size_t i = 1; i < length; i++) value = value << 6 | (p[i] & 0x3F);
    *code_point = value;
    return length;
}

size_t utf8_put(char out[4], uint32_t code_point) {
    if (code_point < 0x80) {
        out[0] = (char)code_point;
        return 1;
    }
    size_t length = code_point < 0x800 ? 2 : code_point < 0x10000 ? 3 : 4;
    for (size_t i = length - 1; i > 0; i--) {
        out[i] = (char)(0x80 | (code_point & 0x3F));
        code_point >>= 6;
    }
    out[0] = (char)((0xF00u >> length & 0xFF) | code_point);
    return length;
}

/* Writes the whole characters at the head of the held bytes and drops them; `last` also gives up on a partial one. */
static size_t flush_held(Utf8Stream *s, bool last, char *out) {
    size_t n_out = 0;
    while (s->n_held > 0) {
        bool whole;
        size_t length = scan((const unsigned char *)s->held, s->n_held, &whole);
        if (!whole && !last) break;
        if (length == 0 || !whole) {
            n_out += utf8_put(out + n_out, 0xFFFD);
            length = 1;
        } else {
            memcpy(out + n_out, s->held, length);
            n_out += length;
        }
        s->n_held -= length;
        memmove(s->held, s->held + length, s->n_held);
    }
    return n_out;
}

size_t utf8_stream_put(Utf8Stream *s, const char *bytes, size_t n, char *out) {
    size_t n_out = 0;
    for (size_t i = 0; i < n; i++) {
        s->held[s->n_held++] = bytes[i];
        n_out += flush_held(s, false, out + n_out);
    }
    return n_out;
}

size_t utf8_stream_end(Utf8Stream *s, char *out) {
    return flush_held(s, true, out);
}
