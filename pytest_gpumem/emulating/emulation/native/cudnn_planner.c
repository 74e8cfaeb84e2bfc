/* The process that plans convolutions. It loads the real cuDNN, and answers the requests of one other process until that process
   ends.

   In this separate process, cuDNN has its own environment and threads. In the program's process, cuDNN kept using an `environ`
   that the program's `setenv` had freed, and crashed together with libraries that a compiler had loaded. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "cudnn_planner.h"
#include "cudnn_store.h"

static struct {
    size_t (*version)(void);
    int (*create)(int, void **);
    int (*destroy)(void *);
    int (*finalize)(void *);
    int (*set)(void *, int, int, int64_t, const void *);
    int (*get)(void *, int, int, int64_t, int64_t *, void *);
} cudnn;
static void *device; /* the descriptor of the GPU's properties */

static void receive(void *to, size_t bytes) {
    while (bytes) {
        ssize_t got = recv(PLANNER_SOCKET, to, bytes, 0);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) _exit(0); /* the other process has ended */
        to = (char *)to + got;
        bytes -= (size_t)got;
    }
}
static void give(const void *from, size_t bytes) {
    while (bytes) {
        ssize_t given = send(PLANNER_SOCKET, from, bytes, MSG_NOSIGNAL);
        if (given < 0 && errno == EINTR) continue;
        if (given <= 0) _exit(0);
        from = (const char *)from + given;
        bytes -= (size_t)given;
    }
}
static void answer(int status, int64_t number, const void *values, int64_t bytes) {
    Answer it = {status, 0, number, bytes};
    give(&it, sizeof it);
    give(values, (size_t)bytes);
}

static int64_t opened(const char *path, const char *json) {
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library) return 0;
    cudnn.version = dlsym(library, "cudnnGetVersion");
    cudnn.create = dlsym(library, "cudnnBackendCreateDescriptor");
    cudnn.destroy = dlsym(library, "cudnnBackendDestroyDescriptor");
    cudnn.finalize = dlsym(library, "cudnnBackendFinalize");
    cudnn.set = dlsym(library, "cudnnBackendSetAttribute");
    cudnn.get = dlsym(library, "cudnnBackendGetAttribute");
    if (!(cudnn.version && cudnn.create && cudnn.destroy && cudnn.finalize && cudnn.set && cudnn.get)) return 0;
    /* cuDNN releases before 9.8 do not know this descriptor, so they cannot plan without a GPU. */
    if (cudnn.create(DEVICE_PROPERTIES, &device)) return 0;
    if (cudnn.set(device, DEVICE_JSON, CHARACTER, (int64_t)strlen(json) + 1, json) || cudnn.finalize(device)) return 0;
    return (int64_t)cudnn.version();
}

static int finalize(void *descriptor, int type) {
    int status = 0;
    if (type == HEURISTICS) status = cudnn.set(descriptor, HEURISTICS_DEVICE, DESCRIPTOR, 1, &device);
    if (type == PLAN) status = cudnn.set(descriptor, PLAN_DEVICE, DESCRIPTOR, 1, &device);
    return status ? status : cudnn.finalize(descriptor);
}

static void get(const Request *asked, void *values) {
    int64_t found = 0;
    int status = cudnn.get((void *)asked->handle, asked->name, asked->type, asked->count, &found, asked->has_values ? values : NULL);
    answer(status, found, values, asked->type == DESCRIPTOR || !asked->has_values ? 0 : asked->bytes);
}

static void close_others(void) {
#ifdef SYS_close_range
    if (!syscall(SYS_close_range, PLANNER_SOCKET + 1, ~0U, 0)) return;
#endif
    for (int at = PLANNER_SOCKET + 1; at < 4096; at++) close(at);
}

int main(void) {
    /* Leave the program's session, so Ctrl-C does not end this process. Close the program's files, so a process that waits until
       one of the program's pipes is closed does not wait for this process. */
    setsid();
    close_others();
    int nothing = open("/dev/null", O_RDWR);
    for (int at = 0; at < PLANNER_SOCKET; at++) dup2(nothing, at);
    if (fork()) _exit(0); /* the fork is not a child of the program */
    for (;;) {
        Request asked;
        void *made = NULL;
        int status;
        receive(&asked, sizeof asked);
        char *values = calloc(1, (size_t)asked.bytes + 1);
        if (!values) return 1;
        receive(values, (size_t)asked.bytes);
        switch (asked.what) {
        case OPEN: answer(0, opened(values, values + strlen(values) + 1), NULL, 0); break;
        case CREATE: status = cudnn.create(asked.type, &made); answer(status, (int64_t)made, NULL, 0); break;
        case DESTROY: answer(cudnn.destroy((void *)asked.handle), 0, NULL, 0); break;
        case FINALIZE: answer(finalize((void *)asked.handle, asked.type), 0, NULL, 0); break;
        case SET: answer(cudnn.set((void *)asked.handle, asked.name, asked.type, asked.count, values), 0, NULL, 0); break;
        default: get(&asked, values);
        }
        free(values);
    }
}
