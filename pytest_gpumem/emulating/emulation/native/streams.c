/* Streams and events. Launched work is done when the host waits for it, and not before, because a real GPU lags behind its host.

   Each event and each wait gets a number, in the order of the calls. An event is done when its stream is done up to the event's
   number. A stream that waits for an event is done only after the event. So when a stream is done, all events for which it has
   waited are done too, and so are the streams of these events, up to the events' numbers. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "cudart_types.h"
#include "emulated.h"

int gpumem_fail(int error);

typedef unsigned long long Number;

typedef struct Stream Stream;
typedef struct { Stream *of; Number until, since; } Wait;
struct Stream {
    int device, priority, capturing;
    Number capture, done;
    Wait *waits; /* the streams for which this stream waits, each until a number; `since` is the wait's own number */
    size_t wait_count, wait_room;
};
typedef struct {
    Stream *stream;
    Number number; /* 0: never recorded */
    pthread_t by;
} Event;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Number latest, captures;
static Stream defaults[MOST_DEVICES]; /* each device's default stream */
static Number all_done;

/* Handles below 16 stand for the default stream. */
static Stream *of(void *stream) {
    return (uintptr_t)stream < 16 ? &defaults[gpumem_current()] : stream;
}

static void done_until(Stream *stream, Number until) {
    if (stream->done >= until) return;
    stream->done = until;
    size_t kept = 0;
    for (size_t i = 0; i < stream->wait_count; i++) {
        Wait wait = stream->waits[i];
        if (wait.since <= until) done_until(wait.of, wait.until);
        else stream->waits[kept++] = wait;
    }
    stream->wait_count = kept;
}

/* Notes that all work launched so far is done. */
void gpumem_all_done(void) {
    pthread_mutex_lock(&lock);
    all_done = latest;
    pthread_mutex_unlock(&lock);
}
int cudaDeviceSynchronize(void) { gpumem_all_done(); return SUCCESS; }

