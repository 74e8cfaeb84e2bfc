/* The real cuDNN, where it is installed: it plans convolutions, which is how large their workspaces are.

   It gives its heuristics and the workspaces of its plans for a GPU that is only described to it: a descriptor of the GPU's
   properties takes the place of a handle, which needs a driver. It has a namespace of its own, in which neither it nor what it
   loads finds the stand-ins. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cudart_types.h"
#include "cudnn_store.h"
#include "emulated.h"

int cudaGetDeviceProperties(Properties *properties, int device);

static char path[4096];
static int release;
static void *device; /* the descriptor of the GPU's properties */
static struct {
    size_t (*version)(void);
    int (*create)(int, void **);
    int (*destroy)(void *);
    int (*finalize)(void *);
    int (*set)(void *, int, int, int64_t, const void *);
    int (*get)(void *, int, int, int64_t, int64_t *, void *);
} cudnn;

/* To be called before torch is loaded. */
void gpumem_use_cudnn(const char *library) { snprintf(path, sizeof path, "%s", library); }

/* The keys are those that the library asks for, all of them. The card's PCI number is not known here; neither it nor the card's
   name changed any of 192 lists of plans of 10 GPUs (release 9.20). */
static int describe(char *text, size_t room) {
    const Gpu *gpu = &gpumem_gpu;
    Properties p;
    int status = cudaGetDeviceProperties(&p, 0);
    if (status) return status;
    int length = snprintf(
        text, room,
        "{\"deviceName\":\"%s\",\"deviceVer\":%d,\"cudaDeviceId\":0,\"pciDeviceId\":0,\"isTccDriver\":0,\"driverVer\":%d,"
        "\"multiProcessorCount\":%d,\"warpSize\":%d,\"maxThreadsPerBlock\":%d,\"maxThreadsPerSM\":%d,\"maxCtasPerSM\":%d,"
        "\"maxGridSize\":[%d,%d,%d],\"maxBlockSize\":[%d,%d,%d],\"regsPerBlock\":%d,\"maxRegistersPerSM\":%d,"
        "\"maxSharedMemoryPerBlock\":%zu,\"maxSharedMemoryPerBlockOptin\":%zu,\"reservedSharedMemoryPerBlock\":%zu,"
        "\"supportCoopLaunch\":%d,\"totalGlobalMem\":%zu,\"l2CacheSize\":%d,\"smClockRateKHz\":%d,\"memClockRateKHz\":%d}",
        p.name, 100 * p.major + 10 * p.minor, CUDA_VERSION,
        p.multiprocessors, p.warp_size, p.threads_per_block, p.threads_per_multiprocessor, p.blocks_per_multiprocessor,
        p.grid_size[0], p.grid_size[1], p.grid_size[2], p.block_size[0], p.block_size[1], p.block_size[2],
        p.registers_per_block, p.registers_per_multiprocessor,
        p.shared_per_block, p.shared_per_block_optin, p.reserved_shared_per_block,
        p.cooperative_launch, p.total_memory, p.l2_bytes, gpu->sm_khz, gpu->memory_khz
    );
    return length < 0 || (size_t)length >= room;
}

static int open_library(void) {
    void *library = *path ? dlmopen(LM_ID_NEWLM, path, RTLD_NOW | RTLD_LOCAL) : NULL;
    if (!library) return 1;
    cudnn.version = dlsym(library, "cudnnGetVersion");
    cudnn.create = dlsym(library, "cudnnBackendCreateDescriptor");
    cudnn.destroy = dlsym(library, "cudnnBackendDestroyDescriptor");
    cudnn.finalize = dlsym(library, "cudnnBackendFinalize");
    cudnn.set = dlsym(library, "cudnnBackendSetAttribute");
    cudnn.get = dlsym(library, "cudnnBackendGetAttribute");
    return !(cudnn.version && cudnn.create && cudnn.destroy && cudnn.finalize && cudnn.set && cudnn.get);
}

static void load(void) {
    char text[2048];
    if (open_library() || describe(text, sizeof text)) return;
    /* Releases before 9.8 do not know such a descriptor. */
    if (cudnn.create(DEVICE_PROPERTIES, &device)) return;
    if (cudnn.set(device, DEVICE_JSON, CHARACTER, (int64_t)strlen(text) + 1, text) || cudnn.finalize(device)) return;
    release = (int)cudnn.version();
}

int gpumem_cudnn_release(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, load);
    return release;
}

static int set_descriptors(void *real, const Attribute *attribute) {
    Descriptor **ours = attribute->values;
    void **reals = calloc((size_t)attribute->count + 1, sizeof *reals);
    int status = 0;
    if (!reals) abort();
    for (int64_t i = 0; i < attribute->count && !status; i++) {
        if (!ours[i]) continue;
        status = gpumem_really_finalize(ours[i]);
        reals[i] = ours[i]->real;
    }
    if (!status) status = cudnn.set(real, attribute->name, DESCRIPTOR, attribute->count, reals);
    free(reals);
    return status;
}

static int fill(void *real, const Descriptor *descriptor) {
    int status = 0;
    for (const Attribute *one = descriptor->attributes; one && !status; one = one->next) {
        if (one->type == HANDLE) continue; /* the stand-in's */
        if (one->type == DESCRIPTOR) status = set_descriptors(real, one);
        else status = cudnn.set(real, one->name, one->type, one->count, one->values);
    }
    if (!status && descriptor->type == HEURISTICS) status = cudnn.set(real, HEURISTICS_DEVICE, DESCRIPTOR, 1, &device);
    if (!status && descriptor->type == PLAN) status = cudnn.set(real, PLAN_DEVICE, DESCRIPTOR, 1, &device);
    return status ? status : cudnn.finalize(real);
}

/* Make the same of a descriptor and of all that it refers to, unless that has been done. */
int gpumem_really_finalize(Descriptor *descriptor) {
    void *real;
    if (descriptor->real) return 0;
    int status = cudnn.create(descriptor->type, &real);
    if (status) return status;
    status = fill(real, descriptor);
    if (status) cudnn.destroy(real);
    else descriptor->real = real;
    return status;
}

/* Descriptors that are asked for are the caller's, which the library fills: each gets one of the library's. */
int gpumem_really_get(Descriptor *descriptor, int name, int type, int64_t wanted, int64_t *found, void *values) {
    if (type != DESCRIPTOR || !values) return cudnn.get(descriptor->real, name, type, wanted, found, values);
    Descriptor **ours = values;
    void **reals = calloc((size_t)wanted + 1, sizeof *reals);
    int status = 0;
    if (!reals) abort();
    for (int64_t i = 0; i < wanted && !status; i++) {
        if (!ours[i]->real) status = cudnn.create(ours[i]->type, &ours[i]->real);
        reals[i] = ours[i]->real;
    }
    if (!status) status = cudnn.get(descriptor->real, name, type, wanted, found, reals);
    free(reals);
    return status;
}

void gpumem_really_destroy(void *real) { cudnn.destroy(real); }
