/* Device memory. Only small copies and fills write to it, so it takes almost no memory on the host. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "cudart_types.h"
#include "emulated.h"

int gpumem_fail(int error);
void gpumem_all_done(void);

/* Copies and fills up to this size are carried out. Larger ones write only zeros, or nothing. */
static const size_t REAL_BYTES = 1 << 20;

static int is_ours(const void *at) { return gpumem_device_of(at, -2) != -2; }

int cudaMalloc(void **at, size_t bytes) {
    *at = NULL;
    if (!bytes) return SUCCESS;
    size_t charged = rounded(bytes, DEVICE_PAGE);
    int device = gpumem_current();
    if (!gpumem_charge(device, charged)) return gpumem_fail(OUT_OF_MEMORY);
    *at = gpumem_reserve(charged, charged, device);
    if (*at) return SUCCESS;
    gpumem_release(device, charged);
    return gpumem_fail(UNKNOWN);
}
int cudaMallocManaged(void **at, size_t bytes, unsigned flags) { return cudaMalloc(at, bytes); }
int cudaMemPrefetchAsync(void) { return SUCCESS; }

int cudaFree(void *at) {
    if (!at) return SUCCESS;
    gpumem_all_done(); /* cudaFree waits for the device */
    return gpumem_unreserve(at) ? SUCCESS : gpumem_fail(INVALID_VALUE);
}

int cudaMemGetInfo(size_t *available, size_t *total) {
    *total = gpumem_told()->total_bytes;
    *available = *total - gpumem_used(gpumem_current());
    return SUCCESS;
}

/* Pinned memory is reserved like device memory. Otherwise offloaded tensors would fill the host's memory. */
int cudaHostAlloc(void **at, size_t bytes, unsigned flags) {
    *at = gpumem_reserve(bytes, 0, -1);
    return *at ? SUCCESS : gpumem_fail(UNKNOWN);
}
int cudaMallocHost(void **at, size_t bytes) { return cudaHostAlloc(at, bytes, 0); }
int cudaFreeHost(void *at) { return !at || gpumem_unreserve(at) ? SUCCESS : gpumem_fail(INVALID_VALUE); }
int cudaHostRegister(void *at, size_t bytes, unsigned flags) { return SUCCESS; }
int cudaHostUnregister(void *at) { return SUCCESS; }
int cudaHostGetDevicePointer(void **device, void *host, unsigned flags) { *device = host; return SUCCESS; }

int cudaPointerGetAttributes(PointerAttributes *attributes, const void *at) {
    memset(attributes, 0, sizeof *attributes);
    int device = gpumem_device_of(at, -2);
    attributes->device = device == -1 ? gpumem_current() : device;  // pinned memory belongs to the GPU that is current
    attributes->kind = device == -2 ? 0 : device == -1 ? 1 : 2;
    if (device != -2) attributes->on_device = (void *)at;
    if (device < 0) attributes->on_host = (void *)at;
    return SUCCESS;
}

/* Sets bytes to zero. Whole pages are given back to the system instead, which fills them with zeros when they are next used. */
static void wipe(void *at, size_t bytes) {
    uintptr_t begin = (uintptr_t)at, end = begin + bytes;
    uintptr_t first = rounded(begin, PAGE), last = end / PAGE * PAGE;
    if (last <= first) { memset(at, 0, bytes); return; }
    memset(at, 0, first - begin);
    madvise((void *)first, last - first, MADV_DONTNEED);
    memset((void *)last, 0, end - last);
}

/* Called before copies of at most REAL_BYTES from a device to the host, but not before copies of more than 16 bytes (two numbers)
   to pinned memory. It returns 1 if it has written to `to` itself, so no copy is made. `is_number` is 1 for a copy to the stack
   or to pinned memory, because C++ code reads numbers in these ways. */
static int (*asked_of_reads)(void *to, const void *from, size_t bytes, int is_number);
void gpumem_ask_of_reads(int (*ask)(void *, const void *, size_t, int)) { asked_of_reads = ask; }
static int is_read(const void *to, const void *from, size_t bytes) {
    static const size_t NUMBERS = 16, FRAMES = 1 << 16;
    if (!bytes || bytes > REAL_BYTES || !asked_of_reads || gpumem_device_of(from, -2) < 0) return 0;
    int there = gpumem_device_of(to, -2);
    if (there >= 0 || (there == -1 && bytes > NUMBERS)) return 0;
    uintptr_t here = (uintptr_t)__builtin_frame_address(0);
    int on_stack = (uintptr_t)to > here && (uintptr_t)to - here < FRAMES;
    return asked_of_reads((void *)to, from, bytes, there == -1 || on_stack);
}

