/* Requests to the process that plans convolutions, and its answers. Both are on one machine and compiled together. */
#ifndef GPUMEM_CUDNN_PLANNER_H
#define GPUMEM_CUDNN_PLANNER_H

#include <stdint.h>

enum { PLANNER_SOCKET = 3 };
/* OPEN is the first request. Its text is the path of the library, a null byte, and the GPU's properties as JSON; the answer's
   number is the release. */
enum { OPEN, CREATE, DESTROY, FINALIZE, SET, GET };

/* `bytes` of values follow it: those of an attribute; where it is of descriptors, their handles. */
typedef struct {
    int32_t what, name, type, has_values;
    int64_t handle, count, bytes;
} Request;
/* `bytes` of values follow it, of the attribute that was asked for. */
typedef struct {
    int32_t status, unused;
    int64_t number, bytes;
} Answer;

#endif
