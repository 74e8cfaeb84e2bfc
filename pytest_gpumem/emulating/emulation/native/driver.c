/* The CUDA driver's functions that torch and Triton call: contexts, virtual memory (expandable segments) and modules. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "emulated.h"

typedef uintptr_t Pointer;
enum { INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_FOUND = 500, NOT_SUPPORTED = 801 };

extern int cudaDeviceGetAttribute(int *, int, int), cudaSetDevice(int), cudaGetDevice(int *), cudaDeviceSynchronize(void);
extern int cudaStreamIsCapturing(void *, int *);
extern void *gpumem_driver_function(const char *);

static const Pointer CONTEXT = 0xC000; /* a context is this number plus the device's number */

int cuInit(unsigned flags) { return 0; }
int cuDriverGetVersion(int *version) { *version = CUDA_VERSION; return 0; }
int cuDeviceGetCount(int *count) { *count = gpumem_gpu.count; return 0; }
int cuDeviceGet(int *device, int number) { *device = number; return 0; }
int cuDeviceGetName(char *name, int length, int device) { snprintf(name, (size_t)length, "%s", gpumem_told()->name); return 0; }
int cuDeviceGetUuid(void *uuid, int device) { gpumem_uuid(device, uuid); return 0; }
int cuDeviceGetUuid_v2(void *uuid, int device) { gpumem_uuid(device, uuid); return 0; }
int cuDeviceTotalMem_v2(size_t *bytes, int device) { *bytes = gpumem_told()->total_bytes; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) { return cudaDeviceGetAttribute(value, attribute, device); }
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
    if (flags) *flags = 0;
    *active = 1;
    return 0;
}
int cuDevicePrimaryCtxRetain(Pointer *context, int device) { *context = CONTEXT + (Pointer)device; return 0; }
int cuDevicePrimaryCtxRelease_v2(int device) { return 0; }
int cuCtxGetCurrent(Pointer *context) { *context = CONTEXT + (Pointer)gpumem_current(); return 0; }
int cuCtxSetCurrent(Pointer context) { return context ? cudaSetDevice((int)(context - CONTEXT)) : 0; }
int cuCtxPushCurrent_v2(Pointer context) { return cuCtxSetCurrent(context); }
int cuCtxPopCurrent_v2(Pointer *context) { return cuCtxGetCurrent(context); }
int cuCtxGetDevice(int *device) { return cudaGetDevice(device); }
int cuCtxSynchronize(void) { return cudaDeviceSynchronize(); }
/* This driver never logs anything, so it never calls the callback. */
int cuLogsRegisterCallback(void *callback, void *data, Pointer *handle) {
    if (handle) *handle = 0xE000;
    return 0;
}
int cuLogsUnregisterCallback(Pointer handle) { return 0; }
/* Limits for stacks, heaps and the buffer of printf. No kernel runs, so the limits have no effect. */
int cuCtxSetLimit(int limit, size_t bytes) { return 0; }
int cuCtxGetLimit(size_t *bytes, int limit) { *bytes = MIB; return 0; }
int cuMemGetInfo_v2(size_t *available, size_t *total) {
    *total = gpumem_told()->total_bytes;
    *available = *total - gpumem_used(gpumem_current());
    return 0;
}
int cuGetErrorString(int error, const char **text) {
    *text = !error ? "no error" : error == OUT_OF_MEMORY ? "out of memory" : "the emulated GPU lacks this";
    return 0;
}
int cuGetErrorName(int error, const char **name) {
    *name = !error ? "CUDA_SUCCESS" : error == OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_NOT_SUPPORTED";
    return 0;
}

/* Virtual memory. An address range takes no device memory. A handle takes device memory, even if it is not mapped. */
typedef struct {
    size_t bytes;
    int device, users; /* `users` is the reference count: the creator, and each mapping */
} Handle;
typedef struct Mapping {
    Pointer at;
    Handle *handle;
    struct Mapping *next;
} Mapping;
static Mapping *mappings; /* no lock: torch's allocator holds its own lock in these functions */

