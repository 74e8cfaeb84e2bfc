/* The data that torch stores in cuDNN: shapes, and descriptors of cuDNN's graph interface with their attributes. */
#ifndef GPUMEM_CUDNN_STORE_H
#define GPUMEM_CUDNN_STORE_H

#include <stddef.h>
#include <stdint.h>

/* cudnnBackendDescriptorType_t */
enum {
    ENGINE = 2, ENGINE_CONFIG = 3, HEURISTICS = 4, PLAN = 5, FIRST_CONVOLUTION = 10, LAST_CONVOLUTION = 12, GRAPH = 15,
    REDUCTION = 22, DEVICE_PROPERTIES = 38,
};
/* cudnnBackendAttributeName_t */
enum {
    HEURISTICS_RESULTS = 202, HEURISTICS_DEVICE = 204,
    CONFIG_ENGINE = 300, CONFIG_WORKSPACE = 303, CONFIG_SHARED_MEMORY = 304,
    PLAN_WORKSPACE = 402, PLAN_JSON = 405, PLAN_DEVICE = 407,
    GRAPH_ENGINE_COUNT = 802,
    TENSOR_TYPE = 901, TENSOR_SIZES = 902,
    REDUCTION_INPUT = 1610, REDUCTION_OUTPUT = 1611,
    DEVICE_JSON = 2702,
};
/* cudnnBackendAttributeType_t */
enum { HANDLE = 0, INT64 = 3, DESCRIPTOR = 15, CHARACTER = 24 };

typedef struct Attribute {
    int name, type;
    int64_t count;
    void *values;
    struct Attribute *next;
} Attribute;
typedef struct {
    int type;
    int holders;           /* the reference count: the caller, and each attribute that refers to this descriptor */
    int convolution;       /* 1 for a convolution, and for a graph, heuristics and plans made from a convolution; otherwise 0 */
    int64_t most;          /* if `convolution` is 1, an estimated upper bound for the workspace in bytes */
    int64_t whole_heads;   /* in attention's backward, the bytes of the gradients for all heads if heads share keys and values */
    void *real;            /* the same descriptor in the real cuDNN; NULL if there is none */
    Attribute *attributes; /* in the order in which they were set */
} Descriptor;

enum { MOST_DIMENSIONS = 8 }; /* CUDNN_DIM_MAX */
typedef struct { int type, rank, sizes[MOST_DIMENSIONS], strides[MOST_DIMENSIONS]; } Shape;

/* Functions in cudnn_real.c, which let the real cuDNN plan convolutions. They return cuDNN's status codes. */
int gpumem_cudnn_release(void); /* cuDNN's release (92000); 0 if no installed cuDNN can plan without a GPU */
int gpumem_really_finalize(Descriptor *descriptor);
int gpumem_really_get(Descriptor *descriptor, int name, int type, int64_t wanted, int64_t *found, void *values);
void gpumem_really_destroy(void *real);
size_t gpumem_cudnn_width(int type); /* the size in bytes of an attribute's value */

#endif
