/* Requests to the process that plans convolutions, and this process's answers. Both processes run on the same machine and are
   compiled together, so they can exchange C structures. */
#ifndef GPUMEM_CUDNN_PLANNER_H
#define GPUMEM_CUDNN_PLANNER_H

#include <stdint.h>

enum { PLANNER_SOCKET = 3 };
/* OPEN is the first request. Its values are the path of the real cuDNN, a null byte, and the GPU's properties as JSON. The
   answer's `number` is cuDNN's release (92000), or 0 if this cuDNN cannot plan without a GPU. */
enum { OPEN, CREATE, DESTROY, FINALIZE, SET, GET };

/* After a request, `bytes` bytes of values follow: the values of an attribute, which are handles if they are descriptors. */
typedef struct {
    int32_t what, name, type, has_values;
    int64_t handle, count, bytes;
} Request;
/* After an answer, `bytes` bytes of values follow: the values of the requested attribute. */
typedef struct {
    int32_t status, unused;
    int64_t number, bytes;
} Answer;

#endif
