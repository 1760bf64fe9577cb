/* Golden models: small random models with what other implementations compute for them, made by scripts/make_golden.py
 * (which describes the files). A case is tests/golden/NAME.json and NAME.safetensors. */
#ifndef TRAIN_MOE_TESTS_GOLDEN_H
#define TRAIN_MOE_TESTS_GOLDEN_H

#include <cjson/cJSON.h>

#include "data/safetensors.h"
#include "model_test.h"

typedef struct {
    Fixture f; /* the model of the case with its weights; f.batch and f.params of the last golden_batch */
    char name[64];
    cJSON *json;
    SafetensorsFile file;
    bool is_f64; /* computed in f64; else in f32 */
} Golden;

/* Builds the model of the case and loads every weight by its name in the parameter table. A tensor that one side has
 * and the other has not, or in another shape, fails the test by name. */
void golden_open(Golden *g, const char *name);
void golden_close(Golden *g);

/* The micro-batch and the parameters of step 0, 1, ... of the run. */
void golden_batch(Golden *g, int step);
int golden_steps(const Golden *g);

/* A tensor of the file as doubles; the shape must be (d0), or (d0, d1) with d1 > 0. malloc'd; the caller frees it. */
double *golden_tensor(const Golden *g, const char *name, int64_t d0, int64_t d1);
/* json[key][step], or json[key][step][depth] where depth >= 0. */
double golden_number(const Golden *g, const char *key, int step, int depth);

#endif
