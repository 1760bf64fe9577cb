/* The wrappers of the ops: they stop every call that breaks its contract, name the op and the argument, and tell the
 * watcher the truth about what is read and written. */
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

#include "op_calls.h"

enum { ABORTED = 128 + SIGABRT, LET_PASS = 77 };

/* ---- calls that break a contract --------------------------------------------------------------------------------- */

typedef struct {
    const OpSpec *spec;
    OpCall call;
} Broken;

/* The watcher runs behind all checks and before the op: who comes here was let pass. */
static void let_pass(void *watcher, const char *op, Stream s, const Tensor *writes, int n_writes, const Tensor *reads,
                     int n_reads) {
    (void)watcher, (void)op, (void)s, (void)writes, (void)n_writes, (void)reads, (void)n_reads;
    exit(LET_PASS);
}

static void run_broken(void *arg) {
    Broken *b = (Broken *)arg;
    const Device device = {.ops = ops_cpu(), .watch = let_pass};
    const struct rlimit no_core = {0, 0};
    setrlimit(RLIMIT_CORE, &no_core);
    b->spec->run(&device, &b->call);
}

/* `arg` NULL: the message names the op; another argument may be the one that no longer fits. */
static void expect_refused(Broken *b, const char *arg, const char *what) {
    char text[64];
    snprintf(text, sizeof text, arg ? "%s: %s" : "%s", b->spec->name, arg);
    EXPECT(expect_exit(ABORTED, text, run_broken, b), "%s: %s %s", b->spec->name, arg ? arg : "", what);
}

static void expect_passes(Broken *b, const char *what) {
    EXPECT(expect_exit(LET_PASS, NULL, run_broken, b), "%s: %s", b->spec->name, what);
}

static Broken broken(const OpSpec *spec) {
    Broken b = {.spec = spec};
    return b;
}

static void spoil_dtype(const OpSpec *spec, int arg) {
    const ArgSpec *a = &spec->arg[arg];
    for (Dtype dtype = DTYPE_NONE; dtype < DTYPE_COUNT; dtype++) {
        Broken b = broken(spec);
        op_call_make(&b.call, spec);
        Tensor *t = &b.call.a[arg];
        const bool is_act = dtype == DTYPE_F32 || dtype == DTYPE_BF16;
        if (dtype == t->dtype || (is_act && (a->kind & ACT)) || (dtype == DTYPE_NONE && (a->kind & OPTIONAL))) continue;
        t->dtype = dtype;
        expect_refused(&b, a->name, dtype_name(dtype));
    }
}

static void spoil_form(const OpSpec *spec, int arg) {
    for (int what = 0; what < 4; what++) {
        /* Two tensors of different rank: a copy cannot say which of them is wrong. */
        const char *name = what < 2 && strcmp(spec->name, "copy") == 0 ? NULL : spec->arg[arg].name;
        Broken b = broken(spec);
        op_call_make(&b.call, spec);
        Tensor *t = &b.call.a[arg];
        const int ndim = t->ndim;
        if (what == 0) t->shape[t->ndim++] = 1;
        if (what == 1) t->ndim--;
        if (what == 2) t->data = NULL;
        if (what == 3) t->ld = ndim == 2 ? t->shape[1] - 1 : t->ld + 1;
        expect_refused(&b, name, what == 0 ? "a dim more" : what == 1 ? "a dim less" : what == 2 ? "no memory" : "ld");
    }
}

static void spoil_extents(const OpSpec *spec, int arg) {
    for (int dim = 0; dim < 3; dim++) {
        Broken b = broken(spec);
        op_call_make(&b.call, spec);
        Tensor *t = &b.call.a[arg];
        if (dim >= t->ndim) break;
        t->shape[dim]++;
        if (dim == t->ndim - 1 && dim > 0) t->ld++;
        if (spec->arg[arg].free_dims >> dim & 1)
            expect_passes(&b, spec->arg[arg].name);
        else
            expect_refused(&b, NULL, spec->arg[arg].name);
    }
}

/* Every argument of every op: another dtype, another number of dims, no memory, a wrong stride, each extent one larger.
 * zero and copy take any dtype. */
