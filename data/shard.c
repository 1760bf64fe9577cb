/* See shard.h. Most of this file is about the many things that are not a shard: a user who names the wrong file should
 * learn which file it is, not that a number differs. */
#include "shard.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "kernels/base/check.h"
#include "kernels/base/file.h"

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "shards are read as they lie, and they are little-endian");

static const int64_t shard_bytes_max = SHARD_HEADER_BYTES + 4 * (int64_t)SHARD_TOKENS_MAX;

enum { HEAD_BYTES = 4096, CHUNK_IDS = 4096 };

typedef struct {
    int32_t magic, version;
    int width;
} ShardFormat;

static const ShardFormat formats[] = {{20240520, 1, 2}, {20240801, 7, 4}};

enum { N_FORMATS = sizeof formats / sizeof formats[0] };

static const char make_shards_hint[] = "scripts/prepare_data.py turns text into shards (--help shows how)";

/* pread until n bytes or the end of the file; returns the bytes read, or -1 with errno. */
static int64_t read_at(int fd, void *data, int64_t n, int64_t offset) {
    int64_t done = 0;
    while (done < n) {
        ssize_t got = pread(fd, (char *)data + done, (size_t)(n - done), (off_t)(offset + done));
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) return -1;
        if (got == 0) break;
        done += got;
    }
    return done;
}

/* What the beginning of a file that is no shard looks like. */
static const char *guess_kind(const unsigned char *head, int64_t n) {
    static const struct {
        int32_t magic;
        const char *kind;
    } relatives[] = {
        {20240522, "a multiple-choice evaluation file of llm.c"},
        {20240326, "a GPT-2 model of llm.c"},
        {20240327, "a debug state of llm.c"},
        {20240328, "a tokenizer of llm.c"},
        {20240527, "an optimizer state of llm.c"},
        {20240803, "a Llama model of llm.c"},
    };
    int32_t magic = 0;
    if (n >= 4) memcpy(&magic, head, 4);
    for (size_t i = 0; i < sizeof relatives / sizeof relatives[0]; i++)
        if (magic == relatives[i].magic) return relatives[i].kind;
    if (n >= 2 && memcmp(head, "\x1F\x8B", 2) == 0) return "a gzip-compressed file";
    if (n >= 4 && memcmp(head, "PAR1", 4) == 0) return "a parquet file";
    if (n >= 6 && memcmp(head, "\x93NUMPY", 6) == 0) return "a numpy array";
    if (n >= 4 && memcmp(head, "PK\x03\x04", 4) == 0) return "a zip archive";
    int64_t n_control = 0;
    for (int64_t i = 0; i < n; i++)
        n_control += head[i] == 127 || (head[i] < 32 && head[i] != '\n' && head[i] != '\r' && head[i] != '\t');
    return n_control == 0 ? "text" : NULL;
}

/* head: the first n bytes of the file. Finds the format and the token count, or says why there is none. */
static int parse_header(const ShardFormat **format, int64_t *n_tokens, const char *path, const unsigned char *head,
                        int64_t n, char *err, char *hint) {
    err_set(hint, "%s", make_shards_hint);
    if (n == 0) return err_set(err, "%s: empty file, not a token shard", path);
    int32_t header[3] = {0, 0, 0};
    memcpy(header, head, n < 12 ? (size_t)n : 12);
    *format = NULL;
    for (int i = 0; i < N_FORMATS; i++) {
        if (header[0] == formats[i].magic) *format = &formats[i];
        if (header[0] == (int32_t)__builtin_bswap32((uint32_t)formats[i].magic)) {
            err_set(hint, "write it again with little-endian numbers, header and ids");
            return err_set(err, "%s: a token shard with its bytes swapped: magic %d read as big-endian is %d", path,
                           header[0], formats[i].magic);
        }
    }
    if (!*format) {
        const char *kind = guess_kind(head, n);
        return err_set(err, "%s: not a token shard%s%s (magic %d found, %d or %d expected)", path,
                       kind ? " but, it seems, " : "", kind ? kind : "", header[0], formats[0].magic, formats[1].magic);
    }
    if (n < SHARD_HEADER_BYTES)
        return err_set(err, "%s: truncated header: %lld bytes found, %d expected", path, (long long)n,
                       SHARD_HEADER_BYTES);
    if (header[1] != (*format)->version)
        return err_set(err, "%s: token shard of version %d found, version %d expected with magic %d (%d-bit ids)", path,
                       header[1], (*format)->version, header[0], 8 * (*format)->width);
    *n_tokens = header[2];
    return 0;
}

