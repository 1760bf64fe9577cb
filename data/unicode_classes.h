/* The classes of characters that tokenizers cut text by. Floor 1. */
#ifndef TRAIN_MOE_UNICODE_CLASSES_H
#define TRAIN_MOE_UNICODE_CLASSES_H

#include <stdint.h>

/* The first letter of the general category; SPACE is the property White_Space and wins over the category. Everything
 * else (controls, format characters, unassigned, not a code point) is OTHER. */
typedef enum {
    UNICODE_OTHER,
    UNICODE_LETTER,
    UNICODE_NUMBER,
    UNICODE_MARK,
    UNICODE_PUNCT,
    UNICODE_SYMBOL,
    UNICODE_SPACE
} UnicodeClass;

UnicodeClass unicode_class(uint32_t code_point);

#endif
