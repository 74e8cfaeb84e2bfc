/* Device memory is address space of the host that nobody touches: only small copies and fills write to it. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "cudart_types.h"
#include "emulated.h"

int gpumem_fail(int error);
void gpumem_all_done(void);

/* Copies and fills up to this size are real; larger ones leave zeros. */
static const size_t REAL_BYTES = 1 << 20;
static const size_t PAGE = 4096;
/* The driver gives device memory in pages of this size. */
static const size_t DEVICE_PAGE = 2 << 20;

typedef struct {
    uintptr_t at;
    size_t size, charged;
    int device;
} Region;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Region *regions; /* in order of address */
static size_t region_count, region_room;

static size_t rounded(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

/* The number of regions that begin at or before an address. */
static size_t until(uintptr_t at) {
    size_t low = 0, high = region_count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (regions[middle].at <= at) low = middle + 1;
        else high = middle;
    }
    return low;
}

static Region *find(const void *at) {
    size_t index = until((uintptr_t)at);
    if (!index) return NULL;
    Region *region = &regions[index - 1];
    return (uintptr_t)at - region->at < region->size ? region : NULL;
}

int gpumem_device_of(const void *at, int otherwise) {
    pthread_mutex_lock(&lock);
    Region *region = find(at);
    int device = region ? region->device : otherwise;
    pthread_mutex_unlock(&lock);
    return device;
}

static int is_ours(const void *at) { return gpumem_device_of(at, -2) != -2; }

/* Where device memory lies decides peaks where torch's allocator takes the lower of two free blocks of equal size. Units, and
   that the newest is filled first, are in no documentation: by what evidence is in docs/architecture.md. */
static const size_t UNIT = 32 << 20;
static const uintptr_t FIRST_ADDRESS = 0x100000000000, LAST_ADDRESS = 0x600000000000;

/* The lowest room for `size` in a unit of which some is taken; 0 where there is none. */
static uintptr_t room_in_unit(uintptr_t unit, size_t size) {
    uintptr_t at = unit;
    size_t index = until(unit);
    for (index -= index > 0; index < region_count && regions[index].at < at + size; index++) {
        uintptr_t end = rounded(regions[index].at + regions[index].size, DEVICE_PAGE);
        if (end > at) at = end;
    }
    return at + size <= unit + UNIT ? at : 0;
}

/* An address for `size` bytes of a device, a multiple of the driver's page: in the highest unit that has room beside what is in
   it, else in the lowest units that nothing is in. */
static uintptr_t place(size_t size, int device) {
    size_t each = (LAST_ADDRESS - FIRST_ADDRESS) / gpumem_gpu.count / UNIT * UNIT;
    uintptr_t first = FIRST_ADDRESS + device * each, last = first + each, looked_at = last;
    size_t begin = until(first - 1), end = until(last - 1);
    for (size_t i = end; size < UNIT && i-- > begin;) {
        uintptr_t of_region[] = {(regions[i].at + regions[i].size - 1) / UNIT * UNIT, regions[i].at / UNIT * UNIT};
        for (int n = 0; n < 2; n++) {
            if (of_region[n] >= looked_at) continue;
            looked_at = of_region[n];
            uintptr_t at = room_in_unit(looked_at, size);
            if (at) return at;
        }
    }
    uintptr_t at = first;
    for (size_t i = begin; i < end; i++) {
        if (regions[i].at / UNIT * UNIT >= at + size) break;
        at = rounded(regions[i].at + regions[i].size, UNIT);
    }
    return at + size <= last ? at : 0;
}

static void *map_memory(uintptr_t at, size_t size) {
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | (at ? MAP_FIXED_NOREPLACE : 0);
    return mmap((void *)at, size, PROT_READ | PROT_WRITE, flags, -1, 0);
}

void *gpumem_reserve(size_t bytes, size_t charged, int device) {
    size_t size = rounded(bytes ? bytes : 1, PAGE);
    pthread_mutex_lock(&lock);
    uintptr_t wanted = device < 0 ? 0 : place(rounded(size, DEVICE_PAGE), device);
    void *at = map_memory(wanted, size);
    if (at == MAP_FAILED && wanted) at = map_memory(0, size);
    if (at == MAP_FAILED) { pthread_mutex_unlock(&lock); gpumem_no_room(bytes); return NULL; }
    madvise(at, size, MADV_NOHUGEPAGE);
    madvise(at, size, MADV_DONTDUMP);
    if (region_count == region_room) {
        region_room = region_room ? 2 * region_room : 256;
        regions = realloc(regions, region_room * sizeof *regions);
        if (!regions) abort();
    }
    size_t index = until((uintptr_t)at);
    memmove(regions + index + 1, regions + index, (region_count - index) * sizeof *regions);
    regions[index] = (Region){(uintptr_t)at, size, charged, device};
    region_count++;
    pthread_mutex_unlock(&lock);
    return at;
}

int gpumem_unreserve(void *at) {
    pthread_mutex_lock(&lock);
    Region *region = find(at);
    if (!region || region->at != (uintptr_t)at) { pthread_mutex_unlock(&lock); return 0; }
    Region gone = *region;
    size_t index = (size_t)(region - regions);
    memmove(regions + index, regions + index + 1, (region_count - index - 1) * sizeof *regions);
    region_count--;
    if (gone.device >= 0) gpumem_card_give_back(gone.device, gone.charged);
    munmap((void *)gone.at, gone.size); /* before another thread may be given the address */
    pthread_mutex_unlock(&lock);
    return 1;
}

