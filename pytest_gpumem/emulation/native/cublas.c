/* cuBLAS: handles and settings. Its computations are made by the builder: launched, and not run. */
#include <stdlib.h>

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