TEST(ops_refuse_wrong_tensors) {
    int n_args = 0;
    for (int i = 0; i < n_op_specs; i++) {
        const bool any_dtype = strcmp(op_specs[i].name, "zero") == 0 || strcmp(op_specs[i].name, "copy") == 0;
        for (int arg = 0; arg < op_n_args(&op_specs[i]); arg++) {
            if (op_specs[i].arg[arg].kind & STRUCT) continue;
            if (!any_dtype) spoil_dtype(&op_specs[i], arg);
            spoil_form(&op_specs[i], arg);
            spoil_extents(&op_specs[i], arg);
            t_free_all();
            n_args++;
        }
    }
    EXPECT(n_args > 130, "the table names only %d tensors", n_args);
}

TEST(ops_accept_absent_optional_tensors) {
    for (int i = 0; i < n_op_specs; i++) {
        Broken b = broken(&op_specs[i]);
        op_call_make(&b.call, b.spec);
        int n_absent = 0;
        for (int arg = 0; arg < op_n_args(b.spec); arg++)
            if (b.spec->arg[arg].kind & OPTIONAL) b.call.a[arg] = tensor_none(), n_absent++;
        if (n_absent == 0) continue;
        expect_passes(&b, "without its optional tensors");
        b.spec->run(DEV, &b.call);
        if (strcmp(b.spec->name, "residual_rmsnorm_forward") == 0) {
            b.call.a[0] = tensor_none(); /* r, which only a branch needs */
            expect_passes(&b, "without r");
            b.spec->run(DEV, &b.call);
        }
        t_free_all();
    }
}

/* ---- aliases ----------------------------------------------------------------------------------------------------- */

static const struct {
    const char *op, *output, *input;
} allowed_aliases[] = {
    {"residual_rmsnorm_forward", "r", "x"},
    {"residual_rmsnorm_backward", "dx", "dr"},
    {"rope_split_forward", "q", "q_in"},
    {"rope_split_backward", "dq_in", "dq"},
    {"rope_forward", "y", "x"},
};

static bool may_alias(const OpSpec *spec, int output, int other) {
    for (size_t i = 0; i < sizeof allowed_aliases / sizeof *allowed_aliases; i++)
        if (strcmp(spec->name, allowed_aliases[i].op) == 0 &&
            strcmp(spec->arg[output].name, allowed_aliases[i].output) == 0 &&
            strcmp(spec->arg[other].name, allowed_aliases[i].input) == 0)
            return true;
    return false;
}

/* Each output put on every other argument; r of a norm also on a branch, which would pass as its in-place input. */
TEST(ops_refuse_outputs_that_lie_on_others) {
    int n_allowed = 0;
    for (int i = 0; i < n_op_specs; i++) {
        const OpSpec *spec = &op_specs[i];
        for (int out = 0; out < op_n_args(spec); out++) {
            for (int other = 0; other < op_n_args(spec); other++) {
                if (!(spec->arg[out].access & WRITES) || other == out || spec->arg[other].access == UNUSED) continue;
                if ((spec->arg[out].kind | spec->arg[other].kind) & STRUCT) continue;
                Broken b = broken(spec);
                op_call_make(&b.call, spec);
                b.call.a[out].data = b.call.a[other].data;
                if (may_alias(spec, out, other))
                    n_allowed++, expect_passes(&b, spec->arg[other].name);
                else
                    expect_refused(&b, NULL, spec->arg[other].name);
                t_free_all();
            }
        }
    }
    EXPECT_EQ(n_allowed, 6); /* the backward of a norm stands twice in the table */
}

/* ---- scalars ----------------------------------------------------------------------------------------------------- */

