/* See zero1.h. */
#include "zero1.h"

#include "kernels/base/check.h"
#include "kernels/base/ints.h"

enum {
    BUCKET_BYTES = 64 << 20, /* at most, where the ranks are not too many for that */
    PIECE_ALIGN = ARENA_ALIGN
};

typedef enum { GRADIENT, COPY, SCALES, WIDE } Part; /* of a weight */

typedef struct {
    const Weight *weight;
    Part part;
} Piece;

/* What moves of the weights of a block that one group of ranks shares. */
typedef struct {
    Group group;
    int n_ranks, rank, n_pieces;
    Piece piece[3 * WEIGHT_COUNT];
} Bucket;

static Bucket bucket_of(const Params *p, int block, Group group, Part part) {
    const ModelShape *s = &p->shape;
    const Block *b = params_block(p, block);
    const bool experts = group == GROUP_EXPERT_DATA;
    Bucket bucket;
    bucket.group = group;
    bucket.n_ranks = experts ? s->n_expert_data : s->n_data;
    bucket.rank = experts ? s->expert_data_rank : s->data_rank;
    bucket.n_pieces = 0;
    for (int id = 0; id < WEIGHT_COUNT; id++) {
        const Weight *w = &b->weight[id];
        if (w->numel == 0 || w->optimizer != OPTIMIZER_ADAMW || w->is_expert != experts) continue;
        bucket.piece[bucket.n_pieces++] = (Piece){w, part};
        if (part == COPY && w->w.dtype == DTYPE_E4M3) bucket.piece[bucket.n_pieces++] = (Piece){w, SCALES};
        if (part == COPY && !tensor_is_none(w->wide)) bucket.piece[bucket.n_pieces++] = (Piece){w, WIDE};
    }
    return bucket;
}

/* ---- slices ------------------------------------------------------------------------------------------------------ */

/* Words of four bytes, for what only moves. */
static Tensor words(void *data, int64_t first_byte, int64_t n_bytes) {
    return tensor_1d((char *)data + first_byte, DTYPE_I32, n_bytes / 4);
}

/* Rank r's shard of the k-th piece, where it lies. */
static Tensor shard_of(const Bucket *b, int k, int r) {
    const Weight *w = b->piece[k].weight;
    const Interval shard = w->shards[r];
    if (b->piece[k].part == GRADIENT) return tensor_rows(weight_flat(w->dw), shard.first, shard.n);
    if (b->piece[k].part == WIDE) return tensor_rows(weight_flat(w->wide), shard.first, shard.n);
    if (b->piece[k].part == SCALES) {
        const Interval scales = params_scales(w, shard);
        return words(w->w.scale, scales.first * 4, scales.n * 4);
    }
    if (w->w.dtype == DTYPE_E4M3) return words(w->w.data, shard.first, shard.n);
    return tensor_rows(weight_flat(w->w), shard.first, shard.n);
}

static int64_t piece_bytes(Tensor shard) {
    return round_up((int64_t)tensor_bytes(shard), PIECE_ALIGN);
}

/* Bytes of the longest rank's shards. */
static int64_t slice_bytes(const Bucket *b) {
    int64_t most = 0;
    for (int r = 0; r < b->n_ranks; r++) {
        int64_t bytes = 0;
        for (int k = 0; k < b->n_pieces; k++) bytes += piece_bytes(shard_of(b, k, r));
        most = max_i64(most, bytes);
    }
    return most;
}

typedef enum { PACK, UNPACK } Direction;

/* Bytes [from, from + n) of rank r's slice, between its shards and `slice`. */
static void copy_slice(const Bucket *b, const Device *d, int r, int64_t from, int64_t n, char *slice, Direction way) {
    int64_t at = 0;
    for (int k = 0; k < b->n_pieces; k++) {
        const Tensor shard = shard_of(b, k, r);
        const Interval wanted = {from, n}, has = {at, (int64_t)tensor_bytes(shard)},
                       part = interval_overlap(wanted, has);
        at += piece_bytes(shard);
        if (part.n == 0) continue;
        const int64_t width = (int64_t)dtype_size(shard.dtype);
        const Tensor home = tensor_rows(shard, (part.first - has.first) / width, part.n / width);
        const Tensor packed = tensor_1d(slice + (part.first - from), shard.dtype, part.n / width);
        if (way == PACK)
            op_copy(d, packed, home, STREAM_COMM);
        else
            op_copy(d, home, packed, STREAM_COMM);
    }
}

/* ---- pieces that fit the memory ---------------------------------------------------------------------------------- */

