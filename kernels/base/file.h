/* Files: whole reads, durable writes, folders, hashes of bytes. Floor 0.
 * Every function returns 0, or -1 with one line in err (ERR_LEN bytes) that names the path and the reason. */
#ifndef TRAIN_MOE_FILE_H
#define TRAIN_MOE_FILE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Reads a whole file of at most max_bytes. *data is malloc'd with a zero byte behind the content; the caller frees it.
 */
int file_read_all(char **data, size_t *size, const char *path, size_t max_bytes, char *err);

/* Writes path so that after a crash it holds either the old or the new content: temporary name beside it, fsync,
 * rename, fsync of the folder. */
int file_write_durable(const char *path, const void *data, size_t size, char *err);

/* fsync of a file or a folder by name. */
int file_sync(const char *path, char *err);

/* Makes a folder and its parents (mode 0777 less umask); no error if it is there. */
int dir_make(const char *path, char *err);

/* Removes a folder with the plain files in it and one more level of folders; symbolic links are unlinked, not followed.
 */
int dir_remove(const char *path, char *err);

bool path_exists(const char *path);
/* Size in bytes, or -1. */
int64_t file_size(const char *path);

/* FNV-like 64-bit hash over 8-byte words, in order; `seed` chains calls whose sizes are multiples of 8. */
uint64_t hash_bytes(const void *data, size_t size, uint64_t seed);

#ifdef __cplusplus
}
#endif
#endif