static void set_bad_stream(OpCall *c) {
    c->stream = STREAM_COUNT;
}
static void set_negative_stream(OpCall *c) {
    c->stream = (Stream)-1;
}
static void set_eps_zero(OpCall *c) {
    c->eps = 0;
}
static void set_eps_nan(OpCall *c) {
    c->eps = NAN;
}
static void set_no_r(OpCall *c) {
    c->a[0] = tensor_none();
}
static void set_wgrad(OpCall *c) {
    c->kind = GEMM_WGRAD;
}
static void set_odd_rope(OpCall *c) {
    c->heads.rope = 3, c->heads.nope = 4;
}
static void set_no_heads(OpCall *c) {
    c->heads.n_heads = 0;
}
static void set_uneven_groups(OpCall *c) {
    c->router.n_group = 3;
}
static void set_too_many_groups(OpCall *c) {
    c->router.topk_group = 3;
}
static void set_narrow_groups(OpCall *c) {
    c->router.n_group = 4;
}
static void set_uneven_sequence(OpCall *c) {
    c->router.seq_len = 4;
}
static void set_no_sequence(OpCall *c) {
    c->router.seq_len = 0;
}
static void set_slot_behind_end(OpCall *c) {
    c->first_slot = 3;
}
static void set_negative_slot(OpCall *c) {
    c->first_slot = -1;
}
static void set_small_capacity(OpCall *c) {
    c->a[0].shape[0]--, c->a[1].shape[0]--;
}
static void set_no_local_expert(OpCall *c) {
    for (int i = 0; i < ARGS_MAX; i++)
        if (c->a[i].dtype == DTYPE_I32 && c->a[i].ndim == 1 && c->a[i].shape[0] == 3) c->a[i].shape[0] = 1;
}
static void set_large_vocabulary(OpCall *c) {
    c->vocab = c->a[1].shape[1] + 1;
}
static void set_no_vocabulary(OpCall *c) {
    c->vocab = 0;
}
static void set_deep(OpCall *c) {
    c->depth = LOSSES_MAX;
}
static void set_negative_depth(OpCall *c) {
    c->depth = -1;
}
static void set_narrow_h(OpCall *c) {
    c->a[1].shape[1]--;
}
static void set_no_dweight(OpCall *c) {
    c->a[1] = tensor_none();
}
static void set_no_weight(OpCall *c) {
    c->a[4] = tensor_none();
}

static const struct {
    const char *op;
    void (*spoil)(OpCall *c);
    const char *text; /* behind the op's name */
} scalar_cases[] = {
    {"zero", set_bad_stream, "stream 4"},
    {"gemm", set_negative_stream, "stream -1"},
    {"update_gate", set_bad_stream, "stream 4"},
    {"residual_rmsnorm_forward", set_eps_zero, "eps 0"},
    {"residual_rmsnorm_forward", set_eps_nan, "eps"},
    {"residual_rmsnorm_forward", set_no_r, "r is none"},
    {"grouped_gemm", set_wgrad, "kind 2"},
    {"rope_split_forward", set_odd_rope, "heads 2, widths 4 + 3, 5"},
    {"rope_split_backward", set_odd_rope, "heads"},
    {"rope_forward", set_odd_rope, "heads 2, widths 4 + 3, 5"},
    {"attention_forward", set_no_heads, "heads 0"},
    {"attention_decode", set_no_heads, "heads 0"},
    {"head_gemm", set_wgrad, "kind 2, 2 heads"},
    {"attention_backward", set_odd_rope, "heads"},
    {"router_forward", set_uneven_groups, "E 4, K 2, groups 3"},
    {"router_forward", set_too_many_groups, "K 2 of 3 groups"},
    {"router_forward", set_narrow_groups, "K 2 of 1 groups of 1"},
    {"router_forward", set_uneven_sequence, "T 6, S 4"},
    {"router_backward", set_uneven_sequence, "T 6, S 4"},
    {"router_backward", set_no_sequence, "T 6, S 0"},
    {"moe_map", set_slot_behind_end, "slots [3, +2) of 4"},
    {"moe_map", set_negative_slot, "slots [-1"},
    {"moe_map", set_small_capacity, "capacity 265 below 266"},
    {"moe_map", set_no_local_expert, "no local expert"},
    {"gather_rows", set_no_local_expert, "no local expert"},
    {"cross_entropy", set_large_vocabulary, "vocabulary 14 of 13"},
    {"cross_entropy", set_no_vocabulary, "vocabulary 0"},
    {"cross_entropy", set_deep, "depth 5"},
    {"loss_sum", set_negative_depth, "depth -1"},
    {"swiglu_forward", set_narrow_h, "h has 5 columns for width 3"},
    {"swiglu_backward", set_no_dweight, "dweight"},
    {"swiglu_backward", set_no_weight, "dweight"},
};

TEST(ops_refuse_wrong_scalars) {
    for (size_t i = 0; i < sizeof scalar_cases / sizeof *scalar_cases; i++) {
        Broken b = broken(op_spec(scalar_cases[i].op));
        op_call_make(&b.call, b.spec);
        scalar_cases[i].spoil(&b.call);
        expect_refused(&b, scalar_cases[i].text, "");
        t_free_all();
    }
}

