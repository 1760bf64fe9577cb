/* See ranks.h: one checkpoint of all ranks. Rank 0 writes it, and asks the others for what they own.
 *
 * Who owns what is not asked: every rank's list of parameters follows from its shape, so rank 0 walks them all. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "checkpoint_parts.h"
#include "kernels/base/check.h"
#include "kernels/base/file.h"
#include "kernels/base/ints.h"
#include "kernels/comm/watch.h"
#include "ranks.h"

/* ---- all that is saved ------------------------------------------------------------------------------------------- */

/* The lists of one rank with everything. */
typedef struct {
    Params params;
    StateTensor *tensors;
    int64_t n;
    const NamedTensor **named; /* of each */
} Whole;

static Whole whole_of(const ModelShape *of_a_rank) {
    Whole w;
    Arena counting = arena_make("all ranks' state", NULL, 0);
    params_make_whole(&w.params, of_a_rank);
    params_layout(&w.params, &counting);
    w.tensors = params_state(&w.params, &w.n);
    w.named = (const NamedTensor **)checkpoint_array(w.n, sizeof *w.named);
    int64_t at = 0;
    for (int64_t i = 0; i < w.params.n_named; i++) {
        const NamedTensor *t = &w.params.named[i];
        for (int k = 0; k < (t->optimizer == OPTIMIZER_NONE ? 1 : 3); k++) w.named[at++] = t;
    }
    CHECK(at == w.n, "%lld names of %lld tensors", (long long)at, (long long)w.n);
    return w;
}

static void whole_free(Whole *w) {
    params_free(&w->params);
    free(w->tensors);
    free(w->named);
}

int64_t ranks_checkpoint_bytes(const Params *params) {
    Whole whole = whole_of(&params->shape);
    const int64_t bytes = checkpoint_bytes(whole.tensors, whole.n);
    whole_free(&whole);
    return bytes;
}

/* ---- whose it is ------------------------------------------------------------------------------------------------- */

/* Elements of a tensor that a rank owns. */
typedef struct {
    uint64_t id; /* of the tensor's name */
    Interval part;
    int rank;
} Owned;

typedef struct {
    int64_t n, room;
    Owned *list; /* by id, then by first element */
} Owners;

static void add_owned(Owners *o, const NamedTensor *t, Interval part, int rank) {
    if (o->n == o->room) {
        o->room = 2 * o->room + 64;
        o->list = (Owned *)realloc(o->list, (size_t)o->room * sizeof *o->list);
        CHECK(o->list, "no memory for a list of %lld owners", (long long)o->room);
    }
    o->list[o->n++] = (Owned){t->id, part, rank};
}

static int compare_owned(const void *a, const void *b) {
    const Owned *x = (const Owned *)a, *y = (const Owned *)b;
    if (x->id != y->id) return x->id < y->id ? -1 : 1;
    return (x->part.first > y->part.first) - (x->part.first < y->part.first);
}

/* Of the ranks with these shapes, and experts as all of them have placed them. */
static Owners owners_of(const ModelShape *shapes, int world, const int32_t *expert_of_slot) {
    Owners o = {0, 0, NULL};
    for (int r = 0; r < world; r++) {
        Params p;
        params_make(&p, &shapes[r]);
        params_place(&p, expert_of_slot);
        for (int64_t i = 0; i < p.n_named; i++) {
            const Interval part = params_owned(&p, &p.named[i]);
            if (part.n > 0) add_owned(&o, &p.named[i], part, r);
        }
        params_free(&p);
    }
    qsort(o.list, (size_t)o.n, sizeof *o.list, compare_owned);
    return o;
}

/* The part of the tensor that holds element e. */
static const Owned *owned_at(const Owners *o, const NamedTensor *t, int64_t e) {
    int64_t low = 0, high = o->n; /* the last that does not begin behind e is in [low, high) */
    const Owned key = {t->id, {e, 0}, 0};
    while (high - low > 1) {
        const int64_t middle = low + (high - low) / 2;
        if (compare_owned(&o->list[middle], &key) <= 0)
            low = middle;
        else
            high = middle;
    }
    const Owned *found = &o->list[low];
    CHECK(o->n > 0 && found->id == t->id && e >= found->part.first && e < found->part.first + found->part.n,
          "%s: element %lld has no owner", t->name, (long long)e);
    return found;
}

/* ---- asking and answering ---------------------------------------------------------------------------------------- */

/* Rank 0 asks a rank for bytes [at, at + n) of a tensor; none of it: there is nothing more to ask. */
typedef struct {
    char name[TENSOR_NAME_LEN];
    int64_t at, n;
} Request;

typedef struct {
    const Device *device;
    const StateTensor **own; /* by name */
    int64_t n_own;
    /* rank 0: */
    Whole whole;
    Owners owners;
} Share;

static int compare_names(const void *a, const void *b) {
    return strcmp((*(const StateTensor *const *)a)->name, (*(const StateTensor *const *)b)->name);
}

