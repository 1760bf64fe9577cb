/* See zst.h: the pool, and reading. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "kernels/base/check.h"
#include "zst_parts.h"

int64_t zst_read_packed(const char *path, int fd, void *data, int64_t n, int64_t offset, char *err) {
    int64_t done = 0;
    while (done < n) {
        ssize_t got = pread(fd, (char *)data + done, (size_t)(n - done), (off_t)(offset + done));
        if (got < 0 && errno == EINTR) continue;
        if (got < 0)
            return err_set(err, "%s: cannot read at byte %lld: %s", path, (long long)(offset + done), strerror(errno));
        if (got == 0) break;
        done += got;
    }
    return done;
}

static void grow(unsigned char **bytes, int64_t *room, int64_t n) {
    if (n <= *room) return;
    free(*bytes);
    *bytes = (unsigned char *)malloc((size_t)n);
    CHECK(*bytes, "no memory for %lld bytes", (long long)n);
    *room = n;
}

ZstPool *zst_pool_new(void) {
    ZstPool *pool = (ZstPool *)calloc(1, sizeof *pool);
    CHECK(pool && pthread_mutex_init(&pool->lock, NULL) == 0, "no memory for a pool");
    pool->temporary = -1;
    return pool;
}

void zst_pool_free(ZstPool *pool) {
    if (!pool) return;
    ZSTD_freeDCtx(pool->decoder);
    free(pool->packed);
    for (int i = 0; i < ZST_SLOTS; i++) free(pool->slots[i].bytes);
    if (pool->temporary >= 0) close(pool->temporary);
    pthread_mutex_destroy(&pool->lock);
    free(pool);
}

int zst_pool_unpacked(const ZstPool *pool, int64_t *bytes) {
    *bytes = pool->temporary_bytes;
    return pool->n_unpacked;
}

ZSTD_DCtx *zst_decoder(ZstPool *pool) {
    if (!pool->decoder) pool->decoder = ZSTD_createDCtx();
    CHECK(pool->decoder, "no memory for a decoder");
    ZSTD_DCtx_reset(pool->decoder, ZSTD_reset_session_only);
    return pool->decoder;
}

void zst_close(ZstFile *z) {
    if (!z) return;
    pthread_mutex_lock(&z->pool->lock);
    for (int i = 0; i < ZST_SLOTS; i++)
        if (z->pool->slots[i].file == z) z->pool->slots[i].file = NULL;
    pthread_mutex_unlock(&z->pool->lock);
    free(z->frames);
    free(z->path);
    free(z);
}

/* The slot that holds the frame; the one not used for the longest time is given up for it. NULL with err. */
static const ZstSlot *slot_of(const ZstFile *z, int fd, int64_t frame, char *err) {
    ZstPool *pool = z->pool;
    ZstSlot *slot = &pool->slots[0];
    for (int i = 0; i < ZST_SLOTS; i++) {
        ZstSlot *s = &pool->slots[i];
        if (s->file == z && s->frame == frame) {
            s->used_at = ++pool->clock;
            return s;
        }
        if (slot->file && (!s->file || s->used_at < slot->used_at)) slot = s;
    }
    const ZstFrame *f = &z->frames[frame];
    const int64_t n = f[1].unpacked - f->unpacked;
    slot->file = NULL;
    grow(&slot->bytes, &slot->room, n);
    grow(&pool->packed, &pool->packed_room, f->n_packed);
    const int64_t got = zst_read_packed(z->path, fd, pool->packed, f->n_packed, f->packed, err);
    if (got < 0) return NULL;
    if (got < f->n_packed) {
        err_set(err, "%s: has shrunk since the start: it ends at byte %lld, had %lld", z->path,
                (long long)(f->packed + got), (long long)z->n_file);
        return NULL;
    }
    const size_t size = ZSTD_decompressDCtx(zst_decoder(pool), slot->bytes, (size_t)n, pool->packed, (size_t)got);
    if (ZSTD_isError(size) || (int64_t)size != n) {
        err_set(err, "%s: the frame of bytes %lld to %lld is damaged: %s", z->path, (long long)f->packed,
                (long long)(f->packed + got), ZSTD_isError(size) ? ZSTD_getErrorName(size) : "it unpacks to less");
        return NULL;
    }
    slot->file = z;
    slot->frame = frame;
    slot->used_at = ++pool->clock;
    return slot;
}

int zst_read(const ZstFile *z, int fd, void *data, int64_t n, int64_t offset, char *err) {
    CHECK(offset >= 0 && n >= 0 && offset + n <= z->n_bytes, "bytes %lld + %lld of %lld", (long long)offset,
          (long long)n, (long long)z->n_bytes);
    if (z->in_temporary >= 0) {
        const int64_t got = zst_read_packed(z->path, z->pool->temporary, data, n, z->in_temporary + offset, err);
        if (got == n) return 0;
        return got < 0 ? -1 : err_set(err, "%s: its temporary file has become shorter", z->path);
    }
    int64_t low = 0, high = z->n_frames; /* frames[low].unpacked <= offset < frames[high].unpacked */
    while (high - low > 1) {
        const int64_t middle = low + (high - low) / 2;
        if (z->frames[middle].unpacked <= offset)
            low = middle;
        else
            high = middle;
    }
    int result = 0;
    pthread_mutex_lock(&z->pool->lock);
    for (int64_t done = 0; done < n && result == 0; low++) {
        const ZstSlot *slot = slot_of(z, fd, low, err);
        if (!slot) {
            result = -1;
            break;
        }
        const int64_t in_frame = offset + done - z->frames[low].unpacked;
        int64_t part = z->frames[low + 1].unpacked - z->frames[low].unpacked - in_frame;
        if (part > n - done) part = n - done;
        memcpy((char *)data + done, slot->bytes + in_frame, (size_t)part);
        done += part;
    }
    pthread_mutex_unlock(&z->pool->lock);
    return result;
}
