/* See hf_files.h. */
#include "hf_files.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "data/json.h"
#include "hf.h"
#include "kernels/base/check.h"
#include "kernels/base/file.h"

#define INDEX_BYTES_MAX ((size_t)256 << 20)

static const char index_name[] = "model.safetensors.index.json", single_name[] = "model.safetensors";

static bool is_in(const char *dir, const char *name) {
    char path[PATH_MAX];
    return snprintf(path, sizeof path, "%s/%s", dir, name) < (int)sizeof path && path_exists(path);
}

bool hf_is_folder(const char *dir) {
    return is_in(dir, index_name) || is_in(dir, single_name);
}

static int open_file(HfFiles *f, const char *dir, const char *name, char *err) {
    char path[PATH_MAX];
    if (snprintf(path, sizeof path, "%s/%s", dir, name) >= (int)sizeof path)
        return err_set(err, "%s: the path of %.200s is too long", dir, name);
    SafetensorsFile *files = (SafetensorsFile *)realloc(f->files, (size_t)(f->n_files + 1) * sizeof *files);
    CHECK(files, "no memory for the list of %d files", f->n_files);
    f->files = files;
    if (safetensors_open(&f->files[f->n_files], path, err) != 0) return -1;
    f->n_files++;
    return 0;
}

static int by_name(const void *a, const void *b) {
    return strcmp(((const HfTensor *)a)->name, ((const HfTensor *)b)->name);
}

static int list_tensors(HfFiles *f, char *err) {
    int64_t n = 0;
    for (int k = 0; k < f->n_files; k++) n += f->files[k].n;
    f->tensors = (HfTensor *)calloc((size_t)n + 1, sizeof *f->tensors);
    CHECK(f->tensors, "no memory for the list of %lld tensors", (long long)n);
    for (int k = 0; k < f->n_files; k++)
        for (int64_t i = 0; i < f->files[k].n; i++)
            f->tensors[f->n++] = (HfTensor){f->files[k].entries[i].name, &f->files[k], &f->files[k].entries[i], false};
    qsort(f->tensors, (size_t)f->n, sizeof *f->tensors, by_name);
    for (int64_t i = 1; i < f->n; i++)
        if (by_name(&f->tensors[i - 1], &f->tensors[i]) == 0)
            return err_set(err, "%s is both in %s and in %s", f->tensors[i].name, f->tensors[i - 1].file->path,
                           f->tensors[i].file->path);
    return 0;
}

/* ---- the index --------------------------------------------------------------------------------------------------- */

static const char *base_name(const char *path) {
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

static int find_file(const HfFiles *f, const char *name) {
    int k = f->n_files - 1; /* indexes name a file many times in a row */
    while (k >= 0 && strcmp(base_name(f->files[k].path), name) != 0) k--;
    return k;
}

static int open_named_files(HfFiles *f, const char *dir, const cJSON *map, char *err) {
    const cJSON *item;
    cJSON_ArrayForEach(item, map) {
        if (!cJSON_IsString(item) || strchr(item->valuestring, '/') || !item->valuestring[0])
            return err_set(err, "%s/%s: %.200s is not placed in a file of this folder", dir, index_name, item->string);
        if (find_file(f, item->valuestring) < 0 && open_file(f, dir, item->valuestring, err) != 0) return -1;
    }
    return 0;
}

/* Both lists hold the same tensors in the same files. */
static int check_index(HfFiles *f, const char *dir, const cJSON *map, char *err) {
    const cJSON *item;
    cJSON_ArrayForEach(item, map) {
        HfTensor *t = hf_files_find(f, item->string);
        if (!t || strcmp(base_name(t->file->path), item->valuestring) != 0)
            return err_set(err, "%s/%s: %.200s is not in %.100s", dir, index_name, item->string, item->valuestring);
        t->is_used = true;
    }
    for (int64_t i = 0; i < f->n; i++) {
        if (!f->tensors[i].is_used)
            return err_set(err, "%s: %s is in this file, but not in %s", f->tensors[i].file->path, f->tensors[i].name,
                           index_name);
        f->tensors[i].is_used = false;
    }
    return 0;
}

static int open_by_index(HfFiles *f, const char *dir, char *err, char *hint) {
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/%s", dir, index_name);
    cJSON *root = json_load(path, INDEX_BYTES_MAX, err, hint);
    if (!root) return -1;
    const cJSON *map = cJSON_GetObjectItemCaseSensitive(root, "weight_map");
    int result = cJSON_IsObject(map) && map->child
                     ? 0
                     : err_set(err, "%s: no \"weight_map\" that places tensors in files", path);
    if (result == 0) result = open_named_files(f, dir, map, err);
    if (result == 0) result = list_tensors(f, err);
    if (result == 0) result = check_index(f, dir, map, err);
    cJSON_Delete(root);
    return result;
}

int hf_files_open(HfFiles *f, const char *dir, char *err, char *hint) {
    int result;
    memset(f, 0, sizeof *f);
    hint[0] = 0;
    if (is_in(dir, index_name)) {
        result = open_by_index(f, dir, err, hint);
    } else if (is_in(dir, single_name)) {
        result = open_file(f, dir, single_name, err);
        if (result == 0) result = list_tensors(f, err);
    } else {
        snprintf(hint, ERR_LEN, "other formats: load the model in transformers and save it with save_pretrained");
        result = err_set(err, "%s: neither %s nor %s in it", dir, single_name, index_name);
    }
    if (result != 0) hf_files_close(f);
    return result;
}

void hf_files_close(HfFiles *f) {
    for (int k = 0; k < f->n_files; k++) safetensors_close(&f->files[k]);
    free(f->files);
    free(f->tensors);
    memset(f, 0, sizeof *f);
}

HfTensor *hf_files_find(const HfFiles *f, const char *name) {
    const HfTensor key = {.name = name};
    return f->n ? (HfTensor *)bsearch(&key, f->tensors, (size_t)f->n, sizeof key, by_name) : NULL;
}
