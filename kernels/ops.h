/* The list of ops: mathematics on one device, and the contracts of every op. Floor 1; valid C and C++.
 *
 * `Ops` is one struct of function pointers per backend (kernels/cpu, kernels/cuda: same stems, same names). Nothing
 * calls its members but the wrappers op_*() of ops.c and ops_layer.c, which check ranks, dtypes, shapes, aliasing and
 * strides for both backends and know what each op reads and writes. So a contract, its check and the call stand side by
 * side.
 *
 * The laws of an op:
 *  1. It never allocates, synchronises, reads device memory back or asks its rank. Counts that depend on routing stay
 * on the device.
 *  2. Outputs first, then inputs, shape scalars, stream. What changes from step to step is read from StepParams.
 *  3. Deterministic: equal inputs give equal bits. No floating-point atomics; sums run in a fixed order; the number of
 *     partial sums is a function of the shape, never of the grid or the thread count. An op that adds to an output sums
 *     first, then adds once.
 *  4. It has a CPU twin that a student can read.
 *
 * Letters: see tensor.h. Dtypes: "act" is DTYPE_F32 or DTYPE_BF16, one per run; "weight" is act's dtype (a master copy
 * or its rounding); sums are f32 whatever the inputs. i32 counts, ids and rows. "writes" unless it says "adds to".
 * Outputs never alias inputs unless said. Optional tensors may be tensor_none().
 *
 * FP8 (V3 3.3): "tiles" is E4M3 with a scale for each 1 x 128, "blocks" E4M3 with one for each 128 x 128 (tensor.h).
 * Such an operand of a GEMM always has the summed dimension last, so backward needs some transposed: a producer writes
 * them along (Quantized). What a producer quantises is its result rounded to BF16: the same bits as from quantize. */
#ifndef TRAIN_MOE_OPS_H
#define TRAIN_MOE_OPS_H

#include "device_memory.h"
#include "step.h"
#include "tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

/* compute: the mathematics. aux: what may run under it (shared experts, weight gradients). comm: every transfer of the
 * rank, in the order of the schedule. copy: host <-> device. On the CPU all are one. */
typedef enum { STREAM_COMPUTE, STREAM_AUX, STREAM_COMM, STREAM_COPY, STREAM_COUNT } Stream;

/* A stretch of launches that was captured and can be replayed. */
typedef struct Graph Graph;

enum {
    EVENTS_MAX = 64,
    GROUP_ALIGN = 128,         /* rows of each local expert start at a multiple of this */
    RMSNORM_PARTIAL_ROWS = 32, /* rows summed into one partial of a norm weight's gradient */
    DECODE_CHUNK = 64,         /* cached positions summed into one partial of attention_decode */
    SUM_PARTIAL = 4096         /* elements summed into one partial of a global sum */
};

/* FPROP  y (M, O) = x (M, I) w (O, I)^T      DGRAD  dx (M, I) = dy (M, O) w (O, I)
 * WGRAD  dw (O, I) = dy (M, O)^T x (M, I)    The three GEMMs of a Linear. */
typedef enum { GEMM_FPROP, GEMM_DGRAD, GEMM_WGRAD } GemmKind;

typedef enum { ROUTER_SIGMOID, ROUTER_SOFTMAX } RouterScore;
typedef enum { GROUP_SCORE_TOP2, GROUP_SCORE_MAX } GroupScore;

/* The gate of a MoE layer (V3 eq. 12-20; V2's softmax gate). */
typedef struct {
    int n_experts;  /* E */
    int n_chosen;   /* K */
    int n_group;    /* groups of E / n_group consecutive experts */
    int topk_group; /* groups a token may use */
    RouterScore score;
    GroupScore group_score;
    bool normalize;  /* weights of the K chosen sum to one before scaling */
    double scale;    /* routed_scaling_factor */
    int64_t seq_len; /* S, for the sequence-wise balance loss */
} RouterShape;

typedef struct {
    int n_heads;
    int64_t nope, rope, value; /* Dn, Dr, Dv; q and k have Dqk = Dn + Dr */
    double scale;              /* of q.k: Dqk^-0.5, times YaRN's mscale^2 */
    double rope_mscale;        /* multiplies cos and sin; 1 but for exotic YaRN settings */
} AttentionShape;

