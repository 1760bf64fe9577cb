/* UTF-8: one character at a time out of any bytes, and text printed piece by piece. Floor 1. */
#ifndef TRAIN_MOE_UTF8_H
#define TRAIN_MOE_UTF8_H

#include <stddef.h>
#include <stdint.h>

/* Beyond the last code point: what a byte that belongs to no character counts as. */
enum { UTF8_INVALID = 0x110000 };

/* Length in bytes (1..4) of the character at text[0], n >= 1, and its code point. A byte that starts no valid character
 * (stray, cut short, overlong, a surrogate, above U+10FFFF) is taken alone, length 1, as UTF8_INVALID. */
size_t utf8_next(const char *text, size_t n, uint32_t *code_point);

/* Writes the 1..4 bytes of a code point, returns their number. */
size_t utf8_put(char out[4], uint32_t code_point);

/* A token may end inside a character. The stream holds such bytes back until the rest arrives, so that what is printed
 * is valid UTF-8 at any moment. Start with a zeroed struct. */
typedef struct {
    char held[4];
    size_t n_held;
} Utf8Stream;

/* Room for what one call can write: an invalid byte becomes U+FFFD, three bytes. */
#define UTF8_STREAM_OUT_MAX(n) (3 * ((n) + 4))

/* Writes every character completed by bytes[0..n) to out (UTF8_STREAM_OUT_MAX(n) bytes, not terminated), returns the
 * bytes written. */
size_t utf8_stream_put(Utf8Stream *s, const char *bytes, size_t n, char *out);
/* The end of the text: held bytes become U+FFFD, the stream is empty again. out has UTF8_STREAM_OUT_MAX(0) bytes. */
size_t utf8_stream_end(Utf8Stream *s, char *out);

#endif
