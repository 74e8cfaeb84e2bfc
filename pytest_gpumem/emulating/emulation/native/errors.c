/* The CUDA runtime's errors, and the stand-ins' messages about functions that they lack. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "cudart_types.h"
#include "emulated.h"

static __thread int last_error;
static __thread char what_lacks[512]; /* the message about the last missing function that this thread called */

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
    {NOT_SUPPORTED, "cudaErrorNotSupported", "the emulated GPU lacks this"},
    {CAPTURE_UNSUPPORTED, "cudaErrorStreamCaptureUnsupported", "operation not permitted when stream is capturing"},
    {UNKNOWN, "cudaErrorUnknown", "the emulated GPU cannot go on (the reason is on stderr)"},
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
const char *cudaGetErrorString(int error) {
    return error == NOT_SUPPORTED && *what_lacks ? what_lacks : ERRORS[index_of(error)].said;
}
int cudaProfilerStart(void) { return SUCCESS; }
int cudaProfilerStop(void) { return SUCCESS; }

void gpumem_lacks(const char *library, const char *function) {
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    static const char *told[4096];
    static size_t count;
    snprintf(what_lacks, sizeof what_lacks, "the emulated GPU lacks %s of %s", function, library);
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < count; i++)
        if (told[i] == function) { pthread_mutex_unlock(&lock); return; }
    if (count < sizeof told / sizeof *told) told[count++] = function;
    pthread_mutex_unlock(&lock);
    fprintf(stderr, "pytest-gpumem: %s\n", what_lacks);
    fflush(stderr);
}
const char *gpumem_last_lacking(void) { return what_lacks; }

/* Throws std::runtime_error. This file is compiled as C, so it uses the C++ library that libtorch has loaded. */
void gpumem_raise(const char *text) {
    void *cxx = dlopen("libstdc++.so.6", RTLD_NOW | RTLD_NOLOAD);
    if (!cxx) return;
    void *(*allocate)(size_t) = dlsym(cxx, "__cxa_allocate_exception");
    void (*construct)(void *, const char *) = dlsym(cxx, "_ZNSt13runtime_errorC1EPKc");
    void (*destroy)(void *) = dlsym(cxx, "_ZNSt13runtime_errorD1Ev");
    void (*throw_it)(void *, void *, void (*)(void *)) = dlsym(cxx, "__cxa_throw");
    void *type = dlsym(cxx, "_ZTISt13runtime_error");
    if (!allocate || !construct || !destroy || !throw_it || !type) return;
    void *error = allocate(64);
    construct(error, text);
    throw_it(error, type, destroy);
}

/* Reports a call to a missing function. torch's own error for the returned status would name neither the missing function nor a
   remedy. So if torch's own libraries are the caller, this function throws an error with both. Any other caller gets the status. */
void gpumem_refuses(const char *library, const char *function, const char *why, const void *caller) {
    Dl_info from;
    char text[1024];
    gpumem_lacks(library, function);
    if (!dladdr(caller, &from) || !from.dli_fname || !strstr(from.dli_fname, "/torch/lib/libtorch")) return;
    snprintf(text, sizeof text, "%s: %s", what_lacks, why);
    gpumem_raise(text);
}

void gpumem_no_room(size_t bytes) {
    fprintf(
        stderr,
        "pytest-gpumem: the host could not reserve %zu bytes of address space for the emulated GPU. These bytes take almost no "
        "memory, but the system must allow them: see `ulimit -v`, and vm.overcommit_memory, which must not be 2\n",
        bytes
    );
    fflush(stderr);
}

/* Entry points of the driver. torch asserts that each entry point that it looks up exists, even if torch never calls it. So each
   name that the stand-in lacks gets a function of its own, which reports this name when it is called. */
enum { MOST_LACKING = 64 };
static char lacking[MOST_LACKING][64];
#define LACKING(i) static int lacking_##i(void) { gpumem_lacks("libcuda", lacking[0##i]); return NOT_SUPPORTED; }
#define LACKING_FUNCTION(i) lacking_##i,
#define EIGHT(do, i) do(i##0) do(i##1) do(i##2) do(i##3) do(i##4) do(i##5) do(i##6) do(i##7)
#define ALL(do) EIGHT(do, 0) EIGHT(do, 1) EIGHT(do, 2) EIGHT(do, 3) EIGHT(do, 4) EIGHT(do, 5) EIGHT(do, 6) EIGHT(do, 7)
ALL(LACKING)
static int (*const LACKING_FUNCTIONS[MOST_LACKING])(void) = {ALL(LACKING_FUNCTION)};
static void *lacking_function(const char *name) {
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    size_t i = 0;
    pthread_mutex_lock(&lock);
    while (i < MOST_LACKING && *lacking[i] && strcmp(lacking[i], name)) i++;
    if (i < MOST_LACKING) snprintf(lacking[i], sizeof *lacking, "%s", name);
    pthread_mutex_unlock(&lock);
    return i < MOST_LACKING ? (void *)LACKING_FUNCTIONS[i] : NULL;
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
    if (!*function && !strncmp(name, "cu", 2)) *function = lacking_function(name);
    if (status) *status = *function ? 0 : 1;
    return *function ? SUCCESS : gpumem_fail(SYMBOL_NOT_FOUND);
}
int cudaGetDriverEntryPoint(const char *name, void **function, unsigned long long flags, int *status) {
    return cudaGetDriverEntryPointByVersion(name, function, 0, flags, status);
}
