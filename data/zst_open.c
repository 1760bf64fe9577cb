/* See zst.h: opening, which makes the table of frames. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <zstd_errors.h>

#include "config.h"
#include "kernels/base/check.h"
#include "zst_parts.h"

enum { CHUNK = 1 << 17, FRAME_HEADER_MAX = 18, FOOTER_BYTES = 9, SKIPPABLE_BYTES = 8 };

/* Packed bytes beyond this bound for a frame are not data (a large skippable frame): no reason to read them each time.
 */
enum { PACKED_MAX = ZST_FRAME_MAX + (ZST_FRAME_MAX >> 7) + (1 << 16) };

static const uint32_t frame_magic = 0xFD2FB528, skippable_magic = 0x184D2A50, table_magic = 0x184D2A5E,
                      seekable_magic = 0x8F92EAB1;
static const char again_hint[] = "copy or prepare the file again";

static uint32_t word_at(const unsigned char *bytes) {
    uint32_t word;
    memcpy(&word, bytes, sizeof word);
    return word;
}

bool zst_is_packed(const void *head, int64_t n) {
    if (n < 4) return false;
    const uint32_t magic = word_at((const unsigned char *)head);
    return magic == frame_magic || (magic & 0xFFFFFFF0) == skippable_magic;
}

/* ---- the table --------------------------------------------------------------------------------------------------- */

static void add_frame(ZstFile *z, int64_t packed, int64_t n_packed, int64_t unpacked) {
    if (z->n_frames + 2 > z->room) {
        z->room = 2 * z->room + 64;
        z->frames = (ZstFrame *)realloc(z->frames, (size_t)z->room * sizeof *z->frames);
        CHECK(z->frames, "no memory for a table of %lld frames", (long long)z->room);
    }
    z->frames[z->n_frames++] = (ZstFrame){packed, n_packed, unpacked};
}

/* Whether the frame of these sizes is read by itself. */
static bool is_small(int64_t n_packed, int64_t n_unpacked) {
    return n_unpacked <= ZST_FRAME_MAX && n_packed <= PACKED_MAX;
}

static int check_total(const ZstFile *z, int64_t found, char *err, char *hint) {
    if (found == z->n_bytes) return 0;
    err_set(hint, "%s", again_hint);
    return err_set(err, "%s: %s: it unpacks to %s%lld bytes, its header says %lld (file of %lld bytes)", z->path,
                   found < z->n_bytes ? "truncated" : "longer than its header says",
                   found < z->n_bytes ? "" : "at least ", (long long)found, (long long)z->n_bytes,
                   (long long)z->n_file);
}

/* Reads the table at the end of the file. Returns 1 if there is none, 2 if frames are too large for it to be of use. */
static int read_table(ZstFile *z, int fd, char *err, char *hint) {
    unsigned char footer[FOOTER_BYTES];
    if (z->n_file < SKIPPABLE_BYTES + FOOTER_BYTES) return 1;
    if (zst_read_packed(z->path, fd, footer, FOOTER_BYTES, z->n_file - FOOTER_BYTES, err) < 0) return -1;
    if (word_at(footer + 5) != seekable_magic) return 1;
    const int entry = footer[4] & 0x80 ? 12 : 8; /* with a checksum, which the frames have themselves */
    const int64_t n = word_at(footer), n_entries = n * entry;
    const int64_t begin = z->n_file - FOOTER_BYTES - n_entries - SKIPPABLE_BYTES;
    int result = -1, n_large = 0;
    int64_t packed = 0, unpacked = 0;
    unsigned char *table = NULL;
    if (begin < 0) goto unfit;
    table = (unsigned char *)malloc((size_t)(SKIPPABLE_BYTES + n_entries));
    CHECK(table, "no memory for a table of %lld frames", (long long)n);
    if (zst_read_packed(z->path, fd, table, SKIPPABLE_BYTES + n_entries, begin, err) < 0) goto done;
    if (word_at(table) != table_magic || word_at(table + 4) != n_entries + FOOTER_BYTES) goto unfit;
    for (int64_t i = 0; i < n; i++) {
        const unsigned char *sizes = table + SKIPPABLE_BYTES + i * entry;
        const int64_t n_packed = word_at(sizes), n_unpacked = word_at(sizes + 4);
        n_large += !is_small(n_packed, n_unpacked);
        if (n_unpacked > 0) add_frame(z, packed, n_packed, unpacked);
        packed += n_packed;
        unpacked += n_unpacked;
        if (packed > begin) goto unfit;
    }
    if (packed != begin) goto unfit;
    if (check_total(z, unpacked, err, hint) != 0) goto done;
    result = n_large > 0 ? 2 : 0;
    goto done;
unfit:
    err_set(hint, "%s", again_hint);
    err_set(err, "%s: the table of %lld frames that ends at byte %lld does not fit the file before it", z->path,
            (long long)n, (long long)z->n_file);
done:
    free(table);
    return result;
}

