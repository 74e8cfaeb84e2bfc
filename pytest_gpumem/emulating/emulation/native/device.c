/* The emulated GPUs: their properties, and each thread's current GPU. */
#include <stdio.h>
#include <string.h>

#include "cudart_types.h"
#include "emulated.h"

int gpumem_fail(int error);

Gpu gpumem_gpu = {.count = 0};
static __thread int current;

static int told;

void gpumem_configure(const Gpu *gpu) { gpumem_gpu = *gpu; }
const Gpu *gpumem_told(void) {
    told = 1;
    return &gpumem_gpu;
}
int gpumem_has_told(void) { return told; }
int gpumem_current(void) { return current; }

/* A UUID consists of the text "EMULATED" and, in its last byte, the device's number. */
void gpumem_uuid(int device, unsigned char uuid[16]) {
    memcpy(uuid, "EMULATED\x80\0\0\0\0\0\0\0", 16);
    uuid[15] = (unsigned char)device;
}

int cudaGetDeviceCount(int *count) { *count = gpumem_gpu.count; return SUCCESS; }
int cudaGetDevice(int *device) { *device = current; return SUCCESS; }
int cudaSetDevice(int device) {
    if (device < 0 || device >= gpumem_gpu.count) return gpumem_fail(INVALID_DEVICE);
    current = device;
    return SUCCESS;
}
int cudaDriverGetVersion(int *version) { *version = CUDA_VERSION; return SUCCESS; }
int cudaRuntimeGetVersion(int *version) { *version = CUDA_VERSION; return SUCCESS; }
int cudaDeviceCanAccessPeer(int *can, int from, int to) { *can = from != to; return SUCCESS; }
int cudaDeviceEnablePeerAccess(int peer, unsigned flags) { return SUCCESS; }
int cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    if (least) *least = 0;
    if (greatest) *greatest = -5;
    return SUCCESS;
}
int cudaDeviceGetPCIBusId(char *text, int length, int device) {
    snprintf(text, (size_t)length, "0000:%02X:00.0", 16 + device);
    return SUCCESS;
}

int cudaGetDeviceProperties(Properties *p, int device) {
    const Gpu *gpu = gpumem_told();
    if (device < 0 || device >= gpu->count) return gpumem_fail(INVALID_DEVICE);
    memset(p, 0, sizeof *p);
    snprintf(p->name, sizeof p->name, "%s", gpu->name);
    gpumem_uuid(device, (unsigned char *)p->uuid);
    p->total_memory = gpu->total_bytes;
    p->shared_per_block = (size_t)gpu->shared_per_block;
    p->shared_per_block_optin = (size_t)gpu->shared_per_block_optin;
    p->shared_per_multiprocessor = (size_t)gpu->shared_per_multiprocessor;
    p->reserved_shared_per_block = gpu->major >= 8 ? 1024 : 0;
    p->registers_per_block = p->registers_per_multiprocessor = 65536;
    p->warp_size = 32;
    p->memory_pitch = 2147483647;
    p->threads_per_block = p->block_size[0] = p->block_size[1] = 1024;
    p->block_size[2] = 64;
    p->grid_size[0] = 2147483647;
    p->grid_size[1] = p->grid_size[2] = 65535;
    p->constant_memory = 65536;
    p->major = gpu->major;
    p->minor = gpu->minor;
    p->texture_alignment = p->surface_alignment = 512;
    p->texture_pitch_alignment = 32;
    p->multiprocessors = gpu->multiprocessors;
    p->threads_per_multiprocessor = gpu->threads_per_multiprocessor;
    p->blocks_per_multiprocessor = gpu->blocks_per_multiprocessor;
    p->texture_1d = p->texture_2d[0] = 131072;
    p->texture_2d[1] = 65536;
    p->bus_bits = gpu->bus_bits;
    p->l2_bytes = gpu->l2_bytes;
    p->persisting_l2_bytes = gpu->major >= 8 ? gpu->l2_bytes / 8 * 5 : 0;
    p->access_policy_window = gpu->major >= 8 ? 134213632 : 0;
    p->pci_bus = 16 + device;
    p->async_engines = 3;
    p->maps_host_memory = p->concurrent_kernels = p->ecc = p->unified_addressing = p->stream_priorities = 1;
    p->global_l1 = p->local_l1 = p->managed_memory = p->concurrent_managed_access = p->compute_preemption = 1;
    p->host_pointer_for_registered = p->cooperative_launch = p->host_register = p->memory_pools = p->ipc_events = 1;
    p->unified_function_pointers = 1;
    p->cluster_launch = gpu->major >= 9;
#if CUDA_MAJOR < 13
    p->clock_khz = gpu->sm_khz;
    p->memory_khz = gpu->memory_khz;
    p->device_overlap = 1;
#endif
    return SUCCESS;
}
int cudaGetDeviceProperties_v2(Properties *p, int device) { return cudaGetDeviceProperties(p, device); }

/* `attribute` is a number from cudaDeviceAttr or CUdevice_attribute, which are equal. Attributes that are not listed are 0. */
int cudaDeviceGetAttribute(int *value, int attribute, int device) {
    const Gpu *gpu = gpumem_told();
    if (device < 0 || device >= gpu->count) return gpumem_fail(INVALID_DEVICE);
    switch (attribute) {
    case 1: case 2: case 3: *value = 1024; break;                    /* threads in a block: in all, in x, in y */
    case 4: *value = 64; break;                                      /* in z */
    case 5: *value = 2147483647; break;                              /* blocks in a grid in x */
    case 6: case 7: *value = 65535; break;                           /* in y and z */
    case 8: *value = gpu->shared_per_block; break;
    case 9: case 12: case 82: *value = 65536; break;                 /* constant memory; registers in a block, in an SM */
    case 10: *value = 32; break;                                     /* warp size */
    case 11: *value = 2147483647; break;                             /* memory pitch */
    case 13: *value = gpu->sm_khz; break;
    case 14: case 30: *value = 512; break;                           /* alignment of textures and surfaces */
    case 15: case 19: case 31: case 32: case 41: *value = 1; break;  /* overlap, host mapping, concurrency, ECC, unified */
    case 16: *value = gpu->multiprocessors; break;
    case 33: *value = 16 + device; break;                            /* PCI bus */
    case 36: *value = gpu->memory_khz; break;
    case 37: *value = gpu->bus_bits; break;
    case 38: *value = gpu->l2_bytes; break;
    case 39: *value = gpu->threads_per_multiprocessor; break;
    case 40: *value = 3; break;                                      /* copy engines */
    case 75: *value = gpu->major; break;
    case 76: *value = gpu->minor; break;
    case 78: case 79: case 80: case 83: case 89: case 90: case 91: case 95: *value = 1; break;
    case 81: *value = gpu->shared_per_multiprocessor; break;
    case 97: *value = gpu->shared_per_block_optin; break;
    case 99: *value = 1; break;                                      /* host registration */
    case 102: *value = 1; break;                                     /* virtual memory management (CUdevice_attribute) */
    case 106: *value = gpu->blocks_per_multiprocessor; break;
    case 111: *value = gpu->major >= 8 ? 1024 : 0; break;            /* shared memory reserved in each block */
    case 115: *value = 1; break;                                     /* memory pools */
    case 120: *value = gpu->major >= 9; break;                       /* clusters */
    default: *value = 0;
    }
    return SUCCESS;
}
