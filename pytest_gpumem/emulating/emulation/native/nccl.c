/* NCCL for a single rank in a job. All other ranks are assumed to send the same values as this rank. So a collective copies this
   rank's own part, and a sum is this part multiplied by the number of ranks. */
#include <stdlib.h>
#include <string.h>

#include "emulated.h"

/* Ranks in the same process (`ncclCommInitAll`) share `broadcast`, a pointer to the memory that the root rank broadcasts. */
typedef struct { int rank, size; const void **broadcast; char room[4096]; } Communicator;
typedef struct { char bytes[128]; } UniqueId;
enum { DEVICE_TO_DEVICE = 3 };
enum { SUM = 0 };
extern int cudaMemcpyAsync(void *, const void *, size_t, int, void *);

int ncclGetVersion(int *version) { *version = 22907; return 0; }
int ncclGetUniqueId(UniqueId *id) { memset(id, 7, sizeof *id); return 0; }
const char *ncclGetErrorString(int error) { return error ? "the emulated NCCL lacks this" : "no error"; }
const char *ncclGetLastError(void *communicator) { return ""; }

int ncclCommInitRank(Communicator **made, int size, UniqueId id, int rank) {
    *made = calloc(1, sizeof **made);
    (*made)->rank = rank;
    (*made)->size = size;
    return 0;
}
int ncclCommInitRankConfig(Communicator **made, int size, UniqueId id, int rank, void *config) {
    return ncclCommInitRank(made, size, id, rank);
}
int ncclCommInitRankScalable(Communicator **made, int size, int rank, int ids, UniqueId *id, void *config) {
    return ncclCommInitRank(made, size, *id, rank);
}
int ncclCommInitAll(Communicator **made, int size, const int *devices) {
    const void **broadcast = calloc(1, sizeof *broadcast);
    UniqueId id = {{0}};
    for (int rank = 0; rank < size; rank++) {
        ncclCommInitRank(&made[rank], size, id, rank);
        made[rank]->broadcast = broadcast;
    }
    return 0;
}
/* The new communicator has as many ranks as the old one, because it is not known which other ranks have this colour. */
int ncclCommSplit(Communicator *from, int color, int key, Communicator **made, void *config) {
    *made = calloc(1, sizeof **made);
    **made = *from;
    return 0;
}
int ncclCommDestroy(Communicator *communicator) { return 0; }
int ncclCommAbort(Communicator *communicator) { return 0; }
int ncclCommFinalize(Communicator *communicator) { return 0; }
int ncclCommCount(Communicator *communicator, int *size) { *size = communicator->size; return 0; }
int ncclCommUserRank(Communicator *communicator, int *rank) { *rank = communicator->rank; return 0; }
int ncclCommGetAsyncError(Communicator *communicator, int *error) { *error = 0; return 0; }
int ncclCommRegister(Communicator *communicator, void *buffer, size_t bytes, void **handle) { *handle = buffer; return 0; }
int ncclCommDeregister(Communicator *communicator, void *handle) { return 0; }
int ncclRedOpCreatePreMulSum(int *operation, void *scalar, int type, int place, Communicator *communicator) {
    *operation = 5;
    return 0;
}
int ncclRedOpDestroy(int operation, Communicator *communicator) { return 0; }

