/* One valid call of every op, as data: its arguments by name, and what the wrapper must say of them. Tests of the
 * wrappers take such a call, spoil one thing, and look. */
#ifndef TRAIN_MOE_TESTS_OP_CALLS_H
#define TRAIN_MOE_TESTS_OP_CALLS_H

#include "op_test.h"

enum { ARGS_MAX = 12 };

/* What the watcher must be told of an argument; UNUSED ones must not matter at all. */
enum { UNUSED = 0, READS = 1, WRITES = 2, BOTH = 3 };
/* ACT: f32 or bf16, else one dtype only. STRUCT: a pointer to StepStats and the like, which has no shape. */
enum { ACT = 1, OPTIONAL = 2, STRUCT = 4 };

typedef struct {
    const char *name;
    int access, kind;
    int free_dims; /* bit i: extent i may grow by one without contradicting another argument */
} ArgSpec;

typedef struct OpCall OpCall;
typedef struct {
    const char *name;
    void (*make)(OpCall *c); /* fills the arguments */
    void (*run)(const Device *d, OpCall *c);
    ArgSpec arg[ARGS_MAX]; /* in the order of the signature, NULL name at the end */
} OpSpec;

struct OpCall {
    Tensor a[ARGS_MAX];
    StepStats stats;
    StepParams params;
    UpdateState state;
    AttentionShape heads;
    RouterShape router;
    GemmKind kind;
    bool accumulate;
    double eps;
    int64_t vocab;
    int depth, first_slot;
    Stream stream;
};

extern const OpSpec op_specs[];
extern const int n_op_specs;

/* A valid call with reproducible values. Two calls of one op are equal. Structs point into *c: it must not move. */
void op_call_make(OpCall *c, const OpSpec *spec);
int op_n_args(const OpSpec *spec);
/* The spec of that name, the first if several share it. */
const OpSpec *op_spec(const char *name);

#endif
