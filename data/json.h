/* Strict JSON on top of cJSON. Floor 1.
 *
 * cJSON alone stops at the end of the first value, takes the first of two equal keys, keeps numbers as doubles and
 * gives no reason when it fails. So our own scanner (json_scan.c) reads the text first: it accepts exactly RFC 8259 (a
 * UTF-8 byte order mark in front is skipped) and says where and why it refuses. Then cJSON builds the tree, and one
 * walk over both writes into it what cJSON loses:
 *   - valueint     of every item: the line on which its value starts (json_line);
 *   - valuestring  of every number: its spelling (json_spelling), from which exact integers are read.
 * Equal keys of one object are refused with both positions, except "//", which is a comment. */
#ifndef TRAIN_MOE_JSON_H
#define TRAIN_MOE_JSON_H

#include <cjson/cJSON.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

enum { JSON_DEPTH_MAX = 64, JSON_NUMBER_LEN_MAX = 60, JSON_PATH_LEN = 256 };

/* Parses `size` bytes (no terminator needed). Returns the tree, which the caller frees with cJSON_Delete, or NULL with
 * "name:line:column: what is wrong" in err and advice in hint (ERR_LEN each, hint may end empty). `key`, if not NULL,
 * has JSON_PATH_LEN bytes and receives the dotted path of the value at which a syntax error stands ("train.lr"), else
 * "". */
cJSON *json_parse(const char *text, size_t size, const char *name, char *err, char *hint, char *key);

/* The same for a file of at most max_bytes. */
cJSON *json_load(const char *path, size_t max_bytes, char *err, char *hint);

/* Where the value of an item starts; of an item made by hand: what was put there with json_set_line (0 if nothing). */
int json_line(const cJSON *item);
/* Marks an item and everything below it. */
void json_set_line(cJSON *item, int line);

/* A number as it was written; borrowed from the item. "" for anything else. */
const char *json_spelling(const cJSON *item);

/* An item in words, for messages: the string "8", the number 1.5, true, null, a list, an object. Into buf, returned. */
const char *json_describe(const cJSON *item, char *buf, size_t buf_len);

/* Numbers, from their spelling. 100e9 and 1.5e3 are integers; 1.5 and 1e-3 are not. */
typedef enum { JSON_INTEGER_EXACT, JSON_INTEGER_FRACTION, JSON_INTEGER_TOO_LARGE } JsonInteger;
/* Sign and magnitude; -0 is 0. TOO_LARGE: the magnitude does not fit 64 bits. `item` must be a number. */
JsonInteger json_integer(const cJSON *item, bool *negative, uint64_t *magnitude);
/* 0 and the value; -1 if the item is no number or no integer in int64_t. */
int json_int64(const cJSON *item, int64_t *value);
/* 0 and the value; -1 if the item is no number, too large for a double, or not zero but too small for one. */
int json_double(const cJSON *item, double *value);

/* Writing: a quoted and escaped string; a spelling that reads back to the same double (finite
 * values only), as short as can be; whole numbers below 1e15 without exponent.
 */
void json_write_string(FILE *out, const char *s);
void json_write_double(FILE *out, double x);

/* Used by json.c: the scanner's result, one record a value in the order of the text. */
typedef struct {
    size_t key, value; /* offsets in the text; key = value where there is no key */
} JsonMark;

/* Checks the whole text. Returns 0 with the records (malloc'd, caller frees), or -1 with err, hint and key as above. */
int json_scan(const char *text, size_t size, const char *name, JsonMark **marks, size_t *n_marks, char *err, char *hint,
              char *key);
/* Line and column (in characters) of an offset, counted from 1. */
void json_position(const char *text, size_t offset, int *line, int *column);
/* Refuses what is no text at all: empty, UTF-16, UTF-32, compressed, binary. */
int json_check_text(const char *text, size_t size, const char *name, char *err, char *hint);

#endif
