/* Descriptors of matrices for the tensor memory accelerator. The driver makes them; its function is asked for by name,
 * so that the program links with the runtime alone. */
#include "hopper.cuh"

typedef CUresult (*EncodeTiled)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *,
                                const cuuint64_t *, const cuuint32_t *, const cuuint32_t *, CUtensorMapInterleave,
                                CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

static EncodeTiled encode_tiled() {
    static EncodeTiled encode;
    if (encode) return encode;
    cudaDriverEntryPointQueryResult found;
    void *function = NULL;
#if CUDART_VERSION >= 12050
    CUDA_CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found));
#else
    CUDA_CHECK(cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function, cudaEnableDefault, &found));
#endif
    CHECK(found == cudaDriverEntryPointSuccess && function, "the driver has no cuTensorMapEncodeTiled");
    encode = (EncodeTiled)function;
    return encode;
}

CUtensorMap tma_map_bytes(const void *data, int64_t rows, int64_t cols, int64_t ld, int box_rows) {
    CUtensorMap map;
    const cuuint64_t extent[2] = {(cuuint64_t)cols, (cuuint64_t)rows}, stride[1] = {(cuuint64_t)ld};
    const cuuint32_t box[2] = {128, (cuuint32_t)box_rows}, step[2] = {1, 1};
    const CUresult result = encode_tiled()(&map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 2, (void *)data, extent, stride, box,
                                           step, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                           CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    CHECK(result == CUDA_SUCCESS, "no tensor map of %lld x %lld bytes, ld %lld: error %d", (long long)rows,
          (long long)cols, (long long)ld, (int)result);
    return map;
}
