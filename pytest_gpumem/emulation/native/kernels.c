/* Kernels: registered by name, counted when they are launched, and not run. Only a fill is done, since zeros decide branches. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "cudart_types.h"
#include "emulated.h"

int gpumem_fail(int error);
void gpumem_fill(void *at, const void *value, size_t width, size_t count);

typedef struct {
    const void *host; /* the host's function of a kernel, or the name's own address */
    const char *name;
    long launches;
} Kernel;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Kernel *kernels; /* a hash table, never more than half full */
static size_t kernel_count, kernel_room;

static Kernel *slot(const void *host) {
    size_t index = (((uintptr_t)host >> 4) * 0x9E3779B97F4A7C15ull >> 20) & (kernel_room - 1);
    while (kernels[index].host && kernels[index].host != host) index = (index + 1) & (kernel_room - 1);
    return &kernels[index];
}

static Kernel *entered(const void *host, const char *name) {
    if (2 * kernel_count >= kernel_room) {
        Kernel *old = kernels;
        size_t old_room = kernel_room;
        kernel_room = old_room ? 2 * old_room : 65536;
        kernels = calloc(kernel_room, sizeof *kernels);
        if (!kernels) abort();
        for (size_t i = 0; i < old_room; i++)
            if (old[i].host) *slot(old[i].host) = old[i];
        free(old);
    }
    Kernel *kernel = slot(host);
    if (!kernel->host) {
        kernel_count++;
        *kernel = (Kernel){host, name, 0};
    }
    return kernel;
}

void **__cudaRegisterFatBinary(void *binary) { static void *handle[4]; return handle; }
void __cudaRegisterFatBinaryEnd(void **handle) {}
void __cudaUnregisterFatBinary(void **handle) {}
char __cudaInitModule(void **handle) { return 1; }
void __cudaRegisterVar(
    void **handle, char *host, char *device, const char *name, int external, size_t size, int constant, int global
) {}
void __cudaRegisterFunction(
    void **handle, const char *host, char *device, const char *name, int threads, void *tid, void *bid, void *block,
    void *grid, int *size
) {
    pthread_mutex_lock(&lock);
    entered(host, name);
    pthread_mutex_unlock(&lock);
}

/* A kernel of a library, which is told by its name only. */
void gpumem_launched(const char *name) {
    pthread_mutex_lock(&lock);
    entered(name, name)->launches++;
    pthread_mutex_unlock(&lock);
}

/* Tells each kernel that was launched since the last call of gpumem_forget_launches. */
void gpumem_tell_launches(void (*tell)(const char *name, long launches)) {
    for (size_t i = 0; i < kernel_room; i++)
        if (kernels[i].launches) tell(kernels[i].name, kernels[i].launches);
}
void gpumem_forget_launches(void) {
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < kernel_room; i++) kernels[i].launches = 0;
    pthread_mutex_unlock(&lock);
}

/* The size of FillFunctor<T>'s T, from the kernel's mangled name; 0 where it is no fill. */
static size_t fill_width(const char *name) {
    const char *type = strstr(name, "FillFunctorI");
    if (!type || !strstr(name, "vectorized_elementwise_kernelI")) return 0;
    type += strlen("FillFunctorI");
    if (!strncmp(type, "N3c108BFloat16", 14) || !strncmp(type, "N3c104Half", 10)) return 2;
    switch (*type) {
    case 'b': case 'a': case 'h': return 1;
    case 's': return 2;
    case 'f': case 'i': return 4;
    case 'd': case 'l': return 8;
    default: return 0;
    }
}

static int launch(const void *host, Dim3 grid, Dim3 block, void **arguments, size_t shared) {
    if (!grid.x || !grid.y || !grid.z || grid.x > 2147483647u || grid.y > 65535 || grid.z > 65535 || !block.x || !block.y ||
        !block.z || (size_t)block.x * block.y * block.z > 1024 || shared > (size_t)gpumem_gpu.shared_per_block_optin)
        return gpumem_fail(INVALID_CONFIGURATION);
    pthread_mutex_lock(&lock);
    Kernel *kernel = entered(host, "a kernel that was not registered");
    kernel->launches++;
    const char *name = kernel->name;
    pthread_mutex_unlock(&lock);
    size_t width = fill_width(name);
    /* (int count, functor {value}, array {pointer}) */
    if (width && arguments) gpumem_fill(*(void **)arguments[2], arguments[1], width, (size_t)*(int *)arguments[0]);
    return SUCCESS;
}

static __thread struct { Dim3 grid, block; size_t shared; void *stream; } call;
unsigned __cudaPushCallConfiguration(Dim3 grid, Dim3 block, size_t shared, void *stream) {
    call.grid = grid;
    call.block = block;
    call.shared = shared;
    call.stream = stream;
    return 0;
}
int __cudaPopCallConfiguration(Dim3 *grid, Dim3 *block, size_t *shared, void *stream) {
    *grid = call.grid;
    *block = call.block;
    *shared = call.shared;
    *(void **)stream = call.stream;
    return SUCCESS;
}
int __cudaGetKernel(void **kernel, const void *host) { *kernel = (void *)host; return SUCCESS; }
int __cudaLaunchKernel(void *kernel, Dim3 grid, Dim3 block, void **arguments, size_t shared, void *stream) {
    return launch(kernel, grid, block, arguments, shared);
}
int cudaLaunchKernel(const void *host, Dim3 grid, Dim3 block, void **arguments, size_t shared, void *stream) {
    return launch(host, grid, block, arguments, shared);
}
int cudaLaunchCooperativeKernel(const void *host, Dim3 grid, Dim3 block, void **arguments, size_t shared, void *stream) {
    return launch(host, grid, block, arguments, shared);
}
int cudaLaunchKernelExC(const LaunchConfig *config, const void *host, void **arguments) {
    return launch(host, config->grid, config->block, arguments, config->dynamic_shared);
}

/* CUB chooses its kernels by the version of the code: that of the architecture itself. */
int cudaFuncGetAttributes(FunctionAttributes *attributes, const void *host) {
    memset(attributes, 0, sizeof *attributes);
    attributes->threads_per_block = 1024;
    attributes->registers = 32;
    attributes->ptx_version = attributes->binary_version = gpumem_gpu.major * 10 + gpumem_gpu.minor;
    attributes->dynamic_shared = gpumem_gpu.shared_per_block;
    return SUCCESS;
}
int cudaFuncSetAttribute(const void *host, int attribute, int value) { return SUCCESS; }
int cudaFuncSetCacheConfig(const void *host, int config) { return SUCCESS; }
int cudaKernelSetAttributeForDevice(const void *kernel, int attribute, int value, int device) { return SUCCESS; }
int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    int *blocks, const void *host, int threads, size_t shared, unsigned flags
) {
    const Gpu *gpu = &gpumem_gpu;
    int fitting = threads > 0 ? gpu->threads_per_multiprocessor / threads : 1;
    if (fitting > gpu->blocks_per_multiprocessor) fitting = gpu->blocks_per_multiprocessor;
    if (shared) {
        int by_shared = (int)((size_t)gpu->shared_per_multiprocessor / (shared + 1024));
        if (by_shared < fitting) fitting = by_shared;
    }
    *blocks = fitting;
    return SUCCESS;
}
int cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *host, int threads, size_t shared) {
    return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, host, threads, shared, 0);
}
