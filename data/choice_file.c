/* See choice_file.h. */
#include "choice_file.h"

#include <stdlib.h>
#include <string.h>

#include "kernels/base/check.h"
#include "kernels/base/file.h"

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "files are read as they lie, and they are little-endian");

enum { MAGIC = 20240522, HEADER_BYTES = 1024 };
static const size_t file_bytes_max = (size_t)1 << 31;
static const char make_file_hint[] =
    "such files come from llm.c's dev/data/hellaswag.py and mmlu.py, or from scripts/prepare_choice.py";

/* Where the reading of the body stands. */
typedef struct {
    const char *path;
    const unsigned char *at, *end;
    int width; /* bytes of a number */
    int64_t example, vocab_size;
    char *err;
} Scan;

static int refuse(const Scan *s, const char *what) {
    return err_set(s->err, "%s: example %lld: %s", s->path, (long long)s->example, what);
}

/* The next number, or -1 with err at the end of the file. */
static int64_t next(Scan *s) {
    uint32_t value = 0;
    if (s->end - s->at < s->width) return refuse(s, "the file ends in it: truncated");
    memcpy(&value, s->at, (size_t)s->width);
    s->at += s->width;
    return value;
}

/* `n` ids into ids. */
static int next_ids(Scan *s, int32_t *ids, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        const int64_t id = next(s);
        if (id < 0) return -1;
        if (id >= s->vocab_size)
            return err_set(s->err, "%s: example %lld: id %lld, outside the vocabulary of %lld (model.vocab_size)",
                           s->path, (long long)s->example, (long long)id, (long long)s->vocab_size);
        ids[i] = (int32_t)id;
    }
    return 0;
}

/* A count of ids, at least one, that the rest of the file can hold. */
static int64_t next_count(Scan *s, const char *what) {
    const int64_t n = next(s);
    if (n == 0) return err_set(s->err, "%s: example %lld: %s without an id", s->path, (long long)s->example, what);
    if (n > (s->end - s->at) / s->width)
        return err_set(s->err, "%s: example %lld: %s of %lld ids, but the file ends before", s->path,
                       (long long)s->example, what, (long long)n);
    return n;
}

static int read_example(Scan *s, ChoiceFile *f) {
    const unsigned char *start = s->at;
    const int64_t mark = next(s), bytes = mark < 0 ? -1 : next(s), index = bytes < 0 ? -1 : next(s);
    if (index < 0) return -1;
    if (mark != (s->width == 2 ? UINT16_MAX : UINT32_MAX))
        return refuse(s, "does not begin with the mark of an example");
    if (index != s->example)
        return err_set(s->err, "%s: example %lld: has the index %lld", s->path, (long long)s->example,
                       (long long)index);
    const int64_t label = next(s), n_choices = label < 0 ? -1 : next(s);
    if (n_choices < 0) return -1;
    if (n_choices < 2 || n_choices > CHOICES_MAX || label >= n_choices)
        return err_set(s->err, "%s: example %lld: label %lld of %lld choices; 2 to %d are understood, labels from 0",
                       s->path, (long long)s->example, (long long)label, (long long)n_choices, CHOICES_MAX);
    ChoiceExample *e = &f->examples[s->example];
    e->label = (int)label;
    e->n_choices = (int)n_choices;
    e->first_id = f->n_ids;
    for (int part = -1; part < e->n_choices; part++) { /* the context, then the choices */
        const int64_t n = next_count(s, part < 0 ? "a context" : "a choice");
        if (n < 0 || next_ids(s, f->ids + f->n_ids, n) != 0) return -1;
        *(part < 0 ? &e->n_context : &e->length[part]) = (int32_t)n;
        f->n_ids += n;
    }
    if (s->at - start != bytes)
        return err_set(s->err, "%s: example %lld: is %lld bytes long, but says %lld", s->path, (long long)s->example,
                       (long long)(s->at - start), (long long)bytes);
    return 0;
}

/* Finds width and number of examples, or says what the file seems to be. */
static int read_header(ChoiceFile *f, int *width, const char *path, const char *data, size_t size, char *err) {
    int32_t header[3] = {0, 0, 0};
    memcpy(header, data, size < sizeof header ? size : sizeof header);
    if (header[0] != MAGIC)
        return err_set(err, "%s: not a multiple-choice file%s (magic %d found, %d expected)", path,
                       header[0] == 20240520 || header[0] == 20240801 ? " but a token shard" : "", header[0], MAGIC);
    if (size < HEADER_BYTES)
        return err_set(err, "%s: truncated header: %zu bytes found, %d expected", path, size, HEADER_BYTES);
    if (header[1] != 1 && header[1] != 7)
        return err_set(err, "%s: version %d found, 1 (16-bit ids) or 7 (32-bit ids) expected", path, header[1]);
    *width = header[1] == 1 ? 2 : 4;
    f->n_examples = header[2];
    /* The shortest example: six numbers, a context of one id, two choices of one. */
    if (header[2] < 1 || (size_t)header[2] > (size - HEADER_BYTES) / (size_t)(11 * *width))
        return err_set(err, "%s: %d examples according to its header, in %zu bytes", path, header[2], size);
    return 0;
}

int choice_file_open(ChoiceFile *f, const char *path, int64_t vocab_size, char *err, char *hint) {
    char *data;
    size_t size;
    memset(f, 0, sizeof *f);
    if (hint) hint[0] = 0;
    if (file_read_all(&data, &size, path, file_bytes_max, err) != 0) return -1;
    Scan s = {path, (unsigned char *)data + HEADER_BYTES, (unsigned char *)data + size, 2, 0, vocab_size, err};
    int result = read_header(f, &s.width, path, data, size, err);
    if (result == 0) {
        f->examples = (ChoiceExample *)calloc((size_t)f->n_examples, sizeof *f->examples);
        f->ids = (int32_t *)malloc((size - HEADER_BYTES) / (size_t)s.width * sizeof *f->ids);
        if (!f->examples || !f->ids) result = err_set(err, "%s: no memory for its %zu bytes", path, size);
    }
    for (; result == 0 && s.example < f->n_examples; s.example++) result = read_example(&s, f);
    if (result == 0 && s.at != s.end)
        result = err_set(err, "%s: %lld bytes behind the last of its %lld examples", path, (long long)(s.end - s.at),
                         (long long)f->n_examples);
    free(data);
    if (result == 0) return 0;
    if (hint) err_set(hint, "%s", make_file_hint);
    choice_file_close(f);
    return -1;
}

void choice_file_close(ChoiceFile *f) {
    free(f->examples);
    free(f->ids);
    memset(f, 0, sizeof *f);
}

const int32_t *choice_context(const ChoiceFile *f, int64_t example) {
    return f->ids + f->examples[example].first_id;
}

const int32_t *choice_ids(const ChoiceFile *f, int64_t example, int choice) {
    const ChoiceExample *e = &f->examples[example];
    int64_t first = e->first_id + e->n_context;
    for (int c = 0; c < choice; c++) first += e->length[c];
    return f->ids + first;
}
