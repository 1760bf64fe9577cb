/* What the tests of Hugging Face folders share: exports of a small model, and safetensors files that can be changed. */
#ifndef TRAIN_MOE_TESTS_HF_TEST_H
#define TRAIN_MOE_TESTS_HF_TEST_H

#include "data/json.h"
#include "data/safetensors.h"
#include "model/train/hf.h"
#include "tests/model/model_test.h"

/* HfExport's read from the masters of the Params `arg`. */
int hf_read_master(void *arg, const NamedTensor *t, float *out, char *err);
HfExport hf_export_of(Fixture *f, HfDtype dtype, int64_t shard_bytes_max);
/* Exports, or ends the test. */
HfReport hf_export_to(Fixture *f, const char *out, HfDtype dtype, int64_t shard_bytes_max);

/* Paths in the test's own folder, and in a folder; good for the next few calls. */
const char *hf_folder_of(const char *name);
const char *hf_file_in(const char *folder, const char *name);
/* A JSON file of a folder, for cJSON_Delete, or ends the test. */
cJSON *hf_json_of(const char *folder, const char *name);

/* What an element of a master becomes in a folder of this dtype (not FP8). */
float hf_stored(float x, const NamedTensor *t, HfDtype dtype);
/* Every element of the folder, read in odd pieces, is what the fixture's masters become. */
void hf_expect_weights(Fixture *f, const char *folder, HfDtype dtype, const char *what);

/* A safetensors file in memory, to be changed. */
typedef struct {
    int64_t n;
    SafetensorsEntry entry[512];
    char *data[512];
} Bag;

void bag_read(Bag *b, const char *path);
void bag_write(const Bag *b, const char *path);
int64_t bag_find(const Bag *b, const char *name); /* ends the test if there is none */
void bag_drop(Bag *b, int64_t i);
void bag_drop_prefix(Bag *b, const char *prefix); /* all whose names begin so */
/* data NULL: zeros. */
void bag_add(Bag *b, const char *name, SafetensorsDtype dtype, int ndim, const int64_t *shape, const void *data);
/* Frees what all bags point to. */
void free_bags(void);

#endif