int cudaStreamCreateWithPriority(void **stream, unsigned flags, int priority) {
    Stream *made = calloc(1, sizeof *made);
    made->device = gpumem_current();
    made->priority = priority;
    *stream = made;
    return SUCCESS;
}
int cudaStreamCreateWithFlags(void **stream, unsigned flags) { return cudaStreamCreateWithPriority(stream, flags, 0); }
int cudaStreamCreate(void **stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
/* The stream is not freed, because another stream may still wait for it. torch never destroys its own streams. */
int cudaStreamDestroy(void *stream) { return SUCCESS; }
int cudaStreamGetPriority(void *stream, int *priority) { *priority = of(stream)->priority; return SUCCESS; }
int cudaStreamQuery(void *stream) { return SUCCESS; }
int cudaStreamSynchronize(void *stream) {
    pthread_mutex_lock(&lock);
    done_until(of(stream), latest);
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}
int cudaStreamWaitEvent(void *stream, void *event, unsigned flags) {
    Stream *waiting = of(stream);
    Event *awaited = event;
    if (!awaited->number || awaited->stream == waiting) return SUCCESS;
    pthread_mutex_lock(&lock);
    if (waiting->wait_count == waiting->wait_room) {
        waiting->wait_room = waiting->wait_room ? 2 * waiting->wait_room : 16;
        waiting->waits = realloc(waiting->waits, waiting->wait_room * sizeof *waiting->waits);
        if (!waiting->waits) abort();
    }
    /* `done_until` removes this wait when the waiting stream is done up to the wait's number. */
    waiting->waits[waiting->wait_count++] = (Wait){awaited->stream, awaited->number, ++latest};
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}
int cudaStreamAddCallback(void *stream, void (*call)(void *, int, void *), void *data, unsigned flags) {
    call(stream, SUCCESS, data);
    return SUCCESS;
}
int cudaLaunchHostFunc(void *stream, void (*call)(void *), void *data) { call(data); return SUCCESS; }

int cudaEventCreateWithFlags(void **event, unsigned flags) { *event = calloc(1, sizeof(Event)); return SUCCESS; }
int cudaEventCreate(void **event) { return cudaEventCreateWithFlags(event, 0); }
int cudaEventDestroy(void *event) { free(event); return SUCCESS; }
int cudaEventRecord(void *event, void *stream) {
    Event *recorded = event;
    pthread_mutex_lock(&lock);
    recorded->stream = of(stream);
    recorded->number = ++latest;
    recorded->by = pthread_self();
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}
int cudaEventRecordWithFlags(void *event, void *stream, unsigned flags) { return cudaEventRecord(event, stream); }
/* If a thread queries the same event this many times in a row, and no event is recorded in between, the queries are a loop that
   waits for the event. torch 2.15 waits in this way when it shuts NCCL down. By contrast, the allocator queries an event once for
   each allocation, and must not find the event done. */
enum { IS_WAITING = 100000 };
int cudaEventQuery(void *event) {
    static __thread struct { void *event; unsigned long long latest; long times; } asking;
    Event *asked = event;
    if (!asked->number) return SUCCESS;
    pthread_mutex_lock(&lock);
    /* A query from a thread that did not record the event (NCCL's watchdog) is part of a loop that waits for the event. */
    if (!pthread_equal(asked->by, pthread_self())) done_until(asked->stream, asked->number);
    if (asking.event != event || asking.latest != latest) asking.event = event, asking.latest = latest, asking.times = 0;
    if (++asking.times >= IS_WAITING) done_until(asked->stream, asked->number);
    int done = asked->number <= all_done || asked->number <= asked->stream->done;
    pthread_mutex_unlock(&lock);
    return done ? SUCCESS : NOT_READY;
}
int cudaEventSynchronize(void *event) {
    Event *awaited = event;
    if (!awaited->number) return SUCCESS;
    pthread_mutex_lock(&lock);
    done_until(awaited->stream, awaited->number);
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}
/* No time passes on an emulated GPU, so the time between two events is always 1 ms. If a program searches the fastest of several
   kernels, it finds the first, in every process. The time is not 0, because programs divide by it to compute how often they
   repeat a kernel. */
int cudaEventElapsedTime(float *milliseconds, void *from, void *to) {
    Event *begin = from, *end = to;
    if (!begin->number || !end->number) return gpumem_fail(INVALID_HANDLE);
    *milliseconds = 1;
    return SUCCESS;
}
int cudaEventElapsedTime_v2(float *milliseconds, void *from, void *to) { return cudaEventElapsedTime(milliseconds, from, to); }

/* Capture into graphs. */
int cudaStreamIsCapturing(void *stream, int *status) { *status = of(stream)->capturing; return SUCCESS; }
int cudaStreamBeginCapture(void *stream, int mode) {
    if ((uintptr_t)stream < 16) return gpumem_fail(CAPTURE_UNSUPPORTED);
    of(stream)->capturing = 1;
    of(stream)->capture = ++captures;
    gpumem_capture_begins();
    return SUCCESS;
}
int cudaStreamBeginCaptureToGraph(void *stream, void *graph, const void *nodes, const void *edges, size_t count, int mode) {
    return cudaStreamBeginCapture(stream, mode);
}
int cudaStreamEndCapture(void *stream, void **graph) {
    if (!of(stream)->capturing) return gpumem_fail(INVALID_VALUE);
    of(stream)->capturing = 0;
    *graph = gpumem_capture_ends();
    return SUCCESS;
}
/* In CUDA 12, the argument `edges` before the last argument does not exist. */
#if CUDA_MAJOR < 13
int cudaStreamGetCaptureInfo_v2(void *stream, int *status, Number *id, void **graph, const void **nodes, size_t *count) {
    const void **edges = NULL;
#else
int cudaStreamGetCaptureInfo(
    void *stream, int *status, Number *id, void **graph, const void **nodes, const void **edges, size_t *count
) {
#endif
    *status = of(stream)->capturing;
    if (id) *id = of(stream)->capture;
    if (graph) *graph = *status ? (void *)1 : NULL;
    if (nodes) *nodes = NULL;
    if (edges) *edges = NULL;
    if (count) *count = 0;
    return SUCCESS;
}
#if CUDA_MAJOR < 13
int cudaStreamGetCaptureInfo(void *stream, int *status, Number *id) {
    return cudaStreamGetCaptureInfo_v2(stream, status, id, NULL, NULL, NULL);
}
#endif
int cudaThreadExchangeStreamCaptureMode(int *mode) { return SUCCESS; }
int cudaGraphInstantiateWithFlags(void **made, void *graph, Number flags) { *made = gpumem_copy_of_graph(graph); return SUCCESS; }
int cudaGraphInstantiate(void **made, void *graph, Number flags) { return cudaGraphInstantiateWithFlags(made, graph, flags); }
int cudaGraphLaunch(void *graph, void *stream) { gpumem_launch_graph(graph); return SUCCESS; }
int cudaGraphDestroy(void *graph) { gpumem_free_graph(graph); return SUCCESS; }
int cudaGraphExecDestroy(void *graph) { gpumem_free_graph(graph); return SUCCESS; }
int cudaGraphGetNodes(void *graph, void **nodes, size_t *count) { *count = 1; return SUCCESS; }
