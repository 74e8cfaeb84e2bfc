/* What the stand-ins share. libcudart's is loaded first and has these; the others link to it. */
#ifndef GPUMEM_EMULATED_H
#define GPUMEM_EMULATED_H

#include <stddef.h>
#include <stdint.h>

#define MOST_DEVICES 64
#define MIB ((size_t)1 << 20)

/* Of the host's memory, and of a device's: the driver gives it in pages of this size. */
static const size_t PAGE = 4096, DEVICE_PAGE = 2 << 20;
static inline size_t rounded(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

/* A GPU, as cudaDeviceProp tells it. Set by gpumem_configure before torch is loaded, and in forks that become another one. */
typedef struct {
    char name[256];
    int major, minor;
    int multiprocessors, threads_per_multiprocessor, blocks_per_multiprocessor;
    int shared_per_block, shared_per_block_optin, shared_per_multiprocessor;
    int l2_bytes, bus_bits, sm_khz, memory_khz;
    size_t total_bytes, context_bytes;
    int count;
} Gpu;
extern Gpu gpumem_gpu;
/* The same for whoever asks what it is, which is noted: what was told may be kept, and a fork must not become another GPU then. */
const Gpu *gpumem_told(void);

/* Says on stderr, once for each name, that a function is asked for which no stand-in has. */
void gpumem_lacks(const char *library, const char *function);
/* Raises an error of torch, if torch has loaded C++'s library; else returns. */
void gpumem_raise(const char *text);
/* "the emulated GPU lacks cufftCreate of libcufft": what this thread asked for last. */
const char *gpumem_last_lacking(void);
/* A kernel of a library (cuBLAS, say) that is launched and does nothing. */
void gpumem_launched(const char *name);
/* A kernel that the driver launches, with pointers to its arguments. */
void gpumem_launched_with(const char *function, void **arguments);
/* CUDA graphs: what is launched between these two belongs to the graph, which is the caller's. */
typedef struct Graph Graph;
void gpumem_capture_begins(void);
Graph *gpumem_capture_ends(void);
Graph *gpumem_copy_of_graph(const Graph *graph);
void gpumem_free_graph(Graph *graph);
void gpumem_launch_graph(const Graph *graph);
/* Says on stderr why the host cannot hold the emulated memory. */
void gpumem_no_room(size_t bytes);

int gpumem_current(void);
/* card.c's, for memory.c: bytes of a device, of which a process that uses it has a context's from then on. */
int gpumem_card_take(int device, size_t bytes);
void gpumem_card_give_back(int device, size_t bytes);
size_t gpumem_card_used(int device);
/* What is taken of a device, by all processes that share it. */
size_t gpumem_used(int device);
/* Takes bytes from a device's memory: 0 where it has not that many left. */
int gpumem_charge(int device, size_t bytes);
void gpumem_release(int device, size_t bytes);
/* Address space that belongs to a device (-1: pinned memory of the host); NULL where the host has none left. */
void *gpumem_reserve(size_t bytes, size_t charged, int device);
/* 0 where no region begins there. */
int gpumem_unreserve(void *at);
/* The device that an address belongs to (-1: pinned memory of the host); `otherwise` where it is none of these. */
int gpumem_device_of(const void *at, int otherwise);
/* The bytes of a device that the region at an address takes; 0 where it takes none. */
size_t gpumem_charged_at(const void *at);
void gpumem_uuid(int device, unsigned char uuid[16]);

#endif
