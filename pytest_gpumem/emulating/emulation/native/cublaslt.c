/* cuBLASLt. Descriptors are empty, and each matrix product has a single algorithm, which needs no workspace. torch allocates the
   workspace that it offers to cuBLASLt even if the algorithm does not use this workspace. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "emulated.h"

enum { INVALID_VALUE = 7, ROOM = 512 };
typedef struct { uint64_t algorithm[8]; size_t workspace; int state; float waves; int reserved[4]; } Result;

size_t cublasLtGetVersion(void) { return CUDA_VERSION / 1000 * 10000; }
int cublasLtCreate(void **handle) { *handle = calloc(1, ROOM); return 0; }
int cublasLtDestroy(void *handle) { free(handle); return 0; }
int cublasLtMatmulDescCreate(void **made, int compute, int scale) { *made = calloc(1, ROOM); return 0; }
int cublasLtMatmulDescDestroy(void *made) { free(made); return 0; }
int cublasLtMatmulDescSetAttribute(void *made, int attribute, const void *value, size_t bytes) { return 0; }
int cublasLtMatrixLayoutCreate(void **made, int type, uint64_t rows, uint64_t columns, int64_t leading) {
    *made = calloc(1, ROOM);
    return 0;
}
int cublasLtMatrixLayoutDestroy(void *made) { free(made); return 0; }
int cublasLtMatrixLayoutSetAttribute(void *made, int attribute, const void *value, size_t bytes) { return 0; }
int cublasLtMatmulPreferenceCreate(void **made) { *made = calloc(1, ROOM); return 0; }
int cublasLtMatmulPreferenceDestroy(void *made) { free(made); return 0; }
int cublasLtMatmulPreferenceSetAttribute(void *made, int attribute, const void *value, size_t bytes) { return 0; }
int cublasLtMatmulAlgoGetHeuristic(
    void *handle, void *product, void *a, void *b, void *c, void *d, void *preference, int wanted, Result *results, int *found
) {
    if (wanted < 1) return INVALID_VALUE;
    memset(results, 0, sizeof *results);
    results->waves = 1;
    *found = 1;
    return 0;
}
int cublasLtMatmul(void) { gpumem_launched("cublasLtMatmul"); return 0; }
