/* The command check-data: reads every token of the shards, and says what they hold and what is wrong with them.
 *
 * Shards of one name but for the number behind it (train_000.bin, train_001.bin.zst, ...) are one series, whose
 * documents go on from one to the next. Damage goes to stderr, one line a file, as it is met; all else to stdout at the
 * end. */
#include "check_data.h"

#include <dirent.h>
#include <fnmatch.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/base/check.h"
#include "kernels/base/clock.h"

enum { CHUNK = 1 << 15 };

static const char *const split_names[SPLITS] = {"train", "val"};

static void complain(CheckData *c, const char *hint, const char *fmt, ...) PRINTF_LIKE(3, 4);

static void complain(CheckData *c, const char *hint, const char *fmt, ...) {
    va_list args;
    va_start(args, fmt);
    bar_clear(&c->bar);
    fputs("error: ", stderr);
    vfprintf(stderr, fmt, args);
    fprintf(stderr, hint && hint[0] ? " (hint: %s)\n" : "\n", hint);
    va_end(args);
    c->n_damaged++;
}

/* ---- names ------------------------------------------------------------------------------------------------------- */

static size_t folder_length(const char *path) {
    const char *slash = strrchr(path, '/');
    return slash ? (size_t)(slash - path) + 1 : 0;
}

/* Of "shards/train_003.bin.zst", "shards/train_". */
static size_t series_length(const char *path) {
    size_t n = strlen(path);
    for (int i = 0; i < 2; i++) {
        const char *const ends[] = {".zst", ".bin"};
        if (n > 4 && memcmp(path + n - 4, ends[i], 4) == 0) n -= 4;
    }
    while (n > 0 && path[n - 1] >= '0' && path[n - 1] <= '9') n--;
    return n;
}

static int split_of(const char *name) {
    for (int i = 0; i < SPLITS; i++) {
        char pattern[32];
        snprintf(pattern, sizeof pattern, "%s_[0-9]*.bin", split_names[i]);
        if (fnmatch(pattern, name, 0) == 0) return i;
        strcat(pattern, ".zst");
        if (fnmatch(pattern, name, 0) == 0) return i;
    }
    return -1;
}

/* ---- folders ----------------------------------------------------------------------------------------------------- */

static void load_tokenizer(CheckData *c, const char *path) {
    char err[ERR_LEN];
    if (tokenizer_load(&c->tokenizer, path, err) != 0) {
        if (c->args->tokenizer) DIE("a tokenizer.json, or its folder", "%s", err);
        complain(c, "--tokenizer names another", "%s", err);
        return;
    }
    snprintf(c->tokenizer_path, sizeof c->tokenizer_path, "%s", path);
    c->text_bytes_room = tokenizer_vocab_size(c->tokenizer);
    c->text_bytes = (int32_t *)calloc((size_t)c->text_bytes_room, sizeof *c->text_bytes);
    CHECK(c->text_bytes, "no memory for a table of tokens");
    for (int32_t id = 0; id < c->text_bytes_room; id++) {
        size_t n = 0;
        if (tokenizer_bytes(c->tokenizer, id, &n) && !tokenizer_is_special(c->tokenizer, id))
            c->text_bytes[id] = (int32_t)n;
    }
}

/* The first folder's tokenizer is loaded; it is also that of others whose JSON names the same file. */
static void open_folder(CheckData *c, const char *file) {
    CheckFolder *f = &c->folder;
    char err[ERR_LEN], path[PATH_LEN] = "";
    memset(f, 0, sizeof *f);
    snprintf(f->path, sizeof f->path, "%.*s", (int)folder_length(file), file);
    if (sidecar_read(&f->sidecar, file, err) != 0) {
        complain(c, "prepare the data again, or repair it", "%s", err);
        f->sidecar.found = false;
    }
    if (f->sidecar.found && f->sidecar.tokenizer[0] && !c->args->tokenizer &&
        sidecar_tokenizer_path(path, sizeof path, &f->sidecar, err) == 0 && !c->tokenizer)
        load_tokenizer(c, path);
    f->is_text = c->tokenizer && (c->args->tokenizer || strcmp(path, c->tokenizer_path) == 0);
    f->vocab_size = f->sidecar.found ? f->sidecar.vocab_size : f->is_text ? c->text_bytes_room : INT32_MAX;
    if (f->is_text && f->sidecar.found && c->text_bytes_room > f->sidecar.vocab_size)
        complain(c, "is it the tokenizer that made these ids?", "%s has %d ids, %s says %lld", c->tokenizer_path,
                 c->text_bytes_room, f->sidecar.path, (long long)f->sidecar.vocab_size);
    const int64_t from_tokenizer = f->is_text ? tokenizer_document_token(c->tokenizer) : -1;
    const int64_t token =
        f->sidecar.found && f->sidecar.document_token >= 0 ? f->sidecar.document_token : from_tokenizer;
    c->documents.document_token = (int32_t)token;
    if (f->vocab_size > c->used_room && f->vocab_size < INT32_MAX) {
        c->is_used = (uint8_t *)realloc(c->is_used, (size_t)f->vocab_size);
        CHECK(c->is_used, "no memory for a vocabulary of %lld", (long long)f->vocab_size);
        memset(c->is_used + c->used_room, 0, (size_t)(f->vocab_size - c->used_room));
        c->used_room = f->vocab_size;
    }
}

