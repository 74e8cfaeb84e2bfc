/* cuBLAS's handles and settings. libraries.py generates stubs for cuBLAS's computations, which count a launch and compute
   nothing. */
#include <stdlib.h>
#include <string.h>

#include "emulated.h"

typedef struct { int math, pointers; void *stream; } Handle;

int cublasCreate_v2(Handle **handle) { *handle = calloc(1, sizeof **handle); return 0; }
int cublasDestroy_v2(Handle *handle) { free(handle); return 0; }
int cublasSetStream_v2(Handle *handle, void *stream) { handle->stream = stream; return 0; }
int cublasGetStream_v2(Handle *handle, void **stream) { *stream = handle->stream; return 0; }
int cublasSetMathMode(Handle *handle, int mode) { handle->math = mode; return 0; }
int cublasGetMathMode(Handle *handle, int *mode) { *mode = handle->math; return 0; }
int cublasSetPointerMode_v2(Handle *handle, int mode) { handle->pointers = mode; return 0; }
int cublasGetPointerMode_v2(Handle *handle, int *mode) { *mode = handle->pointers; return 0; }
int cublasSetWorkspace_v2(Handle *handle, void *workspace, size_t bytes) { return 0; }
int cublasSetSmCountTarget(Handle *handle, int count) { return 0; }
int cublasGetVersion_v2(Handle *handle, int *version) { *version = CUDA_VERSION / 1000 * 10000; return 0; }
const char *cublasGetStatusString(int status) { return status ? "CUBLAS_STATUS_NOT_SUPPORTED" : "CUBLAS_STATUS_SUCCESS"; }
const char *cublasGetStatusName(int status) { return cublasGetStatusString(status); }

/* Decompositions of several matrices. Callers read `info`, which is 0 for success. It is a number on the host, but for getrf an
   array on the device with a number for each matrix. */
#define BATCHED(T) \
    int cublas##T##getrfBatched(Handle *handle, int n, void *all, int lda, int *pivots, int *info, int count) { \
        gpumem_launched("cublas" #T "getrfBatched"); \
        if (info) memset(info, 0, count * sizeof *info); \
        return 0; \
    } \
    int cublas##T##getrsBatched(Handle *handle, int transposed, int n, int columns, const void *all, int lda, \
                                const int *pivots, void *right, int ldb, int *info, int count) { \
        gpumem_launched("cublas" #T "getrsBatched"); \
        *info = 0; \
        return 0; \
    } \
    int cublas##T##geqrfBatched(Handle *handle, int m, int n, void *all, int lda, void *scales, int *info, int count) { \
        gpumem_launched("cublas" #T "geqrfBatched"); \
        *info = 0; \
        return 0; \
    }
BATCHED(S) BATCHED(D) BATCHED(C) BATCHED(Z)