/* The size in bytes of a value with an ncclDataType_t. */
static size_t width(int type) {
    static const size_t WIDTHS[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
    return type >= 0 && type < 12 ? WIDTHS[type] : 1;
}
static int copied(void *to, const void *from, size_t bytes, void *stream, const char *name) {
    gpumem_launched(name);
    return to && to != from ? cudaMemcpyAsync(to, from, bytes, DEVICE_TO_DEVICE, stream) : 0;
}
#define TIMES(kind) for (size_t at = 0; at < count; at++) ((kind *)values)[at] *= (kind)size
/* Multiplies values by the number of ranks. Like copies, sums are computed only up to 1 MiB. float16 values stay unchanged. */
static void times(void *values, size_t count, int type, int size) {
    if (count * width(type) > MIB) return;
    switch (type) {
        case 0: TIMES(int8_t); break;
        case 1: TIMES(uint8_t); break;
        case 2: TIMES(int32_t); break;
        case 3: TIMES(uint32_t); break;
        case 4: TIMES(int64_t); break;
        case 5: TIMES(uint64_t); break;
        case 7: TIMES(float); break;
        case 8: TIMES(double); break;
        case 9:
            for (size_t at = 0; at < count; at++) {
                uint32_t bits = (uint32_t)((uint16_t *)values)[at] << 16;
                float wide;
                memcpy(&wide, &bits, sizeof wide);
                wide *= (float)size;
                memcpy(&bits, &wide, sizeof bits);
                ((uint16_t *)values)[at] = (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
            }
    }
}
static int reduced(void *to, const void *from, size_t count, int type, int op, Communicator *c, void *stream, const char *name) {
    int status = copied(to, from, count * width(type), stream, name);
    if (to && status == 0 && op == SUM) times(to, count, type, c->size);
    return status;
}
int ncclAllReduce(const void *from, void *to, size_t count, int type, int op, Communicator *c, void *stream) {
    return reduced(to, from, count, type, op, c, stream, "ncclAllReduce");
}
int ncclReduce(const void *from, void *to, size_t count, int type, int op, int root, Communicator *c, void *stream) {
    return reduced(c->rank == root ? to : NULL, from, count, type, op, c, stream, "ncclReduce");
}
/* torch 2.15 gathers the tensors in a list by a group of broadcasts, one from each rank. In such a group, the other ranks'
   broadcasts have the same values as this rank's broadcast. */
typedef struct { const void *from; void *to; size_t bytes; int root; Communicator *c; void *stream; } Broadcast;
static __thread struct { Broadcast *all; size_t count, room; int depth; } group;

int ncclBroadcast(const void *from, void *to, size_t count, int type, int root, Communicator *c, void *stream) {
    if (group.depth) {
        if (group.count == group.room) {
            group.room = group.room ? 2 * group.room : 64;
            group.all = realloc(group.all, group.room * sizeof *group.all);
        }
        group.all[group.count++] = (Broadcast){from, to, count * width(type), root, c, stream};
    }
    return copied(c->rank == root ? to : NULL, from, count * width(type), stream, "ncclBroadcast");
}
int ncclGroupStart(void) { group.depth++; return 0; }
int ncclGroupEnd(void) {
    if (--group.depth) return 0;
    for (Broadcast *ours = group.all; ours < group.all + group.count; ours++) {
        if (ours->root != ours->c->rank) continue;
        for (Broadcast *other = group.all; other < group.all + group.count; other++)
            if (other->c == ours->c && other->root != ours->root && other->bytes == ours->bytes)
                cudaMemcpyAsync(other->to, ours->from, ours->bytes, DEVICE_TO_DEVICE, other->stream);
    }
    group.count = 0;
    return 0;
}
int ncclBcast(void *buffer, size_t count, int type, int root, Communicator *c, void *stream) {
    if (c->broadcast && c->rank == root) *c->broadcast = buffer;
    int is_given = c->broadcast && *c->broadcast && c->rank > root;
    return copied(is_given ? buffer : NULL, is_given ? *c->broadcast : buffer, count * width(type), stream, "ncclBcast");
}
int ncclAllGather(const void *from, void *to, size_t count, int type, Communicator *c, void *stream) {
    size_t bytes = count * width(type);
    for (int rank = 0; rank < c->size; rank++) {
        char *part = (char *)to + (size_t)rank * bytes;
        if (part != (const char *)from) cudaMemcpyAsync(part, from, bytes, DEVICE_TO_DEVICE, stream);
    }
    gpumem_launched("ncclAllGather");
    return 0;
}
int ncclReduceScatter(const void *from, void *to, size_t count, int type, int op, Communicator *c, void *stream) {
    size_t bytes = count * width(type);
    return reduced(to, (const char *)from + (size_t)c->rank * bytes, count, type, op, c, stream, "ncclReduceScatter");
}
int ncclAlltoAll(const void *from, void *to, size_t count, int type, Communicator *c, void *stream) {
    return copied(to, from, count * width(type) * (size_t)c->size, stream, "ncclAlltoAll");
}
int ncclSend(const void *from, size_t count, int type, int peer, Communicator *c, void *stream) {
    return copied(NULL, from, 0, stream, "ncclSend");
}
int ncclRecv(void *to, size_t count, int type, int peer, Communicator *c, void *stream) {
    return copied(NULL, to, 0, stream, "ncclRecv");
}