static int shards_in_folder(const CheckFolder *f, int split) {
    DIR *d = opendir(f->path[0] ? f->path : ".");
    int n = 0;
    for (struct dirent *e; d && (e = readdir(d));) n += split_of(e->d_name) == split;
    if (d) closedir(d);
    return n;
}

static void expect_count(CheckData *c, const char *what, int64_t found, int64_t said) {
    if (said >= 0 && found != said)
        complain(c, "prepare the data again, or copy it as a whole", "%s: \"%s\" is %lld, the shards hold %lld",
                 c->folder.sidecar.path, what, (long long)said, (long long)found);
}

/* What the JSON says is compared where all shards of a split were read. */
static void close_folder(CheckData *c) {
    const CheckFolder *f = &c->folder;
    const Sidecar *s = &f->sidecar;
    const int64_t tokens[SPLITS] = {s->train_tokens, s->val_tokens}, text[SPLITS] = {s->train_bytes, s->val_bytes};
    const int64_t documents[SPLITS] = {s->train_documents, s->val_documents};
    for (int i = 0; i < SPLITS; i++) {
        if (!s->found || f->n_shards[i] != shards_in_folder(f, i)) continue;
        char what[32];
        snprintf(what, sizeof what, "%s_tokens", split_names[i]);
        expect_count(c, what, f->n_tokens[i], tokens[i]);
        snprintf(what, sizeof what, "%s_bytes", split_names[i]);
        if (f->is_text) expect_count(c, what, f->n_text[i], text[i]);
        snprintf(what, sizeof what, "%s_documents", split_names[i]);
        if (c->documents.document_token >= 0) expect_count(c, what, f->n_documents[i], documents[i]);
    }
}

/* ---- shards ------------------------------------------------------------------------------------------------------ */

static void end_series(CheckData *c) {
    documents_end(&c->documents);
    if (c->n_series == 0) return;
    CheckSeries *series = &c->series[c->n_series - 1];
    series->n_documents = c->documents.n - c->series_first;
    c->series_first = c->documents.n;
    if (series->split >= 0) c->folder.n_documents[series->split] += series->n_documents;
}

static void take_excerpt(CheckData *c, const int32_t *ids, int64_t n) {
    int64_t from = 0;
    while (from < n && ids[from] != c->documents.document_token) from++;
    if (from == n) from = -1; /* no document begins here */
    for (int64_t i = from + 1; i < n && c->n_excerpt < EXCERPT_TOKENS; i++) {
        if (c->n_excerpt > 0 && ids[i] == c->documents.document_token) break;
        if (ids[i] != c->documents.document_token) c->excerpt[c->n_excerpt++] = ids[i];
    }
}

static void count_tokens(CheckData *c, CheckSeries *series, const int32_t *ids, int64_t n, int file, int64_t first) {
    const CheckFolder *f = &c->folder;
    int32_t largest = 0;
    for (int64_t i = 0; i < n; i++) largest = ids[i] > largest ? ids[i] : largest;
    if (largest > c->largest_id) c->largest_id = largest;
    if (f->vocab_size < INT32_MAX)
        for (int64_t i = 0; i < n; i++) c->is_used[ids[i]] = 1;
    if (f->is_text)
        for (int64_t i = 0; i < n; i++) series->n_text += ids[i] < c->text_bytes_room ? c->text_bytes[ids[i]] : 0;
    if (c->documents.document_token >= 0) documents_add(&c->documents, ids, n, file, first);
    if (c->n_excerpt == 0) take_excerpt(c, ids, n);
}

