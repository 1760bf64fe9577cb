/* What zst.c (reading) and zst_open.c (the table of frames) share. */
#ifndef TRAIN_MOE_ZST_PARTS_H
#define TRAIN_MOE_ZST_PARTS_H

#include <pthread.h>
#include <zstd.h>

#include "zst.h"

enum { ZST_SLOTS = 8 };

typedef struct {
    int64_t packed, n_packed; /* where it begins in the file, and its bytes */
    int64_t unpacked;         /* where it begins in the unpacked bytes; it ends where the next one begins */
} ZstFrame;

struct ZstFile {
    char *path;
    ZstPool *pool;
    int64_t n_file, n_bytes; /* packed and unpacked */
    ZstFrame *frames;        /* n_frames + 1: the last one is the end */
    int64_t n_frames, room;
    int64_t in_temporary; /* where the unpacked bytes begin in the pool's temporary file; -1 = they are not there */
};

typedef struct {
    const ZstFile *file; /* NULL: empty */
    int64_t frame;
    uint64_t used_at;
    unsigned char *bytes;
    int64_t room;
} ZstSlot;

struct ZstPool {
    pthread_mutex_t lock; /* guards decoder, packed, slots */
    ZSTD_DCtx *decoder;
    unsigned char *packed;
    int64_t packed_room;
    ZstSlot slots[ZST_SLOTS];
    uint64_t clock;
    int temporary; /* fd; -1 = there is none yet */
    int64_t temporary_bytes;
    int n_unpacked;
};

/* pread until n bytes or the end of the file; returns the bytes read, or -1 with err. */
int64_t zst_read_packed(const char *path, int fd, void *data, int64_t n, int64_t offset, char *err);

/* The pool's decoder, at the beginning of a frame. */
ZSTD_DCtx *zst_decoder(ZstPool *pool);

#endif