static void sort_own(Share *s, const StateTensor *tensors, int64_t n) {
    s->own = (const StateTensor **)checkpoint_array(n, sizeof *s->own);
    s->n_own = n;
    for (int64_t i = 0; i < n; i++) s->own[i] = &tensors[i];
    qsort(s->own, (size_t)n, sizeof *s->own, compare_names);
}

static void read_own(const Share *s, const Request *request, void *out) {
    StateTensor key;
    const StateTensor *wanted = &key;
    memset(&key, 0, sizeof key);
    memcpy(key.name, request->name, sizeof key.name);
    const StateTensor **found =
        (const StateTensor **)bsearch(&wanted, s->own, (size_t)s->n_own, sizeof *s->own, compare_names);
    CHECK(found, "%s is asked of a rank that has it not", request->name);
    const StateTensor *t = *found;
    const int64_t width = (int64_t)dtype_size(t->dtype), from = request->at - t->offset * width;
    CHECK(from >= 0 && from + request->n <= t->extent * width, "%s: bytes %lld + %lld are asked of another rank",
          t->name, (long long)request->at, (long long)request->n);
    op_copy_out(s->device, out, (const char *)t->data + from, (size_t)request->n, STREAM_COPY);
    op_synchronize(s->device, STREAM_COPY);
}

static void read_from(const Share *s, int owner, const Request *request, void *out) {
    if (owner == 0) {
        read_own(s, request, out);
    } else {
        job_send(owner, request, sizeof *request);
        job_recv(owner, out, (size_t)request->n);
    }
}

static int read_from_owners(void *arg, const StateTensor *t, int64_t at, void *out, int64_t n, char *err) {
    const Share *s = (const Share *)arg;
    const NamedTensor *named = s->whole.named[t - s->whole.tensors];
    const int64_t width = (int64_t)dtype_size(t->dtype);
    Request request;
    (void)err;
    memset(&request, 0, sizeof request);
    memcpy(request.name, t->name, sizeof request.name);
    watch_beat(); /* the others wait for this rank, which writes */
    for (int64_t done = 0; done < n; done += request.n) {
        const Owned *owned = owned_at(&s->owners, named, (at + done) / width);
        request.at = at + done;
        request.n = min_i64(n - done, (owned->part.first + owned->part.n) * width - request.at);
        read_from(s, owned->rank, &request, (char *)out + done);
    }
    return 0;
}

static void serve(const Share *s) {
    Request request;
    char *block = NULL;
    int64_t size = 0;
    for (job_recv(0, &request, sizeof request); request.n > 0; job_recv(0, &request, sizeof request)) {
        if (request.n > size) {
            free(block);
            size = request.n;
            block = (char *)checkpoint_array(size, 1);
        }
        read_own(s, &request, block);
        job_send(0, block, (size_t)request.n);
    }
    free(block);
}

/* ---- saving ------------------------------------------------------------------------------------------------------ */

static int write_as_rank_0(Share *s, const Params *params, const ModelShape *shapes, int world, const char *run_dir,
                           const CheckpointInfo *info, char *path, int64_t *bytes, char *err) {
    s->whole = whole_of(&shapes[0]);
    s->owners = owners_of(shapes, world, params->expert_of_slot);
    const CheckpointSource source = {read_from_owners, s};
    const int result = checkpoint_save_from(run_dir, &source, s->whole.tensors, s->whole.n, info, CHECKPOINT_FILE_BYTES,
                                            path, bytes, err);
    Request nothing_more;
    memset(&nothing_more, 0, sizeof nothing_more);
    for (int rank = 1; rank < world; rank++) job_send(rank, &nothing_more, sizeof nothing_more);
    whole_free(&s->whole);
    free(s->owners.list);
    return result;
}

int ranks_save(const char *run_dir, const Device *d, const Comm *c, const Params *params, const StateTensor *tensors,
               int64_t n, const CheckpointInfo *info, char *path, int64_t *bytes, char *err) {
    const Mesh *m = &c->mesh;
    struct {
        int result;
        int64_t bytes;
        char path[CHECKPOINT_PATH_LEN], err[ERR_LEN];
    } outcome;
    memset(&outcome, 0, sizeof outcome);
    Share share;
    memset(&share, 0, sizeof share);
    share.device = d;
    if (m->world == 1) return checkpoint_save(run_dir, d, tensors, n, info, CHECKPOINT_FILE_BYTES, path, bytes, err);
    ModelShape *shapes = (ModelShape *)checkpoint_array(m->world, sizeof *shapes);
    job_gather(shapes, &params->shape, sizeof *shapes);
    sort_own(&share, tensors, n);
    if (m->rank == 0)
        outcome.result =
            write_as_rank_0(&share, params, shapes, m->world, run_dir, info, outcome.path, &outcome.bytes, outcome.err);
    else
        serve(&share);
    free(shapes);
    free(share.own);
    job_spread(&outcome, sizeof outcome);
    snprintf(path, CHECKPOINT_PATH_LEN, "%s", outcome.path);
    *bytes = outcome.bytes;
    if (outcome.result != 0) err_set(err, "%s", outcome.err);
    return outcome.result;
}