/* A matrix (M, C) for FP8 GEMMs that sum over C, and for those that sum over M. Either may be none. */
typedef struct {
    Tensor rows;    /* (M, C) tiles */
    Tensor columns; /* (C, M) tiles: the transpose, so a scale covers 128 rows of one column */
} Quantized;

static inline Quantized quantized_none(void) {
    const Quantized q = {tensor_none(), tensor_none()};
    return q;
}

/* What E4M3 numbers there are in tiles or blocks: counts, which may be added in any order. Of tiles alone nobody can
 * tell a zero that was one before from what was too small. */
enum { SCALE_EXPONENT_FIRST = -48, SCALE_EXPONENTS = 64 };
typedef struct {
    int64_t values; /* all */
    int64_t zeros;
    int64_t subnormals;              /* 0 < |code| < 2^-6: fewer digits than the others */
    int64_t largest;                 /* |code| = 448 */
    int64_t nans;                    /* codes */
    int64_t amax_bits;               /* of the largest |code| x scale, an f32, NaN left out */
    int64_t scales[SCALE_EXPONENTS]; /* of which floor(log2) is SCALE_EXPONENT_FIRST + i; those outside count at the
                                        ends, NaN nowhere */
} TileStats;

/* From the head 0 that a tensor shows to the next head: columns of y and a, rows of b. */
typedef struct {
    int n_heads;
    int64_t y_cols, a_cols, b_rows;
} HeadSteps;

/* Where the rows of the local experts come from. Tr = R*T tokens received, N = rows of capacity. */
typedef struct {
    Tensor row_token;    /* (N)     i32  received token of a row, -1 = padding */
    Tensor row_weight;   /* (N)     f32  routing weight of a row, 0 = padding */
    Tensor token_row;    /* (Tr, K) i32  row of a token's k-th choice, -1 = not on this rank */
    Tensor expert_start; /* (El+1)  i32  first row of each local expert, multiples of GROUP_ALIGN; [El] = rows in use */
    Tensor overflow;     /* (1)     f64  counts maps that N is too small for; none = N holds the worst case */
} MoeMap;

