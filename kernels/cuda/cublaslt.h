/* cuBLASLt, loaded when a GPU is started: half a gigabyte that a run on the CPU, `help` or `plan` need not map.
 *
 * The types are the header's; a function is called by its own name, which is a pointer here. One row in each of the two
 * lists for each function that is used; one that is not listed does not link. cublaslt_load (cuda.h) fills them. */
#ifndef TRAIN_MOE_CUBLASLT_H
#define TRAIN_MOE_CUBLASLT_H

#include <cublasLt.h>

#define CUBLASLT_FUNCTIONS(ROW)                                                                                        \
    ROW(Create)                                                                                                        \
    ROW(Destroy)                                                                                                       \
    ROW(GetVersion)                                                                                                    \
    ROW(GetStatusString)                                                                                               \
    ROW(Matmul)                                                                                                        \
    ROW(MatmulDescCreate)                                                                                              \
    ROW(MatmulDescDestroy)                                                                                             \
    ROW(MatmulDescSetAttribute)                                                                                        \
    ROW(MatrixLayoutCreate)                                                                                            \
    ROW(MatrixLayoutDestroy)                                                                                           \
    ROW(MatrixLayoutSetAttribute)                                                                                      \
    ROW(MatmulPreferenceCreate)                                                                                        \
    ROW(MatmulPreferenceDestroy)                                                                                       \
    ROW(MatmulPreferenceSetAttribute)                                                                                  \
    ROW(MatmulAlgoGetHeuristic)                                                                                        \
    ROW(MatmulAlgoGetIds)                                                                                              \
    ROW(MatmulAlgoInit)                                                                                                \
    ROW(MatmulAlgoCheck)                                                                                               \
    ROW(MatmulAlgoCapGetAttribute)                                                                                     \
    ROW(MatmulAlgoConfigGetAttribute)                                                                                  \
    ROW(MatmulAlgoConfigSetAttribute)

typedef struct {
#define CUBLASLT_MEMBER(name) decltype(&::cublasLt##name) name;
    CUBLASLT_FUNCTIONS(CUBLASLT_MEMBER)
#undef CUBLASLT_MEMBER
} CublasLt;
extern CublasLt cublaslt;

#define cublasLtCreate cublaslt.Create
#define cublasLtDestroy cublaslt.Destroy
#define cublasLtGetVersion cublaslt.GetVersion
#define cublasLtGetStatusString cublaslt.GetStatusString
#define cublasLtMatmul cublaslt.Matmul
#define cublasLtMatmulDescCreate cublaslt.MatmulDescCreate
#define cublasLtMatmulDescDestroy cublaslt.MatmulDescDestroy
#define cublasLtMatmulDescSetAttribute cublaslt.MatmulDescSetAttribute
#define cublasLtMatrixLayoutCreate cublaslt.MatrixLayoutCreate
#define cublasLtMatrixLayoutDestroy cublaslt.MatrixLayoutDestroy
#define cublasLtMatrixLayoutSetAttribute cublaslt.MatrixLayoutSetAttribute
#define cublasLtMatmulPreferenceCreate cublaslt.MatmulPreferenceCreate
#define cublasLtMatmulPreferenceDestroy cublaslt.MatmulPreferenceDestroy
#define cublasLtMatmulPreferenceSetAttribute cublaslt.MatmulPreferenceSetAttribute
#define cublasLtMatmulAlgoGetHeuristic cublaslt.MatmulAlgoGetHeuristic
#define cublasLtMatmulAlgoGetIds cublaslt.MatmulAlgoGetIds
#define cublasLtMatmulAlgoInit cublaslt.MatmulAlgoInit
#define cublasLtMatmulAlgoCheck cublaslt.MatmulAlgoCheck
#define cublasLtMatmulAlgoCapGetAttribute cublaslt.MatmulAlgoCapGetAttribute
#define cublasLtMatmulAlgoConfigGetAttribute cublaslt.MatmulAlgoConfigGetAttribute
#define cublasLtMatmulAlgoConfigSetAttribute cublaslt.MatmulAlgoConfigSetAttribute

#endif
