/* Rows of a layer's dense Linears: Fprop, Dgrad and Wgrad of all of them, in the order of a step, in FP8 with every
 * cast that this costs (linears_fp8; the peer: the same in BF16), and the share of those casts in its time
 * (linears_casts). 8,192 tokens at V3's widths, 16,384 at Moonlight's; /moe: attention and the shared experts, else
 * attention and the dense MLP.
 *
 * The casts are the model's (model/mla.c, moe.c): passes of their own run between the GEMMs. Those inside an op that is
 * there in BF16 too count as what that op takes longer in FP8 than in BF16; nothing is taken off where it is faster,
 * since it writes less. Weights are cast in AdamW's pass, once a step, as many bytes as their BF16 copy: not here. */
#include <math.h>

#include "bench.cuh"

/* Where the input of a Linear comes from, which says how it and the gradient get into FP8. */
typedef enum {
    INPUT_NORM,      /* residual add and norm write tiles, from which Wgrad's transpose is made */
    INPUT_LATENT,    /* a norm alone: likewise */
    INPUT_ROUTED,    /* add and norm write tiles, and BF16 for the router: likewise */
    INPUT_SAME,      /* that of the Linear before; Dgrad adds to its gradient */
    INPUT_ATTENTION, /* BF16; E4M3 of it for Fprop, E5M6 to keep; of that the transpose, and BF16 again */
    INPUT_SWIGLU     /* SwiGLU writes tiles, also of what it reads; its backward the transpose, and the gradient of the
                        Linear before as tiles both ways */
} Input;

typedef struct {
    int64_t out, in;
    Input input;
} Linear;

enum { IN_ATTENTION = 4, LINEARS = 6 };

typedef struct {
    const char *name;
    int64_t T, D;
    const Linear *attention; /* IN_ATTENTION of them; then gate and up, and down */
    int64_t F;               /* width of the MLP: dense, or all shared experts */
    double gate, casts_limit;
} LayerShape;

/* q_a over kv_a, q_b, kv_b, output; without a latent of q: kv_a, q, kv_b, output. */
static const Linear v3[IN_ATTENTION] = {
    {2112, 7168, INPUT_NORM}, {24576, 1536, INPUT_LATENT}, {32768, 512, INPUT_LATENT}, {7168, 16384, INPUT_ATTENTION}};
static const Linear moonlight[IN_ATTENTION] = {
    {576, 2048, INPUT_NORM}, {3072, 2048, INPUT_SAME}, {4096, 512, INPUT_LATENT}, {2048, 2048, INPUT_ATTENTION}};

static const LayerShape layers[] = {{"7168", 8192, 7168, v3, 18432, 1.35, 0.09},
                                    {"7168/moe", 8192, 7168, v3, 2048, 1.35, 0.09},
                                    {"2048", 16384, 2048, moonlight, 11264, 1.2, 0.16},
                                    {"2048/moe", 16384, 2048, moonlight, 2816, 1.2, 0.16}};

static Linear linear_of(const LayerShape *l, int i) {
    if (i < IN_ATTENTION) return l->attention[i];
    const Linear gate_up = {2 * l->F, l->D, INPUT_ROUTED}, down = {l->D, l->F, INPUT_SWIGLU};
    return i == IN_ATTENTION ? gate_up : down;
}

/* ---- operands ---------------------------------------------------------------------------------------------------- */

typedef struct {
    Input input;
    bool dy_is_cast;             /* by SwiGLU's backward */
    Tensor x, y, dx, dy, w, dw;  /* BF16; dw f32 */
    Quantized xq, dyq;           /* tiles */
    Tensor w_blocks, w_blocks_t; /* of w, and of its transpose */
    Tensor x_e5m6;               /* INPUT_ATTENTION */
} Operands;

static Quantized quantized(Tensor x) {
    const Quantized q = {tiles_empty(DTYPE_E4M3, x.shape[0], x.shape[1]),
                         tiles_empty(DTYPE_E4M3, x.shape[1], x.shape[0])};
    op_quantize(&device, q, x, S);
    return q;
}