typedef struct {
    const char *name;

    /* ---- memory and streams ----------------------------------------------------------------------------------------
     */
    void *(*alloc)(size_t bytes); /* device memory, zeroed, ARENA_ALIGN-aligned; NULL when there is not enough */
    void (*release)(void *p);
    void *(*host_alloc)(size_t bytes); /* host memory, likewise, that copies reach while the host goes on (pinned) */
    void (*host_release)(void *p);
    void (*copy_in)(void *device, const void *host, size_t bytes,
                    Stream s); /* asynchronous; host stays untouched until done */
    void (*copy_out)(void *host, const void *device, size_t bytes,
                     Stream s); /* asynchronous; valid after synchronize */
    void (*event_record)(int event, Stream s);
    void (*event_wait)(int event, Stream s);
    void (*event_synchronize)(int event); /* host waits for what was recorded last; at once if nothing was */
    void (*synchronize)(Stream s);        /* host waits; outside a step only */
    /* Between begin and end, ops on s, and on streams that wait for its events, are captured and not run; end returns
     * the graph, and launch replays it on a stream, with the arguments of the capture. Every op and shape in it has run
     * before. A wait in between is for an event that was recorded in between, and such an event is waited for nowhere
     * else; before end, s has waited for the other streams. Waits of the host, allocating and copies from or to memory
     * that is not pinned have no place in between. A backend without graphs runs the ops as ever, and end returns NULL.
     */
    void (*graph_begin)(Stream s);
    Graph *(*graph_end)(Stream s);
    void (*graph_launch)(Graph *g, Stream s);
    void (*graph_free)(Graph *g);
    void (*zero)(Tensor y, Stream s); /* y = 0, any dtype, contiguous */
    void (*copy)(Tensor y, Tensor x,
                 Stream s); /* y = x, same shape; rounds when y is narrower (f32 -> bf16, nearest even); x may be tiles
                               (E4M3, E5M6) or a matrix of blocks: y = what they mean */
    /* The scale of each tile by e4m3_scale_pow2, of a block by e4m3_scale_nearest (small_floats.h), then to the
     * nearest, ties to even, saturating; what a tile at the edge lacks counts as zero.
     *   q.rows, q.columns  optional; rows may be E5M6 tiles
     *   x  (M, C) bf16 or tiles, C a multiple of 8, and M of 16 if columns are asked for; x.n_rows, if set, bounds the
     *      rows, in multiples of 128. Columns past it: not written. */
    void (*quantize)(Quantized q, Tensor x, Stream s);
    /* The same for weights. w (O, I) or (El, O, I) blocks, wt (.., I, O) blocks with the same scales, optional; master
     * f32. */
    void (*quantize_weight)(Tensor w, Tensor wt, Tensor master, Stream s);
    /* wt of quantize_weight, from w. */
    void (*transpose_weight)(Tensor wt, Tensor w, Stream s);
    /* stats adds what x holds; amax_bits becomes the larger. x (M, C) tiles, x.n_rows, if set, bounds the rows; or
     * (O, I), (El, O, I) blocks. C and I are multiples of 4. */
    void (*tile_stats)(TileStats *stats, Tensor x, Stream s);

    /* ---- embedding -------------------------------------------------------------------------------------------------
     */
    /* y[t] = w[ids[t]].              y (T, D) act;  ids (T) i32, every id < V;  w (V, D) weight */
    void (*embed_forward)(Tensor y, Tensor ids, Tensor w, Stream s);
    /* dw[ids[t]] += dy[t].           adds to dw (V, D) f32;  dy (T, D) act
     * A row's tokens are summed in f32 first, ascending, then added to dw once; CUDA adds an id of many tokens in
     * several sums of consecutive ones. The order follows from ids alone. */
    void (*embed_backward)(Tensor dw, Tensor dy, Tensor ids, Stream s);

    /* ---- residual add and RMSNorm -------------------------------------------------------------------------------- */
    /* r = x + sum_j branch[j];  y = r / rms(r) * w;  rms(r) = sqrt(mean(r^2) + eps).           (V3 2.1; REF)
     * rstd none: the sum r alone; then y, q and w are none.
     *   r      (T, D)    act   optional: not written; may be x. y is computed from r as stored.
     *   y      (T, D)    act   optional if q is given
     *   q      (T, D)    tiles optional: y quantised
     *   rstd   (T)       f32   1 / rms, for backward
     *   x      (T, D)    act   may be a column slice
     *   branch (J, T, D) act   optional; added in the order of j, in f32, before one rounding
     *   w      (D)       f32 */
    void (*residual_rmsnorm_forward)(Tensor r, Tensor y, Tensor q, Tensor rstd, Tensor x, Tensor branch, Tensor w,
                                     double eps, Stream s);
    /* dx = dr + d(norm)/dr dy.  The gradient of x and of every branch row.
     *   dx      (T, D) act  may be dr; may be a column slice
     *   dw      (D)    f32  adds to
     *   partial (ceil(T / RMSNORM_PARTIAL_ROWS), D) f32  scratch
     *   dy      (T, D) act, or (J, T, D): the gradient of y is the sum of J rows, added in the order of j in f32
     *   dr      (T, D) act  optional: gradient that reaches r by the residual path
     *   r       (T, D) act  what was normalised;  rstd (T) f32;  w (D) f32 */
    void (*residual_rmsnorm_backward)(Tensor dx, Tensor dw, Tensor partial, Tensor dy, Tensor dr, Tensor r, Tensor rstd,
                                      Tensor w, Stream s);

    /* ---- dense GEMM ---------------------------------------------------------------------------------------------- */
    /* See GemmKind; y (M, N) is the output of the kind, a and b its operands in the order of the formula.
     *   accumulate: y += product, which is complete in f32 first. y act or f32; a, b act or weight. Any row strides.
     * FP8, contiguous, sums of 128 terms promoted to f32: FPROP x tiles, w blocks; DGRAD dy tiles, b = w^T (I, O)
     * blocks; WGRAD a = dy^T (O, M) tiles, b = x^T (I, M) tiles, y f32. */
    void (*gemm)(Tensor y, Tensor a, Tensor b, GemmKind kind, bool accumulate, Stream s);
    /* FPROP or DGRAD of every head: y, a and b are views of head 0, the others lie HeadSteps further in the same
     * matrices. y of a head overlaps no other's. Dtypes as in gemm. */
    void (*head_gemm)(Tensor y, Tensor a, Tensor b, GemmKind kind, HeadSteps steps, Stream s);

    /* ---- rotary embedding and the split into heads --------------------------------------------------------------- */
    /* Per head h: q[h] = [q_nope; R(q_rope)],  k[h] = [k_nope; R(k_pe)],  v[h].  R rotates the pairs (2i, 2i+1) by
     * position * inv_freq[i] (interleaved, V3 eq. 3-4; REF): k_pe is one vector shared by all heads.
     *   q (T, H*Dqk) act  written; may be q_in     k (T, H*Dqk), v (T, H*Dv) act  written
     *   q_in (T, H*Dqk) act   kv (T, H*(Dn+Dv)) act, per head Dn key then Dv value
     *   k_pe (T, Dr) act, may be a column slice
     *   position (T) i32, negative = padding (rotated by 0)   inv_freq (Dr/2) f32 */
    void (*rope_split_forward)(Tensor q, Tensor k, Tensor v, Tensor q_in, Tensor kv, Tensor k_pe, Tensor position,
                               Tensor inv_freq, AttentionShape shape, Stream s);
    /* The inverse rotation. dq_in may be dq, dk_pe a column slice.
     * dk_pe sums over the heads in f32, in a fixed order: ascending on the CPU; on CUDA in sums of consecutive heads,
     * which are then added in order; how many follows from the shape. */
    void (*rope_split_backward)(Tensor dq_in, Tensor dkv, Tensor dk_pe, Tensor dq, Tensor dk, Tensor dv,
                                Tensor position, Tensor inv_freq, AttentionShape shape, Stream s);

    /* The rotation alone: y[h] = [x_nope; R(x_rope)].
     *   y, x (T, H*Dqk) act, y may be x; either may be a column slice.   shape.value is not used */
    void (*rope_forward)(Tensor y, Tensor x, Tensor position, Tensor inv_freq, AttentionShape shape, Stream s);

    /* ---- attention core ------------------------------------------------------------------------------------------ */
    /* o[h,t] = sum_j p_j v[h,j],  p = softmax_j(scale q[h,t].k[h,j]) over doc_start[t] <= j <= t.  Softmax in f32.
     *   o (T, H*Dv) act   lse (T, H) f32 log-sum-exp of the scaled scores   q, k (T, H*Dqk), v (T, H*Dv) act
     *   doc_start (T) i32: first row of the micro-batch that row t may see, 0 <= doc_start[t] <= t */
    void (*attention_forward)(Tensor o, Tensor lse, Tensor q, Tensor k, Tensor v, Tensor doc_start,
                              AttentionShape shape, Stream s);
    /* Probabilities are recomputed from lse. delta (T, H) f32 scratch: sum of do * o. dq, dk, dv, d_o as q, k, v, o. */
    void (*attention_backward)(Tensor dq, Tensor dk, Tensor dv, Tensor delta, Tensor d_o, Tensor o, Tensor q, Tensor k,
                               Tensor v, Tensor lse, Tensor doc_start, AttentionShape shape, Stream s);

    /* Attention over a cache of latents, every head over the same n rows (MLA absorbed: W_UK has moved into the query,
     * W_UV waits for the result):
     * o[t,h] = sum_j p_j c[j],  p = softmax_j(scale (q_latent[t,h].c[j] + q_rope[t,h].k_pe[j])),  cache[j] = [c; k_pe].
     * The T tokens are the last of the cache: token t sees the first n - T + 1 + t rows.
     *   o (T, H*Dc), q_latent (T, H*Dc), q (T, H*Dqk) rotated: only the rope parts are read, cache (n, Dc+Dr)  all act
     *   partial (T*H*ceil(n / DECODE_CHUNK), Dc+2) f32  scratch: of each chunk of rows its sum of exp(s - top) c[j],
     *     then top and the sum of exp(s - top) */
    void (*attention_decode)(Tensor o, Tensor partial, Tensor q_latent, Tensor q, Tensor cache, AttentionShape shape,
                             Stream s);

    /* ---- router -------------------------------------------------------------------------------------------------- */
    /* s = sigmoid(logits) or softmax(logits);  choose by z = s + bias, weigh by s:
     * group score = sum of a group's two largest z, or its largest; z of groups outside the best topk_group = -inf;
     * chosen = the K largest z, ties to the lower index, distinct;  w = s of the chosen, over their sum (+1e-20) if
     * normalize, times scale.                                                                 (V3 eq. 12-16; REF)
     *   ids (T, K) i32, weights (T, K) f32: ascending expert id within a token; padding tokens get -1 and 0
     *   scores (T, E) f32
     *   counts (E) i32     adds to: tokens routed to each expert; optional
     *   seq_count (B, E) i32  tokens of the sequence with i in the top K of the UNBIASED, ungrouped s   (V3 eq. 18)
     *   stats->balance_sum  adds to: sum over sequences of sum_i f_i P_i, f_i = E/(K S) seq_count,
     *     P_i = mean_t s_i / sum_j s_j
     *   logits (T, E) f32   bias (E) f32, optional
     *   position (T) i32: negative = padding, counted nowhere; S counts the rest */
    void (*router_forward)(Tensor ids, Tensor weights, Tensor scores, Tensor counts, Tensor seq_count, StepStats *stats,
                           Tensor logits, Tensor bias, Tensor position, RouterShape shape, Stream s);
    /* Through the chosen weights and their normalisation, and through the balance loss
     * balance_scale * sum_i f_i P_i of each sequence (V3 eq. 17); none through bias or choice.
     *   dlogits (T, E) act   dweights (T, K) f32   params->balance_scale */
    void (*router_backward)(Tensor dlogits, Tensor dweights, Tensor ids, Tensor weights, Tensor scores,
                            Tensor seq_count, Tensor position, const StepParams *params, RouterShape shape, Stream s);
    /* bias[i] += bias_speed * sign(mean(counts) - counts[i]), sign(0) = 0; nothing if the update was skipped.
     * (V3 2.1.2) */
    void (*bias_step)(Tensor bias, Tensor counts, const StepParams *params, const StepStats *stats, Stream s);

    /* ---- rows of the experts ------------------------------------------------------------------------------------- */
    /* Rows ordered by (local expert, received token); every expert starts at a multiple of GROUP_ALIGN; see MoeMap.
     *   ids (Tr, K) i32 global experts or -1, weights (Tr, K) f32, slot_of_expert (E) i32: the El slots from
     *   first_slot on are local. The worst case, Tr * min(K, El) + (GROUP_ALIGN - 1) * El rows, fits into N; or else
     *   map.overflow is there: where the rows do not fit it is 1 more, and the map is empty: no row in use, every
     *   token_row -1. */
    void (*moe_map)(MoeMap map, Tensor ids, Tensor weights, Tensor slot_of_expert, int first_slot, Stream s);
    /* y[n] = x[row_token[n]], zero rows for padding, for n < expert_start[El].   y (N, D), x (Tr, D) act
     *   token_row says the same the other way round; a backend may follow either.
     * FP8: x tiles; y tiles, zero with scale 1 for padding, optional if yt is given; yt (D, N) tiles, optional: y
     * quantised anew along its columns. */
    void (*gather_rows)(Tensor y, Tensor yt, Tensor x, MoeMap map, Stream s);
    /* y[t] = sum_k x[token_row[t, k]] in the order of k, f32 sums; absent rows are skipped.   y (Tr, D), x (N, D) act
     *   accumulate: y += */
    void (*reduce_rows)(Tensor y, Tensor x, MoeMap map, bool accumulate, Stream s);
    /* dweights[t, k] = drow_weight[token_row[t, k]], 0 where absent.   dweights (Tr, K) f32, drow_weight (N) f32 */
    void (*unmap_weights)(Tensor dweights, Tensor drow_weight, MoeMap map, Stream s);

    /* ---- grouped GEMM -------------------------------------------------------------------------------------------- */
    /* FPROP y (N, O) = x (N, I) w[e] (O, I)^T, DGRAD y (N, I) = x (N, O) w[e] (O, I), rows of expert e by expert_start.
     *   w (El, O, I) weight; y, x act. Rows past expert_start[El] are neither read nor written.
     * FP8 as gemm: x tiles, w blocks, for DGRAD w^T (El, I, O) blocks. */
    void (*grouped_gemm)(Tensor y, Tensor x, Tensor w, Tensor expert_start, GemmKind kind, Stream s);
    /* dw[e] (O, I) += dy^T x over the rows of e. dw (El, O, I) f32; dy (N, O), x (N, I) act. No rows: adds nothing.
     * FP8 as gemm: dy^T (O, N) tiles, x^T (I, N) tiles. */
    void (*grouped_wgrad)(Tensor dw, Tensor dy, Tensor x, Tensor expert_start, Stream s);

    /* ---- SwiGLU -------------------------------------------------------------------------------------------------- */
    /* y = weight * silu(a) * c,  a = columns [0, F) of h, c = its last F columns.
     *   y (M, F) act   h (M, G) act, G >= 2F (the parts start at aligned rows of the fused weight; the gap is not read)
     *   weight (M) f32, optional: 1.  h.n_rows, if set, bounds the rows.
     * FP8: y_rows (M, F) tiles instead of y; h_rows (M, G) tiles: h quantised, for backward. */
    void (*swiglu_forward)(Tensor y, Tensor y_rows, Tensor h_rows, Tensor h, Tensor weight, Stream s);
    /* g = dy: da = g w c sg (1 + a (1 - sg)), dc = g w a sg, dweight = sum g silu(a) c, sg = sigmoid(a).
     *   dh (M, G) act, the gap written zero   dweight (M) f32, with weight only
     * FP8: dh quantised, both ways, instead of dh; y_columns (F, M) tiles: y quantised along its columns. h tiles, G =
     * 2F, F a multiple of 128. */
    void (*swiglu_backward)(Tensor dh, Quantized dhq, Tensor y_columns, Tensor dweight, Tensor dy, Tensor h,
                            Tensor weight, Stream s);

    /* ---- head and loss ------------------------------------------------------------------------------------------- */
    /* loss[c] = logsumexp(logits[c, :vocab]) - logits[c, targets[c]], 0 where targets[c] < 0. In f32.
     * want_gradient: logits become loss_scale[depth] * (softmax - onehot), 0 where targets < 0 and in columns >= vocab.
     *   loss (C) f32   logits (C, Vp) act or f32, in place   targets (C) i32 < vocab */
    void (*cross_entropy)(Tensor loss, Tensor logits, Tensor targets, int64_t vocab, int depth, bool want_gradient,
                          const StepParams *params, Stream s);
    /* stats->loss_sum[depth] adds the sum of loss (T) f32, partials of SUM_PARTIAL elements, in f64. */
    void (*loss_sum)(StepStats *stats, Tensor loss, int depth, Stream s);

    /* ---- update -------------------------------------------------------------------------------------------------- */
    /* partial[i] = sum of squares of the elements intervals[i] of g, in f64; 0 where there are none. A partial follows
     * from its interval alone, so what several ranks compute, each some, is what one rank computes.
     *   partial (P) f64   g (n) f32   intervals (P) in the device's memory */
    void (*grad_squares)(Tensor partial, Tensor g, const Interval *intervals, Stream s);
    /* stats->grad_norm_sq = sum of partial (P) f64, in an order that follows from P. */
    void (*grad_norm)(StepStats *stats, Tensor partial, Stream s);
    /* From loss_sum, grad_norm_sq and params: grad_norm, grad_scale, skip; counts the update in state. With
     * stats->overflow it sets state->has_overflow, and counts nothing while that stands. */
    void (*update_gate)(StepStats *stats, UpdateState *state, const StepParams *params, Stream s);
    /* AdamW (decoupled decay), t = state->adam_t, g = grad * grad_scale; nothing at all if stats->skip:
     *   m = b1 m + (1-b1) g;  v = b2 v + (1-b2) g^2;  w -= lr (m/(1-b1^t) / (sqrt(v/(1-b2^t)) + eps) + decay * w)
     *   master (n) f32; m, v (n) f32 or bf16 (rounded to nearest even when stored); copy (n) bf16, optional: the
     *   rounded master that the next forward reads; grad (n) f32; decay: weight_decay applies
     * FP8: copy and copy_t as w and wt of quantize_weight, n their elements. */
    void (*adamw_cast)(Tensor copy, Tensor copy_t, Tensor master, Tensor m, Tensor v, Tensor grad, bool decay,
                       const StepParams *params, const StepStats *stats, const UpdateState *state, Stream s);
} Ops;