static void record_event(void *arg) {
    op_event_record(DEV, *(int *)arg, STREAM_COMPUTE);
}
static void wait_event(void *arg) {
    op_event_wait(DEV, *(int *)arg, STREAM_COMPUTE);
}

TEST(ops_refuse_events_that_do_not_exist) {
    int event = EVENTS_MAX;
    EXPECT(expect_exit(ABORTED, "event 64", record_event, &event));
    EXPECT(expect_exit(ABORTED, "event 64", wait_event, &event));
    event = -1;
    EXPECT(expect_exit(ABORTED, "event -1", record_event, &event));
    event = EVENTS_MAX - 1;
    EXPECT(expect_exit(0, NULL, wait_event, &event));
}

/* ---- the table of a backend -------------------------------------------------------------------------------------- */

static void check_without_member(void *arg) {
    const struct rlimit no_core = {0, 0};
    setrlimit(RLIMIT_CORE, &no_core);
    Ops ops = *ops_cpu();
    memset((char *)&ops + *(size_t *)arg * sizeof(void *), 0, sizeof(void *));
    ops_check_complete(&ops);
}

TEST(ops_check_complete_finds_each_missing_member) {
    ops_check_complete(ops_cpu());
    const size_t n = sizeof(Ops) / sizeof(void *);
    for (size_t i = 0; i < n; i++) {
        char text[64];
        snprintf(text, sizeof text, "backend %s: member %zu of Ops is not set", i == 0 ? "?" : "cpu", i);
        EXPECT(expect_exit(ABORTED, text, check_without_member, &i), "member %zu", i);
    }
}

/* ---- what the watcher is told ------------------------------------------------------------------------------------ */

typedef struct {
    int n_calls;
    char op[64];
    Stream stream;
    int n_writes, n_reads;
    const void *writes[ARGS_MAX], *reads[ARGS_MAX];
    const void *probe;    /* a byte that the op will change ... */
    unsigned char before; /* ... and what it was when the watcher was called */
} Seen;

static void see(void *watcher, const char *op, Stream s, const Tensor *writes, int n_writes, const Tensor *reads,
                int n_reads) {
    Seen *seen = (Seen *)watcher;
    seen->n_calls++;
    snprintf(seen->op, sizeof seen->op, "%s", op);
    seen->stream = s;
    seen->n_writes = seen->n_reads = 0;
    for (int i = 0; i < n_writes && writes; i++)
        if (!tensor_is_none(writes[i])) seen->writes[seen->n_writes++] = writes[i].data;
    for (int i = 0; i < n_reads; i++)
        if (!tensor_is_none(reads[i])) seen->reads[seen->n_reads++] = reads[i].data;
    if (seen->probe) seen->before = *(const unsigned char *)seen->probe;
}

static bool is_in(const void *const *list, int n, const void *p) {
    for (int i = 0; i < n; i++)
        if (list[i] == p) return true;
    return false;
}

TEST(ops_watcher_sees_what_is_read_and_written) {
    for (int i = 0; i < n_op_specs; i++) {
        const OpSpec *spec = &op_specs[i];
        Seen seen = {0};
        const Device device = {.ops = ops_cpu(), .watch = see, .watcher = &seen};
        OpCall c;
        op_call_make(&c, spec);
        c.stream = STREAM_AUX;
        spec->run(&device, &c);
        EXPECT(seen.n_calls == 1 && strcmp(seen.op, spec->name) == 0 && seen.stream == STREAM_AUX, "%s: %d calls of %s",
               spec->name, seen.n_calls, seen.op);
        int n_writes = 0, n_reads = 0;
        for (int arg = 0; arg < op_n_args(spec); arg++) {
            const int access = spec->arg[arg].access;
            const bool is_written = is_in(seen.writes, seen.n_writes, c.a[arg].data);
            const bool is_read = is_in(seen.reads, seen.n_reads, c.a[arg].data);
            EXPECT(is_written == !!(access & WRITES), "%s: writes of %s", spec->name, spec->arg[arg].name);
            EXPECT(is_read == !!(access & READS), "%s: reads of %s", spec->name, spec->arg[arg].name);
            n_writes += !!(access & WRITES), n_reads += !!(access & READS);
        }
        EXPECT(seen.n_writes == n_writes && seen.n_reads == n_reads, "%s: %d writes and %d reads", spec->name,
               seen.n_writes, seen.n_reads);
        t_free_all();
    }
}