static int64_t size_by_header(const Shard *s) {
    return SHARD_HEADER_BYTES + s->n_tokens * s->width;
}

static int check_size(const Shard *s, char *err, char *hint) {
    long long expected = size_by_header(s);
    if (s->n_tokens < 0) return err_set(err, "%s: the header says %lld tokens", s->path, (long long)s->n_tokens);
    if (s->n_tokens == 0 && s->n_bytes == expected) {
        err_set(hint,
                "take it out of the folder or narrow the pattern; an empty shard is usually a failed preparation");
        return err_set(err, "%s: a token shard without a single token", s->path);
    }
    if (s->n_bytes == expected) return 0;
    err_set(hint, "copy or prepare the file again");
    return err_set(err, "%s: %s: %lld bytes found, %lld expected for the %lld tokens of %d bits in its header", s->path,
                   s->n_bytes < expected ? "truncated" : "longer than its header says", (long long)s->n_bytes, expected,
                   (long long)s->n_tokens, 8 * s->width);
}

static int open_plain_file(struct stat *st, const char *path, char *err, char *hint) {
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return err_set(err, "%s: cannot open: %s", path, strerror(errno));
    if (fstat(fd, st) == 0 && S_ISREG(st->st_mode)) return fd;
    if (S_ISDIR(st->st_mode)) err_set(hint, "name the files in it by a pattern, such as \"%s/*.bin\"", path);
    close(fd);
    return err_set(err, "%s: %s", path, S_ISDIR(st->st_mode) ? "is a folder" : "is not a plain file");
}

int shard_open(Shard *s, const char *path, bool keep_open, ZstPool *pool, char *err, char *hint) {
    memset(s, 0, sizeof *s);
    if (hint) hint[0] = 0;
    struct stat st;
    s->fd = open_plain_file(&st, path, err, hint);
    if (s->fd < 0) return -1;
    unsigned char head[HEAD_BYTES];
    const ShardFormat *format = NULL;
    s->path = strdup(path);
    CHECK(s->path, "no memory for a path");
    int64_t n = read_at(s->fd, head, HEAD_BYTES, 0);
    if (n < 0) {
        err_set(err, "%s: cannot read: %s", path, strerror(errno));
        goto failed;
    }
    const bool is_packed = zst_is_packed(head, n);
    if (is_packed && (n = zst_head(path, s->fd, head, HEAD_BYTES, shard_bytes_max, err)) < 0) {
        err_set(hint, "copy or prepare the file again");
        goto failed;
    }
    if (is_packed && n == 0) {
        err_set(hint, "copy or prepare the file again");
        err_set(err, "%s: a Zstandard file that ends, at byte %lld, before its content begins", path,
                (long long)st.st_size);
        goto failed;
    }
    if (parse_header(&format, &s->n_tokens, path, head, n, err, hint) != 0) goto failed;
    s->width = format->width;
    s->n_file_bytes = st.st_size;
    s->n_bytes = is_packed ? size_by_header(s) : st.st_size; /* zst_open sees that it is so */
    s->head_hash = hash_bytes(head, (size_t)n, 0);
    s->device = (uint64_t)st.st_dev;
    s->inode = (uint64_t)st.st_ino;
    if (check_size(s, err, hint) != 0) goto failed;
    if (is_packed && zst_open(&s->packed, pool, path, s->fd, s->n_bytes, err, hint) != 0) goto failed;
    if (hint) hint[0] = 0;
    if (!keep_open) {
        close(s->fd);
        s->fd = -1;
    }
    return 0;
failed:
    shard_close(s);
    return -1;
}

void shard_close(Shard *s) {
    if (s->path && s->fd >= 0) close(s->fd);
    zst_close(s->packed);
    free(s->path);
    memset(s, 0, sizeof *s);
    s->fd = -1;
}

static uint32_t id_at(const Shard *s, const unsigned char *raw, int64_t i) {
    uint32_t id = 0;
    memcpy(&id, raw + i * s->width, (size_t)s->width);
    return id;
}

