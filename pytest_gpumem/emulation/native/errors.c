/* Errors of the runtime, and what the stand-ins say when they cannot do something. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "cudart_types.h"
#include "emulated.h"

static __thread int last_error;

int gpumem_fail(int error) {
    last_error = error;
    return error;
}

static struct { int code; const char *name, *said; } const ERRORS[] = {
    {SUCCESS, "cudaSuccess", "no error"},
    {INVALID_VALUE, "cudaErrorInvalidValue", "invalid argument"},
    {OUT_OF_MEMORY, "cudaErrorMemoryAllocation", "out of memory"},
    {INVALID_CONFIGURATION, "cudaErrorInvalidConfiguration", "invalid configuration argument"},
    {INVALID_DEVICE, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {INVALID_HANDLE, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {NO_KERNEL_IMAGE, "cudaErrorNoKernelImageForDevice", "no kernel image is available for execution on the device"},
    {SYMBOL_NOT_FOUND, "cudaErrorSymbolNotFound", "named symbol not found"},
    {NOT_READY, "cudaErrorNotReady", "device not ready"},
    {NOT_SUPPORTED, "cudaErrorNotSupported", "the emulated GPU lacks this (its name is on stderr)"},
    {CAPTURE_UNSUPPORTED, "cudaErrorStreamCaptureUnsupported", "operation not permitted when stream is capturing"},
    {UNKNOWN, "cudaErrorUnknown", "the emulated GPU cannot go on (why is on stderr)"},
    {NO_ERROR_OF_OURS, "unrecognized error code", "unrecognized error code"},
};

static size_t index_of(int error) {
    for (size_t i = 0; i < sizeof ERRORS / sizeof *ERRORS; i++)
        if (ERRORS[i].code == error) return i;
    return sizeof ERRORS / sizeof *ERRORS - 1;
}

int cudaGetLastError(void) {
    int error = last_error;
    last_error = SUCCESS;
    return error;
}
int cudaPeekAtLastError(void) { return last_error; }
const char *cudaGetErrorName(int error) { return ERRORS[index_of(error)].name; }
const char *cudaGetErrorString(int error) { return ERRORS[index_of(error)].said; }
int cudaProfilerStart(void) { return SUCCESS; }
int cudaProfilerStop(void) { return SUCCESS; }

void gpumem_lacks(const char *library, const char *function) {
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    static const char *told[4096];
    static size_t count;
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < count; i++)
        if (told[i] == function) { pthread_mutex_unlock(&lock); return; }
    if (count < sizeof told / sizeof *told) told[count++] = function;
    pthread_mutex_unlock(&lock);
    fprintf(stderr, "pytest-gpumem: the emulated GPU lacks %s of %s\n", function, library);
    fflush(stderr);
}

void gpumem_no_room(size_t bytes) {
    fprintf(
        stderr,
        "pytest-gpumem: the host could not reserve %zu bytes of address space for the emulated GPU. They are not touched, but "
        "must be allowed: see `ulimit -v`, and vm.overcommit_memory, which must not be 2\n",
        bytes
    );
    fflush(stderr);
}

/* Entry points of the driver. torch asserts that all it asks for are there, also those that it then does not call. */
static int lacking(void) {
    gpumem_lacks("libcuda", "a function of the driver, asked for by name");
    return NOT_SUPPORTED;
}
void *gpumem_driver_function(const char *name) {
    static void *driver;
    char second[256];
    if (!driver) driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    if (!driver) return NULL;
    void *function = dlsym(driver, name);
    if (function) return function;
    snprintf(second, sizeof second, "%s_v2", name);
    return dlsym(driver, second);
}
int cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version, unsigned long long flags, int *status) {
    *function = gpumem_driver_function(name);
    if (!*function && !strncmp(name, "cu", 2)) *function = (void *)lacking;
    if (status) *status = *function ? 0 : 1;
    return *function ? SUCCESS : gpumem_fail(SYMBOL_NOT_FOUND);
}
int cudaGetDriverEntryPoint(const char *name, void **function, unsigned long long flags, int *status) {
    return cudaGetDriverEntryPointByVersion(name, function, 0, flags, status);
}