enum { DEVICE_TO_HOST = 2, DEVICE_TO_DEVICE };
static int copy(void *to, const void *from, size_t bytes, int kind) {
    /* C++ code has computed this address from a number that no kernel has written, so the address is wrong. A GPU can read pinned
       memory. */
    if (bytes && kind == DEVICE_TO_HOST && gpumem_device_of(from, -2) == -2) return gpumem_fail(INVALID_VALUE);
    if (is_read(to, from, bytes)) return SUCCESS;
    if (bytes > REAL_BYTES && is_ours(to)) wipe(to, bytes);
    else if (bytes) memmove(to, from, bytes);
    return SUCCESS;
}
int cudaMemcpy(void *to, const void *from, size_t bytes, int kind) { return copy(to, from, bytes, kind); }
int cudaMemcpyAsync(void *to, const void *from, size_t bytes, int kind, void *stream) { return copy(to, from, bytes, kind); }
int cudaMemcpyPeerAsync(void *to, int there, const void *from, int here, size_t bytes, void *stream) {
    return copy(to, from, bytes, DEVICE_TO_DEVICE);
}
int cudaMemcpy2DAsync(
    void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height, int kind, void *stream
) {
    if (width * height > REAL_BYTES && is_ours(to)) return SUCCESS;
    for (size_t row = 0; row < height; row++)
        memmove((char *)to + row * to_pitch, (const char *)from + row * from_pitch, width);
    return SUCCESS;
}
/* Constants for kernels. No kernel runs, so nobody reads them. */
int cudaMemcpyToSymbol(const void *symbol, const void *from, size_t bytes, size_t offset, int kind) { return SUCCESS; }
int cudaGetSymbolAddress(void **at, const void *symbol) {
    static char scratch[1 << 20];
    *at = scratch;
    return SUCCESS;
}

void gpumem_fill(void *at, const void *value, size_t width, size_t count) {
    const char *byte = value;
    int zero = 1;
    for (size_t i = 0; i < width; i++) zero &= !byte[i];
    if (!is_ours(at)) return;
    if (zero) wipe(at, width * count);
    else if (width * count <= REAL_BYTES)
        for (size_t i = 0; i < count; i++) memcpy((char *)at + i * width, value, width);
}
int cudaMemset(void *at, int value, size_t bytes) {
    char byte = (char)value;
    if (bytes) gpumem_fill(at, &byte, 1, bytes);
    return SUCCESS;
}
int cudaMemsetAsync(void *at, int value, size_t bytes, void *stream) { return cudaMemset(at, value, bytes); }

/* The driver's own memory pool (cudaMallocAsync), one for each device. A pool keeps reserved the most memory that was in use at
   once. */
static pthread_mutex_t pool_lock = PTHREAD_MUTEX_INITIALIZER;
static size_t pool_used[MOST_DEVICES], pool_most_used[MOST_DEVICES];
static const size_t POOL_PAGE = 32 << 20;
static int of_pool(const void *pool) { return (int)((uintptr_t)pool - 0x1000); }

int cudaDeviceGetDefaultMemPool(void **pool, int device) { *pool = (void *)(uintptr_t)(0x1000 + device); return SUCCESS; }
int cudaMallocAsync(void **at, size_t bytes, void *stream) {
    int error = cudaMalloc(at, bytes), device = gpumem_current();
    if (error) return error;
    pthread_mutex_lock(&pool_lock);
    pool_used[device] += gpumem_charged_at(*at);
    if (pool_used[device] > pool_most_used[device]) pool_most_used[device] = pool_used[device];
    pthread_mutex_unlock(&pool_lock);
    return SUCCESS;
}
int cudaFreeAsync(void *at, void *stream) {
    pthread_mutex_lock(&pool_lock);
    size_t charged = gpumem_charged_at(at);
    if (charged) pool_used[gpumem_device_of(at, 0)] -= charged;
    pthread_mutex_unlock(&pool_lock);
    return !at || gpumem_unreserve(at) ? SUCCESS : gpumem_fail(INVALID_VALUE);
}
/* `attribute` is a number from cudaMemPoolAttr: 5 and 6 are the current and the highest reserved bytes, 7 and 8 the current and
   the highest used bytes. */
int cudaMemPoolGetAttribute(void *pool, int attribute, void *value) {
    int device = of_pool(pool);
    size_t now = pool_used[device], most = pool_most_used[device];
    uint64_t answer = attribute == 5 || attribute == 6 ? rounded(most, POOL_PAGE) : attribute == 7 ? now : attribute == 8 ? most : 0;
    if (attribute >= 4) *(uint64_t *)value = answer;
    else *(int *)value = 1;
    return SUCCESS;
}
int cudaMemPoolSetAttribute(void *pool, int attribute, void *value) {
    if (attribute == 6 || attribute == 8) pool_most_used[of_pool(pool)] = pool_used[of_pool(pool)];
    return SUCCESS;
}
int cudaMemPoolSetAccess(void *pool, const void *list, size_t count) { return SUCCESS; }
int cudaMemPoolTrimTo(void *pool, size_t keep) { pool_most_used[of_pool(pool)] = pool_used[of_pool(pool)]; return SUCCESS; }