static void drop(Handle *handle) {
    if (--handle->users) return;
    gpumem_release(handle->device, handle->bytes);
    free(handle);
}
int cuMemGetAllocationGranularity(size_t *bytes, const void *properties, int option) { *bytes = 2 * MIB; return 0; }
int cuMemAddressReserve(Pointer *at, size_t bytes, size_t alignment, Pointer wanted, unsigned long long flags) {
    *at = (Pointer)gpumem_reserve(bytes, 0, gpumem_current());
    return *at ? 0 : OUT_OF_MEMORY;
}
int cuMemAddressFree(Pointer at, size_t bytes) { gpumem_unreserve((void *)at); return 0; }
int cuMemCreate(Pointer *made, size_t bytes, const int *properties, unsigned long long flags) {
    int device = properties[3]; /* after the kinds of memory, handle and place */
    if (device < 0 || device >= gpumem_gpu.count) device = gpumem_current();
    if (!gpumem_charge(device, bytes)) return OUT_OF_MEMORY;
    Handle *handle = malloc(sizeof *handle);
    *handle = (Handle){bytes, device, 1};
    *made = (Pointer)handle;
    return 0;
}
int cuMemRelease(Pointer handle) { drop((Handle *)handle); return 0; }
int cuMemMap(Pointer at, size_t bytes, size_t offset, Pointer handle, unsigned long long flags) {
    Mapping *mapping = malloc(sizeof *mapping);
    *mapping = (Mapping){at, (Handle *)handle, mappings};
    mappings = mapping;
    mapping->handle->users++;
    return 0;
}
int cuMemUnmap(Pointer at, size_t bytes) {
    madvise((void *)at, bytes, MADV_DONTNEED);
    for (Mapping **link = &mappings; *link;) {
        Mapping *mapping = *link;
        if (mapping->at >= at && mapping->at < at + bytes) {
            *link = mapping->next;
            drop(mapping->handle);
            free(mapping);
        } else link = &mapping->next;
    }
    return 0;
}
int cuMemSetAccess(Pointer at, size_t bytes, const void *access, size_t count) { return 0; }
/* If memory runs out, torch 2.6 looks these functions up by name, and asserts that they exist. It does not call them. */
#define LACKING(name) int name(void) { gpumem_lacks("libcuda", #name); return NOT_SUPPORTED; }
LACKING(cuMemExportToShareableHandle)
LACKING(cuMemImportFromShareableHandle)
LACKING(cuMulticastAddDevice)
LACKING(cuMulticastBindMem)
LACKING(cuMulticastCreate)
int cuMemsetD32Async(Pointer at, unsigned value, size_t count, void *stream) {
    extern void gpumem_fill(void *, const void *, size_t, size_t);
    gpumem_fill((void *)at, &value, sizeof value, count);
    return 0;
}
int cuStreamIsCapturing(void *stream, int *status) { return cudaStreamIsCapturing(stream, status); }
int cuStreamWriteValue32(void *stream, Pointer at, unsigned value, unsigned flags) { return 0; }
/* `attribute` is a number from CUpointer_attribute: 3 is the pointer on the device, 4 the pointer on the host, 9 the device's
   number. Ordinary host memory gives an error, by which Triton recognises host tensors and refuses them. */
int cuPointerGetAttribute(void *value, int attribute, Pointer at) {
    enum { PINNED = -1, FOREIGN = -2 };
    int device = gpumem_device_of((void *)at, FOREIGN);
    if (device == FOREIGN) return INVALID_VALUE;
    if (attribute == 9) *(int *)value = device == PINNED ? gpumem_current() : device;
    else if (attribute == 3 || attribute == 4) *(Pointer *)value = at;
    else return NOT_SUPPORTED;
    return 0;
}

/* Modules, which torch (after NVRTC) and Triton load. */
static const Pointer MODULE = 0xD000;
int cuModuleLoadData(Pointer *module, const void *image) { *module = MODULE; return 0; }
int cuModuleLoadDataEx(Pointer *module, const void *image, unsigned count, void *options, void *values) {
    return cuModuleLoadData(module, image);
}
int cuModuleLoad(Pointer *module, const char *path) { return cuModuleLoadData(module, path); }
int cuModuleUnload(Pointer module) { return 0; }
int cuModuleGetFunction(Pointer *function, Pointer module, const char *name) {
    *function = (Pointer)strdup(name); /* never freed: there are few kernels, and launches are counted by this pointer */
    return 0;
}
/* `attribute` is a number from CUfunction_attribute: 0 is the most threads in a block, 4 the registers. All others are 0, among
   them local and shared memory. */
int cuFuncGetAttribute(int *value, int attribute, Pointer function) {
    *value = attribute == 0 ? 1024 : attribute == 4 ? 32 : 0;
    return 0;
}
int cuFuncSetAttribute(Pointer function, int attribute, int value) { return 0; }
int cuFuncSetCacheConfig(Pointer function, int config) { return 0; }
int cuLaunchKernel(
    Pointer function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
    void *stream, void **arguments, void **extra
) {
    gpumem_launched_with((const char *)function, arguments);
    return 0;
}
int cuLaunchKernelEx(const void *config, Pointer function, void **arguments, void **extra) {
    gpumem_launched_with((const char *)function, arguments);
    return 0;
}
int cuLaunchCooperativeKernel(
    Pointer function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
    void *stream, void **arguments
) {
    gpumem_launched_with((const char *)function, arguments);
    return 0;
}
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, Pointer function, int threads, size_t shared) {
    *blocks = 2;
    return 0;
}
int cuOccupancyMaxActiveClusters(int *clusters, Pointer function, const void *config) { *clusters = 1; return 0; }
int cuTensorMapEncodeTiled(void *map) { return 0; }
int cuTensorMapEncodeIm2col(void *map) { return 0; }
int cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, int *status) {
    *function = gpumem_driver_function(name);
    if (status) *status = !*function;
    return *function ? 0 : NOT_FOUND;
}
