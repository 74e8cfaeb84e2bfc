/* Kernels. They are registered by name, counted when they are launched, and not run. Only fills are carried out, because
   programs decide branches by zeros. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "cudart_types.h"
#include "emulated.h"

enum { ANY_VERSION = -1 }; /* if nothing is known about the code */

int gpumem_fail(int error);
void gpumem_fill(void *at, const void *value, size_t width, size_t count);

/* A binary from nvcc, and the version of its code that the driver would choose for a GPU with this compute capability: 86. The
   version is 0 if no code in the binary fits. */
typedef struct { const void *binary; int capability, version; } Code;
typedef struct {
    const void *host; /* the kernel's function on the host, or the address of the kernel's name */
    const char *name;
    long launches;
    Code *code; /* NULL if nothing is known about the code */
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
        *kernel = (Kernel){host, name, 0, NULL};
    }
    return kernel;
}

/* The code for several architectures that nvcc embeds (fatbinary_section.h, and the container that cuobjdump lists). */
static const uint32_t WRAPPER = 0x466243b1, CONTAINER = 0xba55ed50;
enum { PTX = 1, ELF = 2 };
typedef struct { uint32_t magic, version; const void *data; } Wrapper;
typedef struct { uint32_t magic; uint16_t version, header; uint64_t size; } Container;
typedef struct {
    uint16_t kind, version;
    uint32_t header;
    uint64_t size;
    uint32_t unused[3], architecture; /* for example 90 */
} Image;

/* The version of the code that a driver chooses for this GPU: the highest binary version with the GPU's major version that is not
   above the capability. Without such a binary, it is the highest PTX version that is not above the capability, or 0. */
static int version_for(const Wrapper *wrapper, int capability) {
    const Container *all = wrapper && wrapper->magic == WRAPPER ? wrapper->data : NULL;
    if (!all || all->magic != CONTAINER) return ANY_VERSION;
    int binary = 0, portable = 0;
    const char *at = (const char *)all + all->header, *end = at + all->size;
    while (at + sizeof(Image) <= end) {
        const Image *image = (const Image *)at;
        int version = (int)image->architecture;
        if (version <= capability) {
            if (image->kind == ELF && version / 10 == capability / 10 && version > binary) binary = version;
            if (image->kind == PTX && version > portable) portable = version;
        }
        at += image->header + image->size;
    }
    return binary ? binary : portable;
}

/* The version is computed when a kernel is used, not when it is registered, because a fork may become another GPU. */
static int version_of(const Kernel *kernel) {
    Code *code = kernel->code;
    int capability = gpumem_gpu.major * 10 + gpumem_gpu.minor;
    if (code && code->capability != capability) *code = (Code){code->binary, capability, version_for(code->binary, capability)};
    return code ? code->version : ANY_VERSION;
}

void **__cudaRegisterFatBinary(void *binary) {
    Code *code = malloc(sizeof *code);
    *code = (Code){.binary = binary};
    return (void **)code;
}
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
    entered(host, name)->code = (Code *)handle;
    pthread_mutex_unlock(&lock);
}

/* A graph contains the kernels that were launched during its capture. They count as launched whenever the graph is launched, and
   not during the capture. */
struct Graph {
    const void **hosts;
    size_t count, room;
};
static Graph *captured; /* the graph that is being captured; torch captures one graph at a time */

static void launched(Kernel *kernel) {
    if (!captured) {
        kernel->launches++;
        return;
    }
    if (captured->count == captured->room) {
        captured->room = captured->room ? 2 * captured->room : 256;
        captured->hosts = realloc(captured->hosts, captured->room * sizeof *captured->hosts);
        if (!captured->hosts) abort();
    }
    captured->hosts[captured->count++] = kernel->host;
}

void gpumem_capture_begins(void) {
    pthread_mutex_lock(&lock);
    captured = calloc(1, sizeof *captured);
    if (!captured) abort();
    pthread_mutex_unlock(&lock);
}
Graph *gpumem_capture_ends(void) {
    pthread_mutex_lock(&lock);
    Graph *graph = captured;
    captured = NULL;
    pthread_mutex_unlock(&lock);
    return graph;
}
Graph *gpumem_copy_of_graph(const Graph *graph) {
    Graph *copy = calloc(1, sizeof *copy);
    const void **hosts = malloc(graph->count * sizeof *hosts + 1);
    if (!copy || !hosts) abort();
    if (graph->count) memcpy(hosts, graph->hosts, graph->count * sizeof *hosts);
    *copy = (Graph){hosts, graph->count, graph->count};
    return copy;
}
void gpumem_free_graph(Graph *graph) {
    free(graph->hosts);
    free(graph);
}
void gpumem_launch_graph(const Graph *graph) {
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < graph->count; i++) launched(slot(graph->hosts[i]));
    pthread_mutex_unlock(&lock);
}

/* Counts a kernel of a library, which is known only by its name. */
void gpumem_launched(const char *name) {
    pthread_mutex_lock(&lock);
    launched(entered(name, name));
    pthread_mutex_unlock(&lock);
}

/* Counts a program's own kernel (Triton's). `function` is the kernel's handle in the driver, which is a pointer to its name. */
static void (*told_of_launches)(const char *function, void **arguments);
void gpumem_tell_of_launches(void (*tell)(const char *, void **)) { told_of_launches = tell; }
void gpumem_launched_with(const char *function, void **arguments) {
    gpumem_launched(function);
    if (told_of_launches && arguments) told_of_launches(function, arguments);
}

/* Calls `tell` for each kernel that was launched since the last call of gpumem_forget_launches. */
void gpumem_tell_launches(void (*tell)(const char *name, long launches)) {
    for (size_t i = 0; i < kernel_room; i++)
        if (kernels[i].launches) tell(kernels[i].name, kernels[i].launches);
}
void gpumem_forget_launches(void) {
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < kernel_room; i++) kernels[i].launches = 0;
    pthread_mutex_unlock(&lock);
}

/* The size of T in FillFunctor<T>, from the kernel's mangled name; 0 if the kernel is not a fill. */
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
    launched(kernel);
    const char *name = kernel->name;
    int version = version_of(kernel);
    pthread_mutex_unlock(&lock);
    if (!version) return gpumem_fail(NO_KERNEL_IMAGE);
    size_t width = fill_width(name);
    /* A fill has the arguments (int count, functor {value}, array {pointer}). */
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

/* CUB chooses its kernels by the version of the code. So this must be a version for which CUB was compiled. */
int cudaFuncGetAttributes(FunctionAttributes *attributes, const void *host) {
    memset(attributes, 0, sizeof *attributes);
    pthread_mutex_lock(&lock);
    int version = version_of(entered(host, "a kernel that was not registered"));
    pthread_mutex_unlock(&lock);
    if (!version) return gpumem_fail(NO_KERNEL_IMAGE);
    attributes->threads_per_block = 1024;
    attributes->registers = 32;
    attributes->ptx_version = attributes->binary_version =
        version == ANY_VERSION ? gpumem_gpu.major * 10 + gpumem_gpu.minor : version;
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