TEST(ops_watcher_sees_copies_and_events_and_comes_first) {
    Seen seen = {0};
    const Device device = {.ops = ops_cpu(), .watch = see, .watcher = &seen};
    unsigned char host[4] = {7, 7, 7, 7}, memory[4] = {1, 1, 1, 1};
    seen.probe = memory;
    op_copy_in(&device, memory, host, sizeof host, STREAM_COPY);
    EXPECT(strcmp(seen.op, "copy_in") == 0 && seen.n_writes == 1 && seen.writes[0] == memory && seen.n_reads == 0);
    EXPECT(seen.before == 1 && memory[0] == 7 && memory[3] == 7, "watched at %d", seen.before);
    seen.probe = host;
    memory[0] = 9;
    op_copy_out(&device, host, memory, sizeof host, STREAM_COPY);
    EXPECT(strcmp(seen.op, "copy_out") == 0 && seen.n_reads == 1 && seen.reads[0] == memory && seen.n_writes == 0);
    EXPECT(seen.before == 7 && host[0] == 9 && seen.stream == STREAM_COPY, "watched at %d", seen.before);
    op_event_record(&device, 3, STREAM_AUX);
    EXPECT(strcmp(seen.op, "event_record") == 0 && seen.stream == STREAM_AUX);
    op_event_wait(&device, 3, STREAM_COMM);
    EXPECT(strcmp(seen.op, "event_wait") == 0 && seen.stream == STREAM_COMM && seen.n_calls == 4);
}

/* ---- and whether it is true -------------------------------------------------------------------------------------- */

static void fill_bytes(Tensor t, int byte) {
    memset(t.data, byte, tensor_bytes(t));
}

static void *bytes_of(Tensor t) {
    Tensor copy = T1(DTYPE_E4M3, (int64_t)tensor_bytes(t));
    memcpy(copy.data, t.data, tensor_bytes(t));
    return copy.data;
}

/* One run over outputs filled with `byte`; arguments that the op is not to touch are filled too. */
static void run_over(const OpSpec *spec, OpCall *c, int byte) {
    void *before[ARGS_MAX];
    op_call_make(c, spec);
    for (int arg = 0; arg < op_n_args(spec); arg++) {
        if (!(spec->arg[arg].access & READS)) fill_bytes(c->a[arg], byte);
        before[arg] = bytes_of(c->a[arg]);
    }
    spec->run(DEV, c);
    for (int arg = 0; arg < op_n_args(spec); arg++)
        EXPECT((spec->arg[arg].access & WRITES) || memcmp(before[arg], c->a[arg].data, tensor_bytes(c->a[arg])) == 0,
               "%s wrote %s", spec->name, spec->arg[arg].name);
}

static bool is_filled(const unsigned char *p, size_t n, int byte) {
    for (size_t i = 0; i < n; i++)
        if (p[i] != byte) return false;
    return true;
}

/* Nothing is written but the outputs, and neither what they held before nor an unused argument reaches a result: each
 * element is the same after both runs, or was left alone in both (rows that no token fills). */
TEST(ops_touch_what_they_say) {
    for (int i = 0; i < n_op_specs; i++) {
        const OpSpec *spec = &op_specs[i];
        OpCall first, second;
        run_over(spec, &first, 0xA5);
        run_over(spec, &second, 0x3C);
        for (int arg = 0; arg < op_n_args(spec); arg++) {
            if (!(spec->arg[arg].access & WRITES)) continue;
            const size_t size = dtype_size(first.a[arg].dtype), n = tensor_bytes(first.a[arg]) / size;
            size_t n_written = 0;
            for (size_t k = 0; k < n; k++) {
                const unsigned char *a = (const unsigned char *)first.a[arg].data + k * size;
                const unsigned char *b = (const unsigned char *)second.a[arg].data + k * size;
                const bool is_same = memcmp(a, b, size) == 0;
                EXPECT(is_same || (is_filled(a, size, 0xA5) && is_filled(b, size, 0x3C)),
                       "%s: %s[%zu] depends on what was there", spec->name, spec->arg[arg].name, k);
                n_written += is_same;
            }
            EXPECT(n_written > 0, "%s wrote nothing into %s", spec->name, spec->arg[arg].name);
        }
        t_free_all();
    }
}