/* A device: a backend and, for tests and tracing, who watches the calls. Not owned by the ops. */
typedef struct {
    const Ops *ops;
    /* Logits worth holding at once: what stays in cache on a CPU (0: a MiB), what fills a GPU. */
    int64_t logits_bytes;
    DeviceMemory memory; /* when it was opened; all 0: not known */
    /* Ops are queued and the host runs ahead of them: a GPU. What a step reports is then taken a step late. */
    bool is_asynchronous;
    /* If set, called by every wrapper before the op runs: its name, stream and the tensors it reads and writes; of what
     * records, or waits for, an event its number as n_writes. This is what --check-streams, tracing and FLOP counting
     * hang on. */
    void (*watch)(void *watcher, const char *op, Stream s, const Tensor *writes, int n_writes, const Tensor *reads,
                  int n_reads);
    void *watcher;
    /* If set, a profiler may be looking: a range of its time line begins with this name; NULL: the last one ends. */
    void (*range)(const char *name);
} Device;

/* RANGE(d, "attn"); names what follows, to the end of the block it stands in, on a profiler's time line. */
static inline const Device *range_begin(const Device *d, const char *name) {
    if (d->range) d->range(name);
    return d;
}
static inline void range_end(const Device *const *d) {
    if ((*d)->range) (*d)->range(NULL);
}
#define RANGE(d, name) __attribute__((cleanup(range_end), unused)) const Device *const range = range_begin(d, name)

