/* Rows of attention. Their peer, cuDNN, is measured by scripts/peers/torch_attention.py. See bench_cuda.cu. */
#include "bench.cuh"

/* Of each token, the first one of its sequence. */
static Tensor starts(int64_t n_seqs, int64_t seq_len) {
    const int64_t T = n_seqs * seq_len;
    int32_t *host = (int32_t *)malloc((size_t)T * 4);
    CHECK(host, "no memory");
    for (int64_t t = 0; t < T; t++) host[t] = (int32_t)(t / seq_len * seq_len);
    void *data = copied(host, (size_t)T * 4);
    free(host);
    return tensor_1d(data, DTYPE_I32, T);
}

/* Causal, n_seqs sequences of seq_len tokens, heads of 128 + 64 and 128. FLOPs: half of the square; backward without
 * the second product for the scores. */
void rows_attention(int n_heads, int64_t n_seqs, int64_t seq_len) {
    const AttentionShape a = {n_heads, 128, 64, 128, 0.0722, 1};
    const int64_t T = n_seqs * seq_len, qk = n_heads * 192, v = n_heads * 128;
    const double square = (double)n_seqs * n_heads * (double)seq_len * (double)seq_len;
    for (int backward = 0; backward < 2; backward++) {
        const char *kind = backward ? "backward" : "forward";
        const char *name = n_seqs == 1 ? title("attention_%s/%dx%d", kind, n_heads, (int)seq_len)
                                       : title("attention_%s/%dx%dx%d", kind, n_heads, (int)n_seqs, (int)seq_len);
        if (!is_wanted(name)) continue;
        Tensor q = matrix(DTYPE_BF16, T, qk), k = matrix(DTYPE_BF16, T, qk), val = matrix(DTYPE_BF16, T, v);
        Tensor o = matrix(DTYPE_BF16, T, v), d_o = matrix(DTYPE_BF16, T, v), dq = matrix(DTYPE_BF16, T, qk);
        Tensor dk = matrix(DTYPE_BF16, T, qk), dv = matrix(DTYPE_BF16, T, v), doc_start = starts(n_seqs, seq_len);
        Tensor lse = matrix(DTYPE_F32, T, n_heads), delta = matrix(DTYPE_F32, T, n_heads);
        op_attention_forward(&device, o, lse, q, k, val, doc_start, a, S); /* backward needs its lse */
        const double s = seconds_of([=] {
            if (backward)
                op_attention_backward(&device, dq, dk, dv, delta, d_o, o, q, k, val, lse, doc_start, a, S);
            else
                op_attention_forward(&device, o, lse, q, k, val, doc_start, a, S);
        });
        row_flops(name, square * (backward ? 3 * 192 + 2 * 128 : 192 + 128), 0, 0, s);
    }
}
