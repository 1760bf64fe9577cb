/* Multiple-choice evaluation files: llm.c's format (HellaSwag, MMLU), read whole. Floor 1.
 *
 * 256 little-endian int32: [0] magic 20240522, [1] version, [2] number of examples, [3] bytes of the longest example.
 * Then, in numbers of 16 bits (version 1, llm.c's) or, for vocabularies that do not fit them, of 32 bits (version 7, as
 * in token shards), each example:
 *
 *     65535 (32 bits: 4294967295), bytes of the example with this mark, index, label, number of choices,
 *     number of context ids, the context, then for each choice: number of ids, the ids
 *
 * The index counts from 0. Every count is checked against the bytes that are there, every id against the vocabulary. */
#ifndef TRAIN_MOE_CHOICE_FILE_H
#define TRAIN_MOE_CHOICE_FILE_H

#include <stdint.h>

enum { CHOICES_MAX = 32 };

/* One question. The ids of the context are followed by those of the choices, in the file's `ids`. */
typedef struct {
    int label;         /* the right choice */
    int n_choices;     /* from 2 */
    int32_t n_context; /* from 1: the first id of a choice is predicted from something */
    int32_t length[CHOICES_MAX];
    int64_t first_id; /* of the context, in ids */
} ChoiceExample;

typedef struct {
    int64_t n_examples, n_ids;
    ChoiceExample *examples;
    int32_t *ids;
} ChoiceFile;

/* Reads and checks `path`. Returns 0 and a file for choice_file_close, or -1 with the file and what is wrong in err and
 * what to do in hint (both ERR_LEN); nothing is left to close then. */
int choice_file_open(ChoiceFile *f, const char *path, int64_t vocab_size, char *err, char *hint);
void choice_file_close(ChoiceFile *f);

/* The ids of the context, or of one choice. Borrowed. */
const int32_t *choice_context(const ChoiceFile *f, int64_t example);
const int32_t *choice_ids(const ChoiceFile *f, int64_t example, int choice);

#endif
