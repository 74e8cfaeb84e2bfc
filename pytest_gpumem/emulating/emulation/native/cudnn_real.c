/* The real cuDNN, if it is installed. It plans convolutions: it chooses kernels, and reports the sizes of their workspaces.

   cuDNN can plan for a GPU that is not there. A handle would need a driver, so cuDNN gets a descriptor with the GPU's properties
   instead. cuDNN runs in a process of its own, the planner (cudnn_planner.c). A process starts its planner at its first
   convolution. If the planner crashes, this convolution fails, and the next convolution starts another planner. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "cudart_types.h"
#include "cudnn_planner.h"
#include "cudnn_store.h"
#include "emulated.h"

extern char **environ;
int cudaGetDeviceProperties(Properties *properties, int device);

enum { PLANNER_ENDED = 4000 }; /* CUDNN_STATUS_INTERNAL_ERROR */
static char path[4096];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* one request at a time */
static int to_planner = -1;
static int generation = 1; /* the planner's number, because a handle is valid only in the planner that created it */

/* Call this function before torch is loaded. */
void gpumem_use_cudnn(const char *library) { snprintf(path, sizeof path, "%s", library); }

/* Writes the GPU's properties as JSON, with all keys that cuDNN requires. The card's PCI number is not known, and is written as
   0. Neither this number nor the card's name changed any of 192 lists of plans for 10 GPUs (cuDNN 9.20). */
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

/* Finds the planner's program, which is in the same folder as this library. */
static int find_planner(char *text, size_t room) {
    Dl_info here;
    if (!dladdr(find_planner, &here) || !here.dli_fname) return 1;
    const char *end = strrchr(here.dli_fname, '/');
    int length = snprintf(text, room, "%.*s/cudnn_planner", end ? (int)(end - here.dli_fname) : 1, end ? here.dli_fname : ".");
    return length < 0 || (size_t)length >= room;
}

static int transfer(void *values, size_t bytes, int sends) {
    while (bytes) {
        ssize_t moved = sends ? send(to_planner, values, bytes, MSG_NOSIGNAL) : recv(to_planner, values, bytes, 0);
        if (moved < 0 && errno == EINTR) continue;
        if (moved <= 0) return 1;
        values = (char *)values + moved;
        bytes -= (size_t)moved;
    }
    return 0;
}

static void leave_planner(void) {
    if (to_planner >= 0) close(to_planner);
    to_planner = -1;
    generation++;
}
static void take_lock(void) { pthread_mutex_lock(&lock); }
static void give_lock(void) { pthread_mutex_unlock(&lock); }
/* A planner answers only the process that started it. So a forked process forgets its parent's planner, and starts its own. */
static void leave_in_fork(void) {
    leave_planner();
    give_lock();
}

static int start_planner(void) {
    char program[4096];
    int ends[2], failed;
    pid_t started;
    posix_spawn_file_actions_t actions;
    if (find_planner(program, sizeof program) || socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends)) return 1;
    char *arguments[] = {program, NULL};
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, ends[1], PLANNER_SOCKET);
    failed = posix_spawn(&started, program, &actions, NULL, arguments, environ);
    posix_spawn_file_actions_destroy(&actions);
    close(ends[1]);
    if (failed) { close(ends[0]); return 1; }
    while (waitpid(started, NULL, 0) < 0 && errno == EINTR) {} /* it ends at once, and its own fork is the planner */
    to_planner = ends[0];
    return 0;
}

/* Sends a request, and reads the answer and its values. Returns 1 if this fails or if `room` is too small for the values. */
static int exchange(Request asked, const void *values, Answer *answer, void *into, size_t room) {
    if (transfer(&asked, sizeof asked, 1) || transfer((void *)values, (size_t)asked.bytes, 1)) return 1;
    if (transfer(answer, sizeof *answer, 0)) return 1;
    return (size_t)answer->bytes > room || transfer(into, (size_t)answer->bytes, 0);
}

/* Starts a planner if this process has none, and returns the release of the planner's cuDNN; 0 if the planner cannot plan. */
static int64_t opened(void) {
    static int64_t release;
    char text[sizeof path + 2048];
    if (to_planner >= 0) return release;
    leave_planner();
    if (!*path || start_planner()) return 0;
    size_t length = strlen(path) + 1;
    memcpy(text, path, length);
    Answer answer = {0};
    release = describe(text + length, 2048) ? 0 : 1;
    Request open = {.what = OPEN, .bytes = (int64_t)(length + strlen(text + length) + 1)};
    if (release && exchange(open, text, &answer, NULL, 0)) answer.number = 0;
    release = answer.number;
    if (!release) leave_planner();
    return release;
}

static pthread_once_t once = PTHREAD_ONCE_INIT;
static int first_release;
static void open_first(void) {
    pthread_atfork(take_lock, give_lock, leave_in_fork);
    take_lock();
    first_release = (int)opened();
    give_lock();
}
int gpumem_cudnn_release(void) {
    pthread_once(&once, open_first);
    return first_release;
}

static int64_t number_of(const void *real) { return (int64_t)real & 0xffffffffffff; }
static int is_current(const void *real) { return real && (int64_t)real >> 48 == (generation & 0x7fff); }