size_t gpumem_used(int device) {
    pthread_mutex_lock(&lock);
    size_t used = gpumem_card_used(device);
    pthread_mutex_unlock(&lock);
    return used;
}

int gpumem_charge(int device, size_t bytes) {
    pthread_mutex_lock(&lock);
    int fits = gpumem_card_take(device, bytes);
    pthread_mutex_unlock(&lock);
    return fits;
}

void gpumem_release(int device, size_t bytes) {
    pthread_mutex_lock(&lock);
    gpumem_card_give_back(device, bytes);
    pthread_mutex_unlock(&lock);
}

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
    gpumem_all_done(); /* it waits for the device */
    return gpumem_unreserve(at) ? SUCCESS : gpumem_fail(INVALID_VALUE);
}

int cudaMemGetInfo(size_t *available, size_t *total) {
    *total = gpumem_gpu.total_bytes;
    *available = *total - gpumem_used(gpumem_current());
    return SUCCESS;
}

/* Pinned memory is not touched either: offloaded tensors would fill the host. */
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
    attributes->device = device;
    attributes->kind = device == -2 ? 0 : device == -1 ? 1 : 2;
    if (device != -2) attributes->on_device = (void *)at;
    if (device < 0) attributes->on_host = (void *)at;
    return SUCCESS;
}

/* Zeroes without touching whole pages. */
static void wipe(void *at, size_t bytes) {
    uintptr_t begin = (uintptr_t)at, end = begin + bytes;
    uintptr_t first = rounded(begin, PAGE), last = end / PAGE * PAGE;
    if (last <= first) { memset(at, 0, bytes); return; }
    memset(at, 0, first - begin);
    madvise((void *)first, last - first, MADV_DONTNEED);
    memset((void *)last, 0, end - last);
}

/* Asked of each number that C++ reads: a copy to its stack, or to pinned memory, of at most as many bytes as two numbers have.
   1 where `to` was written in place of the copy. */
static int (*asked_of_reads)(void *to, const void *from, size_t bytes);
void gpumem_ask_of_reads(int (*ask)(void *, const void *, size_t)) { asked_of_reads = ask; }
static int is_read(const void *to, const void *from, size_t bytes) {
    static const size_t NUMBERS = 16, FRAMES = 1 << 16;
    if (!bytes || bytes > NUMBERS || !asked_of_reads) return 0;
    uintptr_t here = (uintptr_t)__builtin_frame_address(0), there = (uintptr_t)to;
    if (!(there > here && there - here < FRAMES) && gpumem_device_of(to, -2) != -1) return 0;
    return gpumem_device_of(from, -2) >= 0 && asked_of_reads((void *)to, from, bytes);
}

static int copy(void *to, const void *from, size_t bytes) {
    if (is_read(to, from, bytes)) return SUCCESS;
    if (bytes > REAL_BYTES && is_ours(to)) wipe(to, bytes);
    else if (bytes) memmove(to, from, bytes);
    return SUCCESS;
}
int cudaMemcpy(void *to, const void *from, size_t bytes, int kind) { return copy(to, from, bytes); }
int cudaMemcpyAsync(void *to, const void *from, size_t bytes, int kind, void *stream) { return copy(to, from, bytes); }
int cudaMemcpyPeerAsync(void *to, int there, const void *from, int here, size_t bytes, void *stream) {
    return copy(to, from, bytes);
}
int cudaMemcpy2DAsync(
    void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height, int kind, void *stream
) {
    if (width * height > REAL_BYTES && is_ours(to)) return SUCCESS;
    for (size_t row = 0; row < height; row++)
        memmove((char *)to + row * to_pitch, (const char *)from + row * from_pitch, width);
    return SUCCESS;
}
/* Kernels' constants: nobody reads them. */
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

/* The driver's own pool (cudaMallocAsync): one for each device, which keeps what it was once given. */
static size_t pool_used[MOST_DEVICES], pool_most_used[MOST_DEVICES];
static const size_t POOL_PAGE = 32 << 20;
static int of_pool(const void *pool) { return (int)((uintptr_t)pool - 0x1000); }

int cudaDeviceGetDefaultMemPool(void **pool, int device) { *pool = (void *)(uintptr_t)(0x1000 + device); return SUCCESS; }
int cudaMallocAsync(void **at, size_t bytes, void *stream) {
    int error = cudaMalloc(at, bytes), device = gpumem_current();
    if (error) return error;
    pthread_mutex_lock(&lock);
    Region *region = find(*at);
    pool_used[device] += region ? region->charged : 0;
    if (pool_used[device] > pool_most_used[device]) pool_most_used[device] = pool_used[device];
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}
int cudaFreeAsync(void *at, void *stream) {
    pthread_mutex_lock(&lock);
    Region *region = at ? find(at) : NULL;
    if (region && region->device >= 0) pool_used[region->device] -= region->charged;
    pthread_mutex_unlock(&lock);
    return !at || gpumem_unreserve(at) ? SUCCESS : gpumem_fail(INVALID_VALUE);
}
/* Attributes of cudaMemPoolAttr: reserved now 5, at most 6; used now 7, at most 8. */
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
