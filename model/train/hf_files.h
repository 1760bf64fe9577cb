/* The safetensors files of a Hugging Face folder as one list of tensors, for hf_import.c alone. Floor 5. */
#ifndef TRAIN_MOE_HF_FILES_H
#define TRAIN_MOE_HF_FILES_H

#include "data/safetensors.h"

typedef struct {
    const char *name; /* borrowed from the file */
    const SafetensorsFile *file;
    const SafetensorsEntry *entry;
    bool is_used; /* the caller's mark */
} HfTensor;

typedef struct {
    int n_files;
    SafetensorsFile *files;
    int64_t n;
    HfTensor *tensors; /* sorted by name */
} HfFiles;

/* Opens model.safetensors, or all that model.safetensors.index.json names: every file it names has to be there, hold
 * exactly the tensors that it places there, and no tensor may be in two. Returns 0, or -1 with err and hint; then
 * nothing needs closing. */
int hf_files_open(HfFiles *f, const char *dir, char *err, char *hint);
void hf_files_close(HfFiles *f);

/* NULL if there is none. */
HfTensor *hf_files_find(const HfFiles *f, const char *name);

#endif