/* The backends. ops_cpu() names the best instruction set it found in the banner by cpu_isa_name(). */
const Ops *ops_cpu(void);

/* The op that was called last, or NULL: where an asynchronous failure is noticed. */
const char *ops_last(void);

/* CHECKs that every member of a table is set (C fills a missing designated member with NULL silently). */
void ops_check_complete(const Ops *ops);

/* The wrappers: the contracts above, checked, then the call. Names and arguments as in Ops, the device in front. */
void *op_alloc(const Device *d, size_t bytes);
void op_release(const Device *d, void *p);
void *op_host_alloc(const Device *d, size_t bytes);
void op_host_release(const Device *d, void *p);
void op_copy_in(const Device *d, void *device, const void *host, size_t bytes, Stream s);
void op_copy_out(const Device *d, void *host, const void *device, size_t bytes, Stream s);
void op_event_record(const Device *d, int event, Stream s);
void op_event_wait(const Device *d, int event, Stream s);
void op_event_synchronize(const Device *d, int event);
void op_synchronize(const Device *d, Stream s);
void op_graph_begin(const Device *d, Stream s);
Graph *op_graph_end(const Device *d, Stream s);
void op_graph_launch(const Device *d, Graph *g, Stream s);
void op_graph_free(const Device *d, Graph *g); /* NULL is fine */
void op_zero(const Device *d, Tensor y, Stream s);
void op_copy(const Device *d, Tensor y, Tensor x, Stream s);
void op_quantize(const Device *d, Quantized q, Tensor x, Stream s);
void op_quantize_weight(const Device *d, Tensor w, Tensor wt, Tensor master, Stream s);
void op_transpose_weight(const Device *d, Tensor wt, Tensor w, Stream s);
void op_tile_stats(const Device *d, TileStats *stats, Tensor x, Stream s);
void op_embed_forward(const Device *d, Tensor y, Tensor ids, Tensor w, Stream s);
void op_embed_backward(const Device *d, Tensor dw, Tensor dy, Tensor ids, Stream s);
void op_residual_rmsnorm_forward(const Device *d, Tensor r, Tensor y, Tensor q, Tensor rstd, Tensor x, Tensor branch,
                                 Tensor w, double eps, Stream s);
