/* What cuDNN is asked to keep: descriptors of its graph interface with the attributes that were set in them, and shapes. */
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
    int holders;           /* the caller, and each attribute that refers to it */
    int convolution;       /* whether it is a convolution, or made of one: a graph, its heuristics, its plans */
    int64_t most;          /* of a convolution and what is made of it: the most that its workspace is estimated at */
    int64_t whole_heads;   /* of attention's backward: gradients of all heads, which are added up for those that share keys */
    void *real;            /* the real library's descriptor of the same, where there is one */
    Attribute *attributes; /* in the order in which they were set */
} Descriptor;

enum { MOST_DIMENSIONS = 8 }; /* CUDNN_DIM_MAX */
typedef struct { int type, rank, sizes[MOST_DIMENSIONS], strides[MOST_DIMENSIONS]; } Shape;

/* cudnn_real.c: the real library, which plans convolutions. Statuses are its own. */
int gpumem_cudnn_release(void); /* 92000; 0 where there is none that can plan without a device */
int gpumem_really_finalize(Descriptor *descriptor);
int gpumem_really_get(Descriptor *descriptor, int name, int type, int64_t wanted, int64_t *found, void *values);
void gpumem_really_destroy(void *real);
size_t gpumem_cudnn_width(int type); /* bytes of a value of an attribute */

#endif