/* Returns -1 with err and hint. */
static int read_shard(CheckData *c, const Shard *shard, CheckSeries *series, int file, char *err, char *hint) {
    static int32_t ids[CHUNK];
    const CheckFolder *f = &c->folder;
    if (shard->width == 2 && f->vocab_size > UINT16_MAX + 1 && f->sidecar.found) {
        err_set(hint, "write the shards again with 32-bit ids (magic 20240801)");
        return err_set(err, "%s: 16-bit ids for a vocabulary of %lld", shard->path, (long long)f->vocab_size);
    }
    for (int64_t at = 0; at < shard->n_tokens; at += CHUNK) {
        const int64_t n = shard->n_tokens - at < CHUNK ? shard->n_tokens - at : CHUNK;
        if (shard_read(shard, ids, at, n, f->vocab_size, err) != 0) {
            err_set(hint, "copy or prepare the file again%s",
                    strstr(err, "vocabulary") ? ", with the tokenizer that data.json names" : "");
            return -1;
        }
        count_tokens(c, series, ids, n, file, at);
        bar_draw(&c->bar, file, (int64_t)c->files.gl_pathc, shard->path);
    }
    return 0;
}

static void check_file(CheckData *c, int file) {
    char err[ERR_LEN], hint[ERR_LEN] = "";
    const char *path = c->files.gl_pathv[file], *before = file > 0 ? c->files.gl_pathv[file - 1] : NULL;
    if (before && strcmp(path, before) == 0) return; /* of two patterns */
    const size_t length = series_length(path), folder = folder_length(path);
    const bool is_same_folder = before && folder_length(before) == folder && memcmp(path, before, folder) == 0;
    const CheckSeries *last = c->n_series > 0 ? &c->series[c->n_series - 1] : NULL;
    if (!last || strlen(last->name) != length || memcmp(path, last->name, length) != 0) {
        end_series(c);
        if (last && !is_same_folder) close_folder(c);
        if (!is_same_folder) open_folder(c, path);
        c->series[c->n_series].split = split_of(path + folder);
        c->series[c->n_series++].name = strndup(path, length);
    }
    CheckSeries *series = &c->series[c->n_series - 1];
    const int64_t text = series->n_text;
    Shard shard;
    int result = shard_open(&shard, path, true, c->pool, err, hint);
    if (result == 0) {
        result = read_shard(c, &shard, series, file, err, hint);
        series->n_shards++;
        series->n_tokens += shard.n_tokens;
        series->n_bytes += shard.n_bytes;
        series->n_file_bytes += shard.n_file_bytes;
        c->n_tokens += shard.n_tokens;
        const int split = series->split;
        if (split >= 0 && result == 0) {
            c->folder.n_shards[split]++;
            c->folder.n_tokens[split] += shard.n_tokens;
            c->folder.n_text[split] += series->n_text - text;
        }
        shard_close(&shard);
    }
    if (result == 0) return;
    documents_drop(&c->documents);
    complain(c, hint, "%s", err);
}

/* ---- the command ------------------------------------------------------------------------------------------------- */

int run_command_check_data(const Args *args, const Launch *launch) {
    char err[ERR_LEN], hint[ERR_LEN];
    const double start = clock_s();
    CheckData c;
    memset(&c, 0, sizeof c);
    c.args = args;
    if (launch->world > 1) DIE("start it without a launcher", "check-data in %d processes", launch->world);
    if (args->n_files == 0)
        DIE("for example train_moe check-data 'shards/mine/*.bin*'", "check-data what? Name shards, or a pattern");
    if (source_find(&c.files, "check-data", args->files, args->n_files, err, hint) != 0)
        DIE(hint[0] ? hint : NULL, "%s", err);
    const int n = (int)c.files.gl_pathc;
    c.pool = zst_pool_new();
    c.series = (CheckSeries *)calloc((size_t)n, sizeof *c.series);
    CHECK(c.series, "no memory for %d files", n);
    documents_init(&c.documents, -1);
    if (!args->quiet) bar_init(&c.bar, stderr);
    if (args->tokenizer) load_tokenizer(&c, args->tokenizer);
    for (int i = 0; i < n; i++) check_file(&c, i);
    end_series(&c);
    close_folder(&c);
    bar_clear(&c.bar);
    check_data_print(&c, clock_s() - start);
    for (int i = 0; i < c.n_series; i++) free(c.series[i].name);
    free(c.series);
    free(c.is_used);
    free(c.text_bytes);
    tokenizer_free(c.tokenizer);
    documents_free(&c.documents);
    zst_pool_free(c.pool);
    globfree(&c.files);
    return c.n_damaged > 0 ? EXIT_USER : EXIT_DONE;
}