void op_residual_rmsnorm_backward(const Device *d, Tensor dx, Tensor dw, Tensor partial, Tensor dy, Tensor dr, Tensor r,
                                  Tensor rstd, Tensor w, Stream s);
void op_gemm(const Device *d, Tensor y, Tensor a, Tensor b, GemmKind kind, bool accumulate, Stream s);
void op_head_gemm(const Device *d, Tensor y, Tensor a, Tensor b, GemmKind kind, HeadSteps steps, Stream s);
void op_rope_split_forward(const Device *d, Tensor q, Tensor k, Tensor v, Tensor q_in, Tensor kv, Tensor k_pe,
                           Tensor position, Tensor inv_freq, AttentionShape shape, Stream s);
void op_rope_split_backward(const Device *d, Tensor dq_in, Tensor dkv, Tensor dk_pe, Tensor dq, Tensor dk, Tensor dv,
                            Tensor position, Tensor inv_freq, AttentionShape shape, Stream s);
void op_rope_forward(const Device *d, Tensor y, Tensor x, Tensor position, Tensor inv_freq, AttentionShape shape,
                     Stream s);
void op_attention_forward(const Device *d, Tensor o, Tensor lse, Tensor q, Tensor k, Tensor v, Tensor doc_start,
                          AttentionShape shape, Stream s);
