/* See hf.h: a folder that appears when it is whole. */
#include <dirent.h>
#include <errno.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "checkpoint.h"
#include "hf.h"
#include "kernels/base/check.h"
#include "kernels/base/file.h"

void hf_note(char *note, const char *fmt, ...) {
    const size_t used = strlen(note);
    if (used + 2 >= HF_NOTE_LEN) return;
    va_list args;
    va_start(args, fmt);
    vsnprintf(note + used, HF_NOTE_LEN - used - 1, fmt, args);
    va_end(args);
    strcat(note, "\n");
}

/* Is there nothing, or an empty folder? */
static int check_free(const char *out, char *err, char *hint) {
    DIR *d = opendir(out);
    if (!d && errno == ENOENT) return 0;
    if (!d) return err_set(err, "%s: %s", out, errno == ENOTDIR ? "is a file, not a folder" : strerror(errno));
    int n = 0;
    for (const struct dirent *e; n == 0 && (e = readdir(d));)
        n = strcmp(e->d_name, ".") != 0 && strcmp(e->d_name, "..") != 0;
    closedir(d);
    if (n == 0) return 0;
    snprintf(hint, ERR_LEN, "choose another --out, or empty it");
    return err_set(err, "%s: is not empty, and nothing in it is overwritten", out);
}

int hf_folder_begin(char *unfinished, const char *out, int64_t bytes, char *err, char *hint) {
    size_t length = strlen(out);
    while (length > 1 && out[length - 1] == '/') length--;
    hint[0] = 0;
    if (length == 0) return err_set(err, "--out is empty");
    if (snprintf(unfinished, HF_PATH_LEN, "%.*s.unfinished", (int)length, out) >= HF_PATH_LEN)
        return err_set(err, "%.200s...: the path is too long", out);
    if (check_free(out, err, hint) != 0) return -1;
    /* What an interrupted try left. */
    if (path_exists(unfinished) && dir_remove(unfinished, err) != 0) return -1;
    if (checkpoint_can_write(unfinished, bytes, err) == 0) return 0;
    dir_remove(unfinished, NULL);
    return -1;
}

int hf_folder_commit(const char *unfinished, const char *out, char *err) {
    char parent[HF_PATH_LEN];
    if (file_sync(unfinished, err) != 0) return -1;
    if (rename(unfinished, out) != 0) return err_set(err, "%s: cannot rename %s: %s", out, unfinished, strerror(errno));
    snprintf(parent, sizeof parent, "%s", unfinished);
    char *slash = strrchr(parent, '/');
    if (!slash) return file_sync(".", err);
    slash[slash == parent ? 1 : 0] = 0;
    return file_sync(parent, err);
}