/* ---- unpacking as a whole ---------------------------------------------------------------------------------------- */

static int write_temporary(ZstPool *pool, const char *path, const void *data, int64_t n, char *err, char *hint) {
    const char *folder = getenv("TMPDIR");
    if (!folder || !*folder) folder = "/var/tmp";
    err_set(hint,
            "set TMPDIR to a folder with room; or pack the shard in small frames: scripts/prepare_data.py --pack");
    if (pool->temporary < 0) {
        char name[PATH_LEN];
        snprintf(name, sizeof name, "%s/train_moe_XXXXXX", folder);
        pool->temporary = mkstemp(name);
        if (pool->temporary < 0) return err_set(err, "%s: cannot unpack to %s: %s", path, folder, strerror(errno));
        unlink(name);
    }
    for (int64_t done = 0; done < n;) {
        ssize_t put = pwrite(pool->temporary, (const char *)data + done, (size_t)(n - done),
                             (off_t)(pool->temporary_bytes + done));
        if (put < 0 && errno == EINTR) continue;
        if (put <= 0)
            return err_set(err, "%s: cannot unpack to %s: %s", path, folder, strerror(put < 0 ? errno : ENOSPC));
        done += put;
    }
    pool->temporary_bytes += n;
    hint[0] = 0;
    return 0;
}

typedef struct {
    const char *path;
    int fd;
    unsigned char *bytes; /* CHUNK */
    int64_t offset;       /* of bytes[0] in the file */
    ZSTD_inBuffer in;
} Input;

static int64_t input_at(const Input *input) {
    return input->offset + (int64_t)input->in.pos;
}

/* Makes `wanted` bytes available, unless the file ends before. Returns what is there, or -1 with err. */
static int64_t input_fill(Input *input, int64_t wanted, char *err) {
    int64_t there = (int64_t)(input->in.size - input->in.pos);
    if (there >= wanted) return there;
    input->offset = input_at(input);
    there = zst_read_packed(input->path, input->fd, input->bytes, CHUNK, input->offset, err);
    if (there < 0) return -1;
    input->in = (ZSTD_inBuffer){input->bytes, (size_t)there, 0};
    return there;
}

static int damaged(const char *path, int64_t at, int64_t frame_at, size_t code, char *err, char *hint) {
    if (hint) err_set(hint, "%s", again_hint);
    if (hint && ZSTD_getErrorCode(code) == ZSTD_error_frameParameter_windowTooLarge)
        err_set(hint, "pack it without --long: zstd -d --long=31, then scripts/prepare_data.py --pack");
    return err_set(err, "%s: damaged in the frame that begins at byte %lld, near byte %lld: %s", path,
                   (long long)frame_at, (long long)at, ZSTD_getErrorName(code));
}

/* At the first byte of a frame: the size that it claims, or -1 if it does not say. */
static int64_t claimed_size(const Input *input, int64_t there) {
    const unsigned long long size =
        ZSTD_getFrameContentSize((const char *)input->in.src + input->in.pos, (size_t)there);
    if (size == ZSTD_CONTENTSIZE_UNKNOWN || size == ZSTD_CONTENTSIZE_ERROR) return -1;
    return size > INT64_MAX ? INT64_MAX : (int64_t)size;
}

static int refuse_claim(const char *path, int64_t frame_at, int64_t claimed, int64_t n_max, char *err) {
    return err_set(err, "%s: the frame at byte %lld claims %lld bytes, the whole shard has at most %lld", path,
                   (long long)frame_at, (long long)claimed, (long long)n_max);
}

/* Unpacks the file from front to back and fills the table; with `keep`, into the temporary file. Returns 1 if it has
 * met a large frame and does not keep. */
static int unpack(ZstFile *z, Input *input, unsigned char *out, bool keep, char *err, char *hint) {
    ZSTD_DCtx *decoder = zst_decoder(z->pool);
    const int64_t base = z->pool->temporary_bytes;
    int64_t total = 0;
    bool has_large = false;
    z->n_frames = 0;
    for (;;) {
        const int64_t there = input_fill(input, FRAME_HEADER_MAX, err);
        if (there < 0) return -1;
        if (there == 0) break;
        const int64_t frame_at = input_at(input), first = total, claimed = claimed_size(input, there);
        if (claimed > z->n_bytes - total) {
            err_set(hint, "%s", again_hint);
            return refuse_claim(z->path, frame_at, claimed, z->n_bytes, err);
        }
        for (size_t left = 1; left != 0;) {
            ZSTD_outBuffer buffer = {out, CHUNK, 0};
            const int64_t more = input_fill(input, 1, err);
            if (more < 0) return -1;
            left = ZSTD_decompressStream(decoder, &buffer, &input->in);
            if (ZSTD_isError(left)) return damaged(z->path, input_at(input), frame_at, left, err, hint);
            total += (int64_t)buffer.pos;
            if (total > z->n_bytes) return check_total(z, total, err, hint);
            if (keep && write_temporary(z->pool, z->path, out, (int64_t)buffer.pos, err, hint) != 0) return -1;
            if (more > 0 || buffer.pos > 0 || left == 0) continue;
            err_set(hint, "%s", again_hint);
            return err_set(err, "%s: truncated: the file ends at byte %lld, inside the frame that begins at byte %lld",
                           z->path, (long long)input_at(input), (long long)frame_at);
        }
        const bool is_large = !is_small(input_at(input) - frame_at, total - first);
        if (is_large && !keep) return 1;
        has_large |= is_large;
        if (total > first) add_frame(z, frame_at, input_at(input) - frame_at, first);
    }
    if (check_total(z, total, err, hint) != 0) return -1;
    if (has_large) {
        z->in_temporary = base;
        z->pool->n_unpacked++;
    } else if (keep) {
        z->pool->temporary_bytes = base; /* not needed: the next file writes over it */
    }
    return 0;
}

