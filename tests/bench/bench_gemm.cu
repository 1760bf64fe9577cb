/* Rows of the dense GEMMs in FP8, and of the grouped ones. See bench_cuda.cu. */
#include "bench.cuh"

static const char *const gemm_kind_names[] = {"fprop", "dgrad", "wgrad"};

/* ---- dense ------------------------------------------------------------------------------------------------------- */

/* y (M, N) over K terms; the peer: the same in BF16. gate: how much faster. */
void rows_gemm_fp8(int64_t T, int64_t out, int64_t in, double gate) {
    for (int kind = 0; kind < 3; kind++) {
        const char *name = title("gemm_fp8_%s/%dx%dx%d", gemm_kind_names[kind], (int)T, (int)out, (int)in);
        if (!is_wanted(name)) continue;
        const bool is_wgrad = kind == GEMM_WGRAD;
        const int64_t M = is_wgrad ? out : T, N = kind == GEMM_FPROP ? out : in, K = is_wgrad ? T : kind ? out : in;
        const Tensor y = matrix(is_wgrad ? DTYPE_F32 : DTYPE_BF16, M, N), a = tiles(M, K);
        const Tensor b = is_wgrad ? tiles(N, K) : blocks(0, N, K);
        const Tensor a_wide = is_wgrad ? matrix(DTYPE_BF16, K, M) : matrix(DTYPE_BF16, M, K);
        const Tensor b_wide = kind == GEMM_FPROP ? matrix(DTYPE_BF16, N, K) : matrix(DTYPE_BF16, K, N);
        const double wide = seconds_of([=] { op_gemm(&device, y, a_wide, b_wide, (GemmKind)kind, is_wgrad, S); });
        const double s = seconds_of([=] { op_gemm(&device, y, a, b, (GemmKind)kind, is_wgrad, S); });
        row_flops(name, 2.0 * (double)T * (double)out * (double)in, wide, gate, s);
    }
}

/* ---- grouped ----------------------------------------------------------------------------------------------------- */

enum { EXPERTS_MAX = 256 };

/* First rows of experts with rows_each rows, into host (EXPERTS_MAX + 1) as well. */
static Tensor starts(int64_t n_experts, int64_t rows_each, bool ragged, int32_t *host) {
    static const int eighths[8] = {6, 10, 7, 8, 9, 8, 6, 10};
    CHECK(n_experts <= EXPERTS_MAX, "more than %d experts", EXPERTS_MAX);
    host[0] = 0;
    for (int64_t e = 0; e < n_experts; e++)
        host[e + 1] = host[e] + (int32_t)(rows_each / 8 * (ragged ? eighths[e % 8] : 8));
    return tensor_1d(copied(host, (size_t)(n_experts + 1) * 4), DTYPE_I32, n_experts + 1);
}

/* The peer: cuBLASLt, called once for each expert. */
void rows_grouped(int64_t n_experts, int64_t rows_each, int64_t out, int64_t in, bool ragged) {
    const int64_t N = n_experts * rows_each;
    int32_t host[EXPERTS_MAX + 1];
    for (int kind = 0; kind < 3; kind++) {
        const char *name = title("grouped_bf16_%s/%dx%dx%dx%d%s", gemm_kind_names[kind], (int)n_experts, (int)rows_each,
                                 (int)out, (int)in, ragged ? "/ragged" : "");
        if (!is_wanted(name)) continue;
        Tensor start = starts(n_experts, rows_each, ragged, host);
        Tensor x = matrix(DTYPE_BF16, N, in), y = matrix(DTYPE_BF16, N, out);
        Tensor w = planes(kind == GEMM_WGRAD ? DTYPE_F32 : DTYPE_BF16, n_experts, out, in);
        const auto ours = [=] {
            if (kind == GEMM_WGRAD)
                op_grouped_wgrad(&device, w, y, x, start, S);
            else
                op_grouped_gemm(&device, kind == GEMM_FPROP ? y : x, kind == GEMM_FPROP ? x : y, w, start,
                                (GemmKind)kind, S);
        };
        const auto peer = [=, &host] {
            for (int64_t e = 0; e < n_experts; e++) {
                const int64_t first = host[e], n = host[e + 1] - first;
                const Tensor xe = tensor_rows(x, first, n), ye = tensor_rows(y, first, n), we = tensor_plane(w, e);
                if (kind == GEMM_FPROP) op_gemm(&device, ye, xe, we, GEMM_FPROP, false, S);
                if (kind == GEMM_DGRAD) op_gemm(&device, xe, ye, we, GEMM_DGRAD, false, S);
                if (kind == GEMM_WGRAD) op_gemm(&device, we, ye, xe, GEMM_WGRAD, true, S);
            }
        };
        const double peer_s = seconds_of(peer);
        row_flops(name, 2.0 * (double)N * (double)out * (double)in, peer_s, 0.6, seconds_of(ours));
    }
}

/* The peer: cuBLASLt in FP8, called once for each expert, with the same rows of activations again and again. */
void rows_grouped_fp8(int64_t n_experts, int64_t rows_each, int64_t out, int64_t in, bool ragged) {
    const int64_t N = n_experts * rows_each;
    int32_t host[EXPERTS_MAX + 1];
    for (int kind = 0; kind < 3; kind++) {
        const char *name = title("grouped_fp8_%s/%dx%dx%dx%d%s", gemm_kind_names[kind], (int)n_experts, (int)rows_each,
                                 (int)out, (int)in, ragged ? "/ragged" : "");
        if (!is_wanted(name)) continue;
        const bool is_wgrad = kind == GEMM_WGRAD;
        const Tensor start = starts(n_experts, rows_each, ragged, host);
        const int64_t to = kind == GEMM_DGRAD ? in : out, from = kind == GEMM_DGRAD ? out : in;
        const Tensor y = is_wgrad ? planes(DTYPE_F32, n_experts, out, in) : matrix(DTYPE_BF16, N, to);
        const Tensor a = is_wgrad ? tiles(out, N) : tiles(N, from),
                     b = is_wgrad ? tiles(in, N) : blocks(n_experts, to, from);
        const Tensor a_one = is_wgrad ? tiles(out, rows_each) : tiles(rows_each, from);
        const Tensor b_one = is_wgrad ? tiles(in, rows_each) : tensor_none();
        const auto ours = [=] {
            if (is_wgrad)
                op_grouped_wgrad(&device, y, a, b, start, S);
            else
                op_grouped_gemm(&device, y, a, b, start, (GemmKind)kind, S);
        };
        const auto peer = [=] {
            for (int64_t e = 0; e < n_experts; e++)
                op_gemm(&device, is_wgrad ? tensor_plane(y, e) : tensor_rows(y, e * rows_each, rows_each), a_one,
                        is_wgrad ? b_one : tensor_plane(b, e), (GemmKind)kind, is_wgrad, S);
        };
        const double peer_s = seconds_of(peer);
        row_flops(name, 2.0 * (double)N * (double)out * (double)in, peer_s, 0.6, seconds_of(ours));
    }
}