/* Widens n raw ids; the check is done on the unsigned value, before it could turn negative. */
static int widen_ids(const Shard *s, int32_t *ids, const unsigned char *raw, int64_t first, int64_t n,
                     int64_t vocab_size, char *err) {
    uint32_t largest = 0;
    if (s->width == 2) {
        const uint16_t *narrow = (const uint16_t *)(const void *)raw;
        for (int64_t i = 0; i < n; i++) {
            ids[i] = narrow[i];
            largest = narrow[i] > largest ? narrow[i] : largest;
        }
    } else {
        const uint32_t *wide = (const uint32_t *)(const void *)raw;
        for (int64_t i = 0; i < n; i++) {
            ids[i] = (int32_t)wide[i];
            largest = wide[i] > largest ? wide[i] : largest;
        }
    }
    if (largest < vocab_size) return 0;
    int64_t i = 0;
    while (id_at(s, raw, i) < vocab_size) i++;
    return err_set(err, "%s: token %lld is id %u, outside the vocabulary of %lld, at byte %lld%s", s->path,
                   (long long)(first + i), id_at(s, raw, i), (long long)vocab_size,
                   (long long)(SHARD_HEADER_BYTES + (first + i) * s->width), s->packed ? " of the unpacked file" : "");
}

static int read_raw(const Shard *s, int fd, void *raw, int64_t n, int64_t offset, char *err) {
    if (s->packed) return zst_read(s->packed, fd, raw, n, offset, err);
    const int64_t got = read_at(fd, raw, n, offset);
    if (got < 0) return err_set(err, "%s: cannot read at byte %lld: %s", s->path, (long long)offset, strerror(errno));
    if (got == n) return 0;
    return err_set(err, "%s: has shrunk since the start: it ends at byte %lld, had %lld", s->path,
                   (long long)(offset + got), (long long)s->n_bytes);
}

int shard_read(const Shard *s, int32_t *ids, int64_t first, int64_t n, int64_t vocab_size, char *err) {
    CHECK(first >= 0 && n >= 0 && first + n <= s->n_tokens, "tokens %lld + %lld of %lld in %s", (long long)first,
          (long long)n, (long long)s->n_tokens, s->path);
    int fd = s->fd >= 0 ? s->fd : open(s->path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return err_set(err, "%s: cannot open: %s", s->path, strerror(errno));
    int result = 0;
    uint32_t raw[CHUNK_IDS];
    for (int64_t i = 0; i < n && result == 0; i += CHUNK_IDS) {
        const int64_t n_chunk = n - i < CHUNK_IDS ? n - i : CHUNK_IDS;
        result = read_raw(s, fd, raw, n_chunk * s->width, SHARD_HEADER_BYTES + (first + i) * s->width, err);
        if (result == 0)
            result = widen_ids(s, ids + i, (const unsigned char *)raw, first + i, n_chunk, vocab_size, err);
    }
    if (fd != s->fd) close(fd);
    return result;
}

void shard_will_read(const Shard *s, int64_t first, int64_t n) {
    if (s->packed) return;
    int fd = s->fd >= 0 ? s->fd : open(s->path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return; /* the read will say so */
    posix_fadvise(fd, (off_t)(SHARD_HEADER_BYTES + first * s->width), (off_t)(n * s->width), POSIX_FADV_WILLNEED);
    if (fd != s->fd) close(fd);
}

int shard_write(const char *path, const int32_t *ids, int64_t n, int width, char *err) {
    CHECK(width == 0 || width == 2 || width == 4, "width %d", width);
    if (n < 0 || n > SHARD_TOKENS_MAX)
        return err_set(err, "%s: %lld tokens, a shard holds at most %d", path, (long long)n, (int)SHARD_TOKENS_MAX);
    int32_t largest = 0;
    for (int64_t i = 0; i < n; i++) {
        if (ids[i] < 0) return err_set(err, "%s: token %lld is id %d, below zero", path, (long long)i, ids[i]);
        if (ids[i] > largest) largest = ids[i];
    }
    if (width == 0) width = largest > UINT16_MAX ? 4 : 2;
    if (width == 2 && largest > UINT16_MAX)
        return err_set(err, "%s: id %d does not fit 16 bits (at most %d): write 32-bit ids", path, largest, UINT16_MAX);
    size_t size = SHARD_HEADER_BYTES + (size_t)n * (size_t)width;
    unsigned char *file = (unsigned char *)calloc(size, 1);
    if (!file) return err_set(err, "%s: no memory for %zu bytes", path, size);
    const ShardFormat *format = width == formats[0].width ? &formats[0] : &formats[1];
    const int32_t header[3] = {format->magic, format->version, (int32_t)n};
    memcpy(file, header, sizeof header);
    for (int64_t i = 0; i < n; i++) memcpy(file + SHARD_HEADER_BYTES + i * width, &ids[i], (size_t)width);
    int result = file_write_durable(path, file, size, err);
    free(file);
    return result;
}