/* Keeps what is unpacked at once if the first frame is large, or does not say. */
static int unpack_once(ZstFile *z, int fd, char *err, char *hint) {
    Input input = {z->path, fd, (unsigned char *)malloc(CHUNK), 0, {NULL, 0, 0}};
    unsigned char *out = (unsigned char *)malloc(CHUNK);
    CHECK(input.bytes && out, "no memory for unpacking");
    const int64_t base = z->pool->temporary_bytes;
    int64_t there = input_fill(&input, FRAME_HEADER_MAX, err);
    int result = there < 0 ? -1 : 1;
    if (result == 1) {
        const int64_t claimed = claimed_size(&input, there);
        const bool is_skippable = there >= 4 && word_at(input.bytes) != frame_magic;
        if (is_skippable || (claimed >= 0 && claimed <= ZST_FRAME_MAX))
            result = unpack(z, &input, out, false, err, hint);
    }
    if (result == 1) {
        input.offset = 0;
        input.in = (ZSTD_inBuffer){NULL, 0, 0};
        result = unpack(z, &input, out, true, err, hint);
    }
    if (result != 0) z->pool->temporary_bytes = base;
    free(input.bytes);
    free(out);
    return result;
}

/* ---- a file ------------------------------------------------------------------------------------------------------ */

/* Goes on to the end of a frame where that is near: there its checksum is, without which damage may look like content.
 */
int64_t zst_head(const char *path, int fd, void *head, int64_t n, int64_t n_max, char *err) {
    Input input = {path, fd, (unsigned char *)malloc(CHUNK), 0, {NULL, 0, 0}};
    ZSTD_DCtx *decoder = ZSTD_createDCtx();
    ZSTD_outBuffer out = {malloc(2 * CHUNK), 2 * CHUNK, 0};
    CHECK(input.bytes && decoder && out.dst && n <= CHUNK, "no memory for unpacking");
    int64_t there = 0, frame_at = 0, result = 0;
    size_t left = 0;
    while (result == 0 && out.pos < out.size && (left != 0 || (int64_t)out.pos < n)) {
        there = input_fill(&input, left ? 1 : FRAME_HEADER_MAX, err);
        if (there <= 0) break;
        if (left == 0) {
            frame_at = input_at(&input);
            if (claimed_size(&input, there) > n_max) {
                result = refuse_claim(path, frame_at, claimed_size(&input, there), n_max, err);
                break;
            }
        }
        left = ZSTD_decompressStream(decoder, &out, &input.in);
        if (ZSTD_isError(left)) result = damaged(path, input_at(&input), frame_at, left, err, NULL);
    }
    if (there < 0) result = -1;
    if (result == 0) {
        result = (int64_t)out.pos < n ? (int64_t)out.pos : n;
        memcpy(head, out.dst, (size_t)result);
    }
    ZSTD_freeDCtx(decoder);
    free(out.dst);
    free(input.bytes);
    return result;
}

int zst_open(ZstFile **file, ZstPool *pool, const char *path, int fd, int64_t n_bytes, char *err, char *hint) {
    ZstFile *z = (ZstFile *)calloc(1, sizeof *z);
    CHECK(z, "no memory for a file");
    z->path = strdup(path);
    CHECK(z->path, "no memory for a path");
    z->pool = pool;
    z->n_bytes = n_bytes;
    z->in_temporary = -1;
    z->n_file = (int64_t)lseek(fd, 0, SEEK_END);
    int result = z->n_file < 0 ? err_set(err, "%s: %s", path, strerror(errno)) : read_table(z, fd, err, hint);
    if (result > 0) {
        pthread_mutex_lock(&pool->lock);
        result = unpack_once(z, fd, err, hint);
        pthread_mutex_unlock(&pool->lock);
    }
    if (result != 0) {
        zst_close(z);
        return -1;
    }
    if (z->in_temporary >= 0) z->n_frames = 0;
    add_frame(z, z->n_file, 0, n_bytes);
    z->n_frames--;
    *file = z;
    return 0;
}