/* Sends a request about the descriptor `real` to the planner, or a request without a descriptor if `real` is NULL. Returns 1 if
   the planner has ended, or if an earlier planner created the descriptor. The caller must hold the lock. */
static int ask_locked(Request asked, void *real, const void *values, Answer *answer, void *into, size_t room) {
    if (!opened() || (real && !is_current(real))) return 1;
    asked.handle = number_of(real);
    if (!exchange(asked, values, answer, into, room)) return 0;
    leave_planner();
    return 1;
}

/* The same as ask_locked, but takes the lock, and raises an error in torch if the planner has ended. Otherwise torch would try its
   next plan, whose workspace may have another size. */
static int ask(Request asked, void *real, const void *values, Answer *answer, void *into, size_t room) {
    take_lock();
    int failed = ask_locked(asked, real, values, answer, into, room);
    give_lock();
    if (!failed) return answer->status;
    gpumem_raise("the real cuDNN, which plans convolutions for the emulated GPU in a process of its own, ended that process");
    return PLANNER_ENDED;
}

static int set(void *real, int name, int type, int64_t count, const void *values, size_t bytes) {
    Answer answer;
    Request asked = {.what = SET, .name = name, .type = type, .count = count, .bytes = (int64_t)bytes};
    return ask(asked, real, values, &answer, NULL, 0);
}

static int create(int type, void **real) {
    Answer answer;
    int status = ask((Request){.what = CREATE, .type = type}, NULL, NULL, &answer, NULL, 0);
    if (!status) *real = (void *)(answer.number | (int64_t)(generation & 0x7fff) << 48);
    return status;
}

void gpumem_really_destroy(void *real) {
    Answer answer;
    take_lock();
    /* If the planner has ended, the descriptor no longer exists. Use ask_locked, because this function must not raise an error. */
    if (to_planner >= 0 && is_current(real)) ask_locked((Request){.what = DESTROY}, real, NULL, &answer, NULL, 0);
    give_lock();
}

/* Frees an array of handles at the end of its scope, even if an exception from gpumem_raise leaves the scope. */
static void free_handles(int64_t **handles) { free(*handles); }
#define HANDLES __attribute__((cleanup(free_handles))) int64_t *

static int set_descriptors(void *real, const Attribute *attribute) {
    Descriptor **ours = attribute->values;
    HANDLES handles = calloc((size_t)attribute->count + 1, sizeof *handles);
    int status = 0;
    if (!handles) abort();
    for (int64_t i = 0; i < attribute->count && !status; i++) {
        if (!ours[i]) continue;
        status = gpumem_really_finalize(ours[i]);
        handles[i] = number_of(ours[i]->real);
    }
    if (!status) status = set(real, attribute->name, DESCRIPTOR, attribute->count, handles, 8 * (size_t)attribute->count);
    return status;
}

static int fill(void *real, const Descriptor *descriptor) {
    int status = 0;
    for (const Attribute *one = descriptor->attributes; one && !status; one = one->next) {
        if (one->type == HANDLE) continue; /* a handle of the stand-in, which the real cuDNN does not know */
        if (one->type == DESCRIPTOR) status = set_descriptors(real, one);
        else status = set(real, one->name, one->type, one->count, one->values, (size_t)one->count * gpumem_cudnn_width(one->type));
    }
    Answer answer;
    if (status) return status;
    return ask((Request){.what = FINALIZE, .type = descriptor->type}, real, NULL, &answer, NULL, 0);
}

/* Creates the same descriptor in the planner, with all descriptors to which it refers, unless the planner has them already. */
int gpumem_really_finalize(Descriptor *descriptor) {
    void *real;
    if (is_current(descriptor->real)) return 0;
    int status = create(descriptor->type, &real);
    if (status) return status;
    status = fill(real, descriptor);
    if (status) gpumem_really_destroy(real);
    else descriptor->real = real;
    return status;
}

static int get(const Descriptor *descriptor, int name, int type, int64_t wanted, int64_t *found, void *values, size_t bytes) {
    Answer answer;
    Request asked = {
        .what = GET, .name = name, .type = type, .has_values = values != NULL, .count = wanted,
        .bytes = values ? (int64_t)bytes : 0,
    };
    int status = ask(asked, descriptor->real, values, &answer, values, bytes);
    if (found && !status) *found = answer.number;
    return status;
}

/* If the attribute consists of descriptors, the caller passes its own descriptors in `values`. Each of them gets a descriptor in
   the planner, which the real cuDNN fills. */
int gpumem_really_get(Descriptor *descriptor, int name, int type, int64_t wanted, int64_t *found, void *values) {
    if (!is_current(descriptor->real)) return PLANNER_ENDED;
    if (type != DESCRIPTOR || !values)
        return get(descriptor, name, type, wanted, found, values, (size_t)wanted * gpumem_cudnn_width(type));
    Descriptor **ours = values;
    HANDLES handles = calloc((size_t)wanted + 1, sizeof *handles);
    int status = 0;
    if (!handles) abort();
    for (int64_t i = 0; i < wanted && !status; i++) {
        if (!is_current(ours[i]->real)) status = create(ours[i]->type, &ours[i]->real);
        handles[i] = number_of(ours[i]->real);
    }
    if (!status) status = get(descriptor, name, type, wanted, found, handles, 8 * (size_t)wanted);
    return status;
}