/* A piece of every rank's slice and, behind them, one more of this rank's. */
typedef struct {
    int64_t bytes; /* of a piece */
    char *all, *own;
    Tensor all_tensor, own_tensor; /* as f32, for sums; what is only moved does not mind */
} Pieces;

static Pieces pieces_of(const Params *p, const Bucket *b, int64_t slice) {
    const int64_t most = (int64_t)tensor_bytes(p->bucket) / (b->n_ranks + 1) / PIECE_ALIGN * PIECE_ALIGN;
    Pieces x;
    x.bytes = min_i64(slice, most);
    CHECK(slice == 0 || x.bytes > 0, "%zu bytes for %d ranks", tensor_bytes(p->bucket), b->n_ranks);
    x.all = (char *)p->bucket.data;
    x.own = x.all + b->n_ranks * x.bytes;
    const int64_t n = x.bytes / (int64_t)dtype_size(DTYPE_F32);
    x.all_tensor = tensor_1d(x.all, DTYPE_F32, b->n_ranks * n);
    x.own_tensor = tensor_1d(x.own, DTYPE_F32, n);
    return x;
}

static int64_t bucket_bytes(const Params *p, int block, Group group) {
    const Bucket b = bucket_of(p, block, group, GRADIENT);
    if (b.n_ranks == 1) return 0;
    const int64_t pieces = b.n_ranks + 1;
    return min_i64(pieces * slice_bytes(&b), max_i64(BUCKET_BYTES, pieces * PIECE_ALIGN));
}

int64_t zero1_bucket_numel(const Params *p) {
    int64_t most = 0;
    for (int block = -1; block < p->shape.n_blocks && p->shape.zero1; block++) {
        most = max_i64(most, bucket_bytes(p, block, GROUP_DATA));
        most = max_i64(most, bucket_bytes(p, block, GROUP_EXPERT_DATA));
    }
    return most / (int64_t)dtype_size(DTYPE_F32);
}

/* ---- the transfers ----------------------------------------------------------------------------------------------- */

static void reduce_scatter(const Params *p, Comm *c, const Bucket *b) {
    const int64_t slice = slice_bytes(b);
    const Pieces x = pieces_of(p, b, slice);
    for (int64_t from = 0; from < slice; from += x.bytes) {
        for (int r = 0; r < b->n_ranks; r++) copy_slice(b, c->device, r, from, x.bytes, x.all + r * x.bytes, PACK);
        c->reduce_scatter(c, x.own_tensor, x.all_tensor, b->group, STREAM_COMM);
        copy_slice(b, c->device, b->rank, from, x.bytes, x.own, UNPACK);
    }
}

/* The gradients of a bucket lie one behind the other. */
static void all_reduce(const Params *p, Comm *c, const Bucket *b) {
    const Weight *first = b->piece[0].weight, *last = b->piece[b->n_pieces - 1].weight;
    const Tensor all = tensor_rows(p->grad, first->offset, last->offset + last->numel - first->offset);
    c->all_reduce(c, all, all, b->group, STREAM_COMM);
}

void zero1_reduce(const Params *p, Comm *c, int block) {
    for (int experts = 0; experts <= 1; experts++) {
        const Bucket b = bucket_of(p, block, experts ? GROUP_EXPERT_DATA : GROUP_DATA, GRADIENT);
        if (b.n_ranks == 1 || b.n_pieces == 0) continue;
        if (p->shape.zero1)
            reduce_scatter(p, c, &b);
        else
            all_reduce(p, c, &b);
    }
}

static void all_gather(const Params *p, Comm *c, const Bucket *b) {
    const int64_t slice = slice_bytes(b);
    const Pieces x = pieces_of(p, b, slice);
    for (int64_t from = 0; from < slice; from += x.bytes) {
        copy_slice(b, c->device, b->rank, from, x.bytes, x.own, PACK);
        c->all_gather(c, x.all_tensor, x.own_tensor, b->group, STREAM_COMM);
        for (int r = 0; r < b->n_ranks; r++)
            if (r != b->rank) copy_slice(b, c->device, r, from, x.bytes, x.all + r * x.bytes, UNPACK);
    }
}

void zero1_gather(const Params *p, Comm *c, int block) {
    for (int experts = 0; experts <= 1 && p->shape.zero1; experts++) {
        const Bucket b = bucket_of(p, block, experts ? GROUP_EXPERT_DATA : GROUP_DATA, COPY);
        if (b.n_ranks > 1 && b.n_pieces > 0) all_gather(p, c, &b);
    }
}
