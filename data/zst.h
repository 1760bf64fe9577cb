/* Zstandard files, read at any place. Floor 1.
 *
 * A Zstandard file is a row of frames, each of which can only be unpacked from its beginning. How a place in the
 * unpacked bytes is found depends on how the file was packed:
 *
 *   seekable      the last frame, a skippable one, is a table of all frames: packed and unpacked size. The layout is
 *                 that of zstd's contrib/seekable_format; `zstd -d` reads such a file like any other.
 *   small frames  no table: the file is unpacked once when it is opened, and the table is made on the way.
 *   large frames  some frame unpacks to more than ZST_FRAME_MAX, as in what the program zstd writes. Unpacking up to a
 *                 place again and again would take longer than training, so the file is unpacked once, when it is
 *                 opened, into a temporary file without a name ($TMPDIR, else /var/tmp), which goes when the process
 *                 does.
 *
 * Memory stays bounded whatever the frames claim: 24 bytes a frame, the pool's buffers, and a window of at most 128 MiB
 * while a file is unpacked as a whole. Checksums are verified where the packer wrote them. */
#ifndef TRAIN_MOE_ZST_H
#define TRAIN_MOE_ZST_H

#include <stdbool.h>
#include <stdint.h>

enum { ZST_FRAME_MAX = 4 << 20 };

/* What the files of a source share: a decoder, the frames unpacked last, the temporary file. Threads may share it. */
typedef struct ZstPool ZstPool;

ZstPool *zst_pool_new(void);
void zst_pool_free(ZstPool *pool); /* after its files; NULL is fine */
/* Files that were unpacked into the temporary file, and their unpacked bytes. */
int zst_pool_unpacked(const ZstPool *pool, int64_t *bytes);

/* Whether a file that begins with head[0..n) is a Zstandard file. */
bool zst_is_packed(const void *head, int64_t n);

/* head = the first n unpacked bytes, of a file that has at most n_max; returns how many there are, or -1 with err. */
int64_t zst_head(const char *path, int fd, void *head, int64_t n, int64_t n_max, char *err);

/* One file. */
typedef struct ZstFile ZstFile;

/* Makes the table of frames. n_bytes: how much the file must unpack to, which bounds what a damaged one can make this
 * do. Returns 0 and a file for zst_close, or -1 with file, byte and reason in err and what to do in hint: damage, a
 * file that ends inside a frame or unpacks to less or more, a table that does not fit, no room for the temporary file.
 * With a table only the table is looked at; damage behind it is met by zst_read. */
int zst_open(ZstFile **file, ZstPool *pool, const char *path, int fd, int64_t n_bytes, char *err, char *hint);
void zst_close(ZstFile *z); /* NULL is fine */

/* data = the unpacked bytes offset .. offset + n, which must lie in the file. fd: the file, open. Returns -1 with file,
 * byte and reason in err. Threads may share the file. */
int zst_read(const ZstFile *z, int fd, void *data, int64_t n, int64_t offset, char *err);

#endif