static void operands_make(Operands *o, const LayerShape *l) {
    for (int i = 0; i < LINEARS; i++) {
        const Linear linear = linear_of(l, i);
        const int64_t T = l->T, out = linear.out, in = linear.in;
        const bool shares = linear.input == INPUT_SAME, keeps = linear.input == INPUT_ATTENTION;
        o[i].input = linear.input;
        o[i].dy_is_cast = i + 1 < LINEARS && linear_of(l, i + 1).input == INPUT_SWIGLU;
        o[i].x = shares ? o[i - 1].x : matrix(DTYPE_BF16, T, in);
        o[i].dx = shares ? o[i - 1].dx : matrix(DTYPE_BF16, T, in);
        o[i].xq = shares ? o[i - 1].xq : quantized(o[i].x);
        o[i].x_e5m6 = keeps ? tiles_empty(DTYPE_E5M6, T, in) : tensor_none();
        o[i].y = matrix(DTYPE_BF16, T, out), o[i].dy = matrix(DTYPE_BF16, T, out);
        o[i].dyq = quantized(o[i].dy);
        o[i].w = matrix(DTYPE_BF16, out, in), o[i].dw = matrix(DTYPE_F32, out, in);
        o[i].w_blocks = blocks(0, out, in), o[i].w_blocks_t = blocks(0, in, out);
    }
}

/* ---- a step ------------------------------------------------------------------------------------------------------ */

static void step_bf16(const Operands *o) {
    for (int i = 0; i < LINEARS; i++) op_gemm(&device, o[i].y, o[i].x, o[i].w, GEMM_FPROP, false, S);
    for (int i = LINEARS - 1; i >= 0; i--)
        op_gemm(&device, o[i].dx, o[i].dy, o[i].w, GEMM_DGRAD, o[i].input == INPUT_SAME, S);
    for (int i = LINEARS - 1; i >= 0; i--) op_gemm(&device, o[i].dw, o[i].dy, o[i].x, GEMM_WGRAD, true, S);
}

static void cast_rows(Tensor rows, Tensor x) {
    op_quantize(&device, (Quantized){rows, tensor_none()}, x, S);
}

static void cast_columns(Tensor columns, Tensor x) {
    op_quantize(&device, (Quantized){tensor_none(), columns}, x, S);
}

/* gemms: or the casts alone. */
static void step_fp8(const Operands *o, bool gemms) {
    for (int i = 0; i < LINEARS; i++) {
        if (o[i].input == INPUT_ATTENTION) cast_rows(o[i].xq.rows, o[i].x), cast_rows(o[i].x_e5m6, o[i].x);
        if (gemms) op_gemm(&device, o[i].y, o[i].xq.rows, o[i].w_blocks, GEMM_FPROP, false, S);
    }
    for (int i = LINEARS - 1; i >= 0; i--) {
        if (!o[i].dy_is_cast) op_quantize(&device, o[i].dyq, o[i].dy, S);
        if (gemms) op_gemm(&device, o[i].dx, o[i].dyq.rows, o[i].w_blocks_t, GEMM_DGRAD, o[i].input == INPUT_SAME, S);
        if (o[i].input == INPUT_ATTENTION) op_copy(&device, o[i].x, o[i].x_e5m6, S);
    }
    for (int i = LINEARS - 1; i >= 0; i--) {
        if (o[i].input == INPUT_ATTENTION)
            cast_columns(o[i].xq.columns, o[i].x_e5m6);
        else if (o[i].input != INPUT_SWIGLU && o[i].input != INPUT_SAME)
            cast_columns(o[i].xq.columns, o[i].xq.rows);
        if (gemms) op_gemm(&device, o[i].dw, o[i].dyq.columns, o[i].xq.columns, GEMM_WGRAD, true, S);
    }
}

/* ---- casts inside other ops: seconds more than in BF16 ----------------------------------------------------------- */

