/* The addresses of device memory. Device memory is address space of the host, reserved in spans as by NVIDIA's driver. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "emulated.h"

typedef struct {
    uintptr_t at;
    size_t size, charged;
    int device;
} Region;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Region *regions; /* in order of address */
static size_t region_count, region_room;

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

size_t gpumem_charged_at(const void *at) {
    pthread_mutex_lock(&lock);
    Region *region = at ? find(at) : NULL;
    size_t charged = region && region->device >= 0 ? region->charged : 0;
    pthread_mutex_unlock(&lock);
    return charged;
}

/* Addresses can decide a peak, because torch's allocator takes the lower of two free blocks with equal size. No documentation
   describes how the driver chooses addresses. The rules here give each of 2,026 addresses that were recorded on an H100
   (docs/architecture.md): the driver reserves spans of address space, each with a multiple of UNIT bytes, and Linux places new
   spans from high to low addresses. */
static const size_t UNIT = 32 << 20;
static const uintptr_t FIRST_ADDRESS = 0x100000000000, LAST_ADDRESS = 0x600000000000;

typedef struct {
    uintptr_t at;
    size_t size, number; /* `number` counts the spans in order of creation */
} Span;
static Span *spans; /* in order of address */
static size_t span_count, span_room, spans_made;

/* The address of the smallest gap in a span that holds `size` bytes, the lowest if several are equal; 0 if none is large enough. */
static uintptr_t best_gap(const Span *span, size_t size) {
    uintptr_t at = span->at, end = span->at + span->size, best = 0;
    size_t smallest = SIZE_MAX;
    for (size_t i = until(at - 1); at < end; i++) {
        int is_last = i == region_count || regions[i].at >= end;
        size_t gap = (is_last ? end : regions[i].at) - at;
        if (gap >= size && gap < smallest) { smallest = gap; best = at; }
        at = is_last ? end : regions[i].at + rounded(regions[i].size, DEVICE_PAGE);
    }
    return best;
}

/* Returns 1 if spans are reserved from low to high addresses, as in some sandboxes (for example gVisor). */
static int is_ascending(void) {
    const char *order = getenv("GPUMEM_EMULATED_ADDRESSES");
    return order && !strcmp(order, "ascending");
}

/* Adds a span between the addresses `first` and `last`, and returns the span's address; 0 if there is no room. The span goes into
   the highest hole that is larger than the span (the lowest one if is_ascending). A hole of the same size is skipped. */
static uintptr_t add_span(size_t size, uintptr_t first, uintptr_t last) {
    size_t begin = 0, end = span_count;
    while (begin < span_count && spans[begin].at < first) begin++;
    while (end > begin && spans[end - 1].at >= last) end--;
    size_t index = is_ascending() ? begin : end;
    uintptr_t at;
    if (is_ascending()) {
        for (at = first; index < end && spans[index].at - at <= size; index++) at = spans[index].at + spans[index].size;
    } else {
        for (at = last; index > begin && at - (spans[index - 1].at + spans[index - 1].size) <= size; index--)
            at = spans[index - 1].at;
        at -= size;
    }
    if (at < first || at + size > last) return 0;
    if (span_count == span_room) {
        span_room = span_room ? 2 * span_room : 256;
        spans = realloc(spans, span_room * sizeof *spans);
        if (!spans) abort();
    }
    memmove(spans + index + 1, spans + index, (span_count - index) * sizeof *spans);
    spans[index] = (Span){at, size, ++spans_made};
    span_count++;
    return at;
}

/* An address for `size` bytes on a device, in the newest span that has room, or in a new span. `size` must be a multiple of
   DEVICE_PAGE. */
static uintptr_t place(size_t size, int device) {
    size_t each = (LAST_ADDRESS - FIRST_ADDRESS) / gpumem_gpu.count / UNIT * UNIT, newest = 0;
    uintptr_t first = FIRST_ADDRESS + device * each, last = first + each, found = 0;
    for (size_t i = 0; i < span_count; i++) {
        if (spans[i].at < first || spans[i].at >= last || spans[i].number < newest) continue;
        uintptr_t at = best_gap(&spans[i], size);
        if (at) { found = at; newest = spans[i].number; }
    }
    return found ? found : add_span(rounded(size, UNIT), first, last);
}

/* Removes the span around an address if it contains no region. */
static void drop_span_if_empty(uintptr_t at) {
    for (size_t i = 0; i < span_count; i++) {
        if (at < spans[i].at || at - spans[i].at >= spans[i].size) continue;
        size_t index = until(spans[i].at - 1);
        if (index < region_count && regions[index].at < spans[i].at + spans[i].size) return;
        memmove(spans + i, spans + i + 1, (span_count - i - 1) * sizeof *spans);
        span_count--;
        return;
    }
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
    if (at == MAP_FAILED && wanted) {
        drop_span_if_empty(wanted);
        at = map_memory(0, size);
    }
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
    drop_span_if_empty(gone.at);
    if (gone.device >= 0) gpumem_card_give_back(gone.device, gone.charged);
    munmap((void *)gone.at, gone.size); /* under the lock, so no other thread gets the address before */
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
