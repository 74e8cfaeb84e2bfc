/* Declarations that all stand-ins share. The stand-in for libcudart is loaded first and defines these functions; the other
   stand-ins link to it. */
#ifndef GPUMEM_EMULATED_H
#define GPUMEM_EMULATED_H

#include <stddef.h>
#include <stdint.h>

#define MOST_DEVICES 64
#define MIB ((size_t)1 << 20)

/* The page size of host memory, and the page size in which the driver allocates device memory. */
static const size_t PAGE = 4096, DEVICE_PAGE = 2 << 20;
static inline size_t rounded(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

/* A GPU's properties, as in cudaDeviceProp. gpumem_configure sets them before torch is loaded, and in forks that become another
   GPU. */
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
/* Returns the properties for a caller that passes them on to the program, and notes this. The program may keep the properties,
   so a fork must not become another GPU afterwards. */
const Gpu *gpumem_told(void);

/* Prints on stderr that the program called a function that no stand-in has, once for each function. */
void gpumem_lacks(const char *library, const char *function);
/* Throws an exception that torch turns into a Python error. Returns if no C++ library is loaded. */
void gpumem_raise(const char *text);
/* The message about the last missing function that this thread called: "the emulated GPU lacks cufftCreate of libcufft". */
const char *gpumem_last_lacking(void);
/* Counts the launch of a library's kernel, for example cuBLAS's. The kernel does nothing. */
void gpumem_launched(const char *name);
/* Counts a kernel that the driver launches. `arguments` are pointers to the kernel's arguments. */
void gpumem_launched_with(const char *function, void **arguments);
/* CUDA graphs. Kernels launched between the first two calls belong to the returned graph, which the caller must free. */
typedef struct Graph Graph;
void gpumem_capture_begins(void);
Graph *gpumem_capture_ends(void);
Graph *gpumem_copy_of_graph(const Graph *graph);
void gpumem_free_graph(Graph *graph);
void gpumem_launch_graph(const Graph *graph);
/* Prints on stderr why the host cannot reserve address space for the emulated memory. */
void gpumem_no_room(size_t bytes);

int gpumem_current(void);
/* Functions in card.c, which addresses.c calls under its lock. They count the bytes taken on a device. When a process first uses
   a device, it also takes the bytes of a CUDA context. */
int gpumem_card_take(int device, size_t bytes);
void gpumem_card_give_back(int device, size_t bytes);
size_t gpumem_card_used(int device);
/* The bytes taken on a device by all processes that share it. */
size_t gpumem_used(int device);
/* Takes bytes from a device's memory. Returns 0 if the device has fewer bytes left. */
int gpumem_charge(int device, size_t bytes);
void gpumem_release(int device, size_t bytes);
/* Reserves address space for a device, or for pinned host memory if `device` is -1. Returns NULL if the host has no address space
   left. `charged` are the device's bytes that gpumem_unreserve gives back. */
void *gpumem_reserve(size_t bytes, size_t charged, int device);
/* Frees the region that begins at an address. Returns 0 if no region begins there. */
int gpumem_unreserve(void *at);
/* The device to which an address belongs; -1 for pinned host memory, and `otherwise` for any other address. */
int gpumem_device_of(const void *at, int otherwise);
/* The device bytes taken by the region around an address; 0 if there is no such region. */
size_t gpumem_charged_at(const void *at);
void gpumem_uuid(int device, unsigned char uuid[16]);

#endif