static double norm_extra_s(int64_t T, Linear linear) {
    const int64_t in = linear.in;
    const bool adds = linear.input != INPUT_LATENT;
    const Tensor none = tensor_none(), y = matrix(DTYPE_BF16, T, in), q = tiles_empty(DTYPE_E4M3, T, in);
    const Tensor r = adds ? matrix(DTYPE_BF16, T, in) : none, branch = adds ? planes(DTYPE_BF16, 1, T, in) : none;
    const Tensor y_fp8 = linear.input == INPUT_ROUTED ? y : none, x = matrix(DTYPE_BF16, T, in);
    const Tensor rstd = vector(DTYPE_F32, T), w = vector(DTYPE_F32, in);
    const double wide_s =
        seconds_of([=] { op_residual_rmsnorm_forward(&device, r, y, none, rstd, x, branch, w, 1e-6, S); });
    const double s =
        seconds_of([=] { op_residual_rmsnorm_forward(&device, r, y_fp8, q, rstd, x, branch, w, 1e-6, S); });
    release_all();
    return fmax(s - wide_s, 0);
}

static double swiglu_extra_s(int64_t T, int64_t F) {
    const Tensor none = tensor_none(), h = matrix(DTYPE_BF16, T, 2 * F), y = matrix(DTYPE_BF16, T, F);
    const Tensor h_rows = tiles(T, 2 * F), y_rows = tiles_empty(DTYPE_E4M3, T, F);
    const Tensor y_columns = tiles_empty(DTYPE_E4M3, F, T), dy = matrix(DTYPE_BF16, T, F);
    const Tensor dh = matrix(DTYPE_BF16, T, 2 * F);
    const Quantized dhq = quantized(dh);
    const double wide_s = seconds_of([=] { op_swiglu_forward(&device, y, none, none, h, none, S); });
    const double s = seconds_of([=] { op_swiglu_forward(&device, none, y_rows, h_rows, h, none, S); });
    const double wide_back_s =
        seconds_of([=] { op_swiglu_backward(&device, dh, quantized_none(), none, none, dy, h, none, S); });
    const double back_s =
        seconds_of([=] { op_swiglu_backward(&device, none, dhq, y_columns, none, dy, h_rows, none, S); });
    release_all();
    return fmax(s - wide_s, 0) + fmax(back_s - wide_back_s, 0);
}

static double extra_s(const LayerShape *l) {
    double s = 0;
    for (int i = 0; i < LINEARS; i++) {
        const Linear linear = linear_of(l, i);
        if (linear.input == INPUT_NORM || linear.input == INPUT_LATENT || linear.input == INPUT_ROUTED)
            s += norm_extra_s(l->T, linear);
        else if (linear.input == INPUT_SWIGLU)
            s += swiglu_extra_s(l->T, linear.in);
    }
    return s;
}

/* ---- rows -------------------------------------------------------------------------------------------------------- */

static void rows_layer(const LayerShape *l) {
    const bool wants_time = is_wanted(title("linears_fp8/%s", l->name));
    const bool wants_casts = is_wanted(title("linears_casts/%s", l->name));
    if (!wants_time && !wants_casts) return;
    Operands o[LINEARS];
    double flops = 0;
    for (int i = 0; i < LINEARS; i++)
        flops += 6.0 * (double)l->T * (double)linear_of(l, i).out * (double)linear_of(l, i).in;
    operands_make(o, l);
    const double wide_s = seconds_of([&] { step_bf16(o); });
    const double steps_s = seconds_of([&] { step_fp8(o, true); }), passes_s = seconds_of([&] { step_fp8(o, false); });
    release_all();
    const double inside_s = extra_s(l), s = steps_s + inside_s;
    if (wants_time) row_flops(title("linears_fp8/%s", l->name), flops, wide_s, l->gate, s);
    if (wants_casts)
        row_share(title("linears_casts/%s", l->name), "FP8 Linears' time", s, l->casts_limit, passes_s + inside_s);
}

void rows_linears(void) {
    for (size_t i = 0; i < sizeof layers / sizeof *layers; i++) rows_layer(&layers[i]);
}