void op_attention_backward(const Device *d, Tensor dq, Tensor dk, Tensor dv, Tensor delta, Tensor d_o, Tensor o,
                           Tensor q, Tensor k, Tensor v, Tensor lse, Tensor doc_start, AttentionShape shape, Stream s);
void op_attention_decode(const Device *d, Tensor o, Tensor partial, Tensor q_latent, Tensor q, Tensor cache,
                         AttentionShape shape, Stream s);
void op_router_forward(const Device *d, Tensor ids, Tensor weights, Tensor scores, Tensor counts, Tensor seq_count,
                       StepStats *stats, Tensor logits, Tensor bias, Tensor position, RouterShape shape, Stream s);
void op_router_backward(const Device *d, Tensor dlogits, Tensor dweights, Tensor ids, Tensor weights, Tensor scores,
                        Tensor seq_count, Tensor position, const StepParams *params, RouterShape shape, Stream s);
void op_bias_step(const Device *d, Tensor bias, Tensor counts, const StepParams *params, const StepStats *stats,
                  Stream s);
void op_moe_map(const Device *d, MoeMap map, Tensor ids, Tensor weights, Tensor slot_of_expert, int first_slot,
                Stream s);
void op_gather_rows(const Device *d, Tensor y, Tensor yt, Tensor x, MoeMap map, Stream s);
void op_reduce_rows(const Device *d, Tensor y, Tensor x, MoeMap map, bool accumulate, Stream s);
void op_unmap_weights(const Device *d, Tensor dweights, Tensor drow_weight, MoeMap map, Stream s);
void op_grouped_gemm(const Device *d, Tensor y, Tensor x, Tensor w, Tensor expert_start, GemmKind kind, Stream s);
void op_grouped_wgrad(const Device *d, Tensor dw, Tensor dy, Tensor x, Tensor expert_start, Stream s);
void op_swiglu_forward(const Device *d, Tensor y, Tensor y_rows, Tensor h_rows, Tensor h, Tensor weight, Stream s);
void op_swiglu_backward(const Device *d, Tensor dh, Quantized dhq, Tensor y_columns, Tensor dweight, Tensor dy,
                        Tensor h, Tensor weight, Stream s);
void op_cross_entropy(const Device *d, Tensor loss, Tensor logits, Tensor targets, int64_t vocab, int depth,
                      bool want_gradient, const StepParams *params, Stream s);
void op_loss_sum(const Device *d, StepStats *stats, Tensor loss, int depth, Stream s);
void op_grad_squares(const Device *d, Tensor partial, Tensor g, const Interval *intervals, Stream s);
void op_grad_norm(const Device *d, StepStats *stats, Tensor partial, Stream s);
void op_update_gate(const Device *d, StepStats *stats, UpdateState *state, const StepParams *params, Stream s);
void op_adamw_cast(const Device *d, Tensor copy, Tensor copy_t, Tensor master, Tensor m, Tensor v, Tensor grad,
                   bool decay, const StepParams *params, const StepStats *stats, const UpdateState *state, Stream s);

#ifdef __cplusplus
}
#endif
#endif
