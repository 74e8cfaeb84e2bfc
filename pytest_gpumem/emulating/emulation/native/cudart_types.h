/* The few types that functions of the CUDA runtime exchange with torch, with their layouts in CUDA 12.4 and 13.0. CUDA_MAJOR is
   the major release of CUDA for which torch was built. */
#ifndef GPUMEM_CUDART_TYPES_H
#define GPUMEM_CUDART_TYPES_H

#include <stddef.h>

enum {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    INVALID_CONFIGURATION = 9,
    INVALID_DEVICE = 101,
    NO_KERNEL_IMAGE = 209,
    INVALID_HANDLE = 400,
    SYMBOL_NOT_FOUND = 500,
    NOT_READY = 600,
    NOT_SUPPORTED = 801,
    CAPTURE_UNSUPPORTED = 900,
    UNKNOWN = 999,
    NO_ERROR_OF_OURS = 1 << 30,
};

typedef struct { unsigned x, y, z; } Dim3;

typedef struct {
    char name[256];
    char uuid[16];
    char luid[8];
    unsigned luid_node_mask;
    size_t total_memory, shared_per_block;
    int registers_per_block, warp_size;
    size_t memory_pitch;
    int threads_per_block, block_size[3], grid_size[3];
#if CUDA_MAJOR < 13
    int clock_khz;
#endif
    size_t constant_memory;
    int major, minor;
    size_t texture_alignment, texture_pitch_alignment;
#if CUDA_MAJOR < 13
    int device_overlap;
#endif
    int multiprocessors;
#if CUDA_MAJOR < 13
    int kernel_timeout;
#endif
    int integrated, maps_host_memory;
#if CUDA_MAJOR < 13
    int compute_mode;
#endif
    int texture_1d, texture_1d_mipmap;
#if CUDA_MAJOR < 13
    int texture_1d_linear;
#endif
    int texture_2d[2], texture_2d_mipmap[2], texture_2d_linear[3], texture_2d_gather[2], texture_3d[3], texture_3d_alt[3];
    int texture_cubemap, texture_1d_layered[2], texture_2d_layered[3], texture_cubemap_layered[2];
    int surface_1d, surface_2d[2], surface_3d[3], surface_1d_layered[2], surface_2d_layered[3], surface_cubemap;
    int surface_cubemap_layered[2];
    size_t surface_alignment;
    int concurrent_kernels, ecc, pci_bus, pci_device, pci_domain, tcc, async_engines, unified_addressing;
#if CUDA_MAJOR < 13
    int memory_khz;
#endif
    int bus_bits, l2_bytes, persisting_l2_bytes, threads_per_multiprocessor, stream_priorities, global_l1, local_l1;
    size_t shared_per_multiprocessor;
    int registers_per_multiprocessor, managed_memory, multi_gpu_board, multi_gpu_board_group, host_native_atomics;
#if CUDA_MAJOR < 13
    int single_to_double_ratio;
#endif
    int pageable_memory_access, concurrent_managed_access, compute_preemption, host_pointer_for_registered, cooperative_launch;
#if CUDA_MAJOR < 13
    int cooperative_multi_device_launch;
#endif
    size_t shared_per_block_optin;
    int pageable_uses_host_tables, direct_managed_access, blocks_per_multiprocessor, access_policy_window;
    size_t reserved_shared_per_block;
    int host_register, sparse_arrays, host_register_read_only, timeline_semaphores, memory_pools, gpu_direct_rdma;
    unsigned rdma_flush_options;
    int rdma_ordering;
    unsigned pool_handle_types;
    int deferred_mapping, ipc_events, cluster_launch, unified_function_pointers;
    int reserved[63];
} Properties;

typedef struct {
    size_t shared, constant, local;
    int threads_per_block, registers, ptx_version, binary_version, cache_mode, dynamic_shared, carveout;
    int cluster[5], nonportable_cluster, reserved[16];
} FunctionAttributes;

typedef struct {
    int kind; /* 0 unregistered, 1 host, 2 device */
    int device;
    void *on_device, *on_host;
#if CUDA_MAJOR >= 13
    long reserved[8];
#endif
} PointerAttributes;

typedef struct {
    Dim3 grid, block;
    size_t dynamic_shared;
    void *stream, *attributes;
    unsigned attribute_count;
} LaunchConfig;

#endif
