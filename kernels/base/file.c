/* See file.h. */
#include "file.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "check.h"
#include "rng.h"

bool path_exists(const char *path) {
    struct stat st;
    return stat(path, &st) == 0;
}

int64_t file_size(const char *path) {
    struct stat st;
    return stat(path, &st) == 0 && S_ISREG(st.st_mode) ? (int64_t)st.st_size : -1;
}

int file_read_all(char **data, size_t *size, const char *path, size_t max_bytes, char *err) {
    *data = NULL;
    /* A pipe that nobody writes to would wait for ever. */
    const int fd = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC);
    FILE *f = fd < 0 ? NULL : fdopen(fd, "rb");
    if (!f) return err_set(err, "%s: cannot open: %s", path, strerror(errno));
    int result = -1;
    struct stat st;
    if (fstat(fileno(f), &st) != 0 || !S_ISREG(st.st_mode)) {
        err_set(err, "%s: not a plain file", path);
        goto done;
    }
    if ((uint64_t)st.st_size > max_bytes) {
        err_set(err, "%s: %lld bytes, at most %zu are read", path, (long long)st.st_size, max_bytes);
        goto done;
    }
    *size = (size_t)st.st_size;
    *data = (char *)malloc(*size + 1);
    if (!*data) {
        err_set(err, "%s: no memory for %zu bytes", path, *size);
        goto done;
    }
    if (fread(*data, 1, *size, f) != *size) {
        err_set(err, "%s: read error: %s", path, strerror(errno));
        free(*data);
        *data = NULL;
        goto done;
    }
    (*data)[*size] = 0;
    result = 0;
done:
    fclose(f);
    return result;
}

int file_sync(const char *path, char *err) {
    int fd = open(path, O_RDONLY);
    if (fd < 0) return err_set(err, "%s: cannot open: %s", path, strerror(errno));
    int rc = fsync(fd);
    int saved = errno;
    close(fd);
    if (rc != 0 && saved != EINVAL) return err_set(err, "%s: fsync: %s", path, strerror(saved));
    return 0;
}

static int sync_parent(const char *path, char *err) {
    char parent[PATH_MAX];
    snprintf(parent, sizeof parent, "%s", path);
    char *slash = strrchr(parent, '/');
    if (!slash) return file_sync(".", err);
    slash[slash == parent ? 1 : 0] = 0;
    return file_sync(parent, err);
}

int file_write_durable(const char *path, const void *data, size_t size, char *err) {
    char temporary[PATH_MAX];
    if (snprintf(temporary, sizeof temporary, "%s.tmp", path) >= (int)sizeof temporary)
        return err_set(err, "%s: path too long", path);
    FILE *f = fopen(temporary, "wb");
    if (!f) return err_set(err, "%s: cannot create: %s", temporary, strerror(errno));
    bool ok = fwrite(data, 1, size, f) == size && fflush(f) == 0 && fsync(fileno(f)) == 0;
    int saved = errno;
    ok = fclose(f) == 0 && ok;
    if (!ok) {
        unlink(temporary);
        return err_set(err, "%s: cannot write: %s", temporary, strerror(saved));
    }
    if (rename(temporary, path) != 0) return err_set(err, "%s: cannot rename: %s", path, strerror(errno));
    return sync_parent(path, err);
}

int dir_make(const char *path, char *err) {
    char part[PATH_MAX];
    size_t length = strlen(path);
    if (length == 0 || length >= sizeof part) return err_set(err, "'%s': not a usable folder name", path);
    memcpy(part, path, length + 1);
    for (size_t i = 1; i <= length; i++) {
        if (part[i] != '/' && part[i] != 0) continue;
        char kept = part[i];
        part[i] = 0;
        if (mkdir(part, 0777) != 0 && errno != EEXIST)
            return err_set(err, "%s: cannot make folder: %s", part, strerror(errno));
        part[i] = kept;
    }
    struct stat st;
    if (stat(path, &st) != 0 || !S_ISDIR(st.st_mode)) return err_set(err, "%s: is not a folder", path);
    return 0;
}

static int dir_remove_depth(const char *path, int depth, char *err) {
    DIR *d = opendir(path);
    if (!d) return err_set(err, "%s: cannot open: %s", path, strerror(errno));
    int result = 0;
    struct dirent *e;
    while (result == 0 && (e = readdir(d))) {
        if (strcmp(e->d_name, ".") == 0 || strcmp(e->d_name, "..") == 0) continue;
        char child[PATH_MAX];
        struct stat st;
        if (snprintf(child, sizeof child, "%s/%s", path, e->d_name) >= (int)sizeof child)
            result = err_set(err, "%s: path too long", path);
        else if (lstat(child, &st) == 0 && S_ISDIR(st.st_mode) && depth > 0)
            result = dir_remove_depth(child, depth - 1, err);
        else if (unlink(child) != 0)
            result = err_set(err, "%s: cannot remove: %s", child, strerror(errno));
    }
    closedir(d);
    if (result == 0 && rmdir(path) != 0) result = err_set(err, "%s: cannot remove: %s", path, strerror(errno));
    return result;
}

int dir_remove(const char *path, char *err) {
    return dir_remove_depth(path, 1, err);
}

uint64_t hash_bytes(const void *data, size_t size, uint64_t seed) {
    const unsigned char *p = (const unsigned char *)data;
    uint64_t h = seed ^ 0xCBF29CE484222325ull;
    size_t i = 0;
    for (; i + 8 <= size; i += 8) {
        uint64_t word;
        memcpy(&word, p + i, 8);
        h = (h ^ word) * 0x9E3779B97F4A7C15ull;
        h ^= h >> 29;
    }
    if (i < size) {
        uint64_t word = 0;
        memcpy(&word, p + i, size - i);
        h = (h ^ word ^ (uint64_t)(size - i) << 56) * 0x9E3779B97F4A7C15ull;
        h ^= h >> 29;
    }
    return mix64(h);
}
