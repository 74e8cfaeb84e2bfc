/* cuDNN. Its graph interface is a store of attributes: every graph of operations has one engine, which needs no workspace.
   cuDNN's front end, which is compiled into torch, computes attention's workspaces itself; those are real. What cuDNN's own
   library would take for convolutions is not known here: gpumem_convolutions says how many plans with one were made. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "emulated.h"

/* cudnnBackendDescriptorType_t */
enum { ENGINE = 2, ENGINE_CONFIG = 3, HEURISTICS = 4, PLAN = 5, FIRST_CONVOLUTION = 10, LAST_CONVOLUTION = 12, GRAPH = 15 };
/* cudnnBackendAttributeName_t */
enum {
    HEURISTICS_RESULTS = 202,
    CONFIG_ENGINE = 300, CONFIG_WORKSPACE = 303, CONFIG_SHARED_MEMORY = 304,
    PLAN_WORKSPACE = 402, PLAN_JSON = 405,
    GRAPH_ENGINE_COUNT = 802,
};
/* cudnnBackendAttributeType_t -> bytes; those that are not listed are enumerations. */
static size_t width(int type) {
    switch (type) {
    case 0: case 3: case 5: case 6: case 15: return 8; /* handle, int64, double, pointer, descriptor */
    case 2: case 24: return 1;                         /* boolean, character */
    case 26: return 16;                                /* fraction */
    default: return 4;
    }
}
enum { INT64 = 3 };

typedef struct Attribute {
    int name;
    int64_t count;
    void *values;
    struct Attribute *next;
} Attribute;
typedef struct { int type; Attribute *attributes; } Descriptor;

static long convolutions;
long gpumem_convolutions(void) { return convolutions; }

int cudnnBackendCreateDescriptor(int type, Descriptor **made) {
    *made = calloc(1, sizeof **made);
    (*made)->type = type;
    if (type >= FIRST_CONVOLUTION && type <= LAST_CONVOLUTION) __atomic_add_fetch(&convolutions, 1, __ATOMIC_RELAXED);
    return 0;
}
int cudnnBackendDestroyDescriptor(Descriptor *descriptor) {
    for (Attribute *one = descriptor ? descriptor->attributes : NULL; one;) {
        Attribute *next = one->next;
        free(one->values);
        free(one);
        one = next;
    }
    free(descriptor);
    return 0;
}
int cudnnBackendInitialize(Descriptor *descriptor) { return 0; }
int cudnnBackendFinalize(Descriptor *descriptor) { return 0; }
int cudnnBackendExecute(void *handle, Descriptor *plan, Descriptor *pack) { gpumem_launched("cudnnBackendExecute"); return 0; }
int cudnnBackendSetAttribute(Descriptor *descriptor, int name, int type, int64_t count, const void *values) {
    size_t bytes = (size_t)count * width(type);
    Attribute *made = calloc(1, sizeof *made);
    *made = (Attribute){name, count, malloc(bytes + 1), descriptor->attributes};
    memcpy(made->values, values, bytes);
    descriptor->attributes = made;
    return 0;
}
int cudnnBackendGetAttribute(Descriptor *descriptor, int name, int type, int64_t wanted, int64_t *found, void *values) {
    int64_t unasked;
    if (!found) found = &unasked;
    *found = 1;
    int is = descriptor->type;
    if (is == HEURISTICS && name == HEURISTICS_RESULTS) return 0;
    if (is == ENGINE_CONFIG && name == CONFIG_ENGINE) return 0;
    if ((is == ENGINE_CONFIG && name == CONFIG_WORKSPACE) || (is == PLAN && name == PLAN_WORKSPACE)) {
        if (wanted) *(int64_t *)values = 0;
        return 0;
    }
    if (is == ENGINE_CONFIG && name == CONFIG_SHARED_MEMORY) {
        if (wanted) *(int32_t *)values = 0;
        return 0;
    }
    if (is == GRAPH && name == GRAPH_ENGINE_COUNT) {
        if (wanted) *(int64_t *)values = 1;
        return 0;
    }
    if (is == PLAN && name == PLAN_JSON) {
        static const char text[] = "{\"engine\": 0}";
        *found = sizeof text;
        if (values) memcpy(values, text, wanted < *found ? (size_t)wanted : sizeof text);
        return 0;
    }
    for (Attribute *one = descriptor->attributes; one; one = one->next) {
        if (one->name != name) continue;
        *found = one->count;
        if (values) memcpy(values, one->values, (size_t)(wanted < one->count ? wanted : one->count) * width(type));
        return 0;
    }
    if (is == ENGINE && type == INT64 && wanted) *(int64_t *)values = 0;
    else *found = 0;
    return 0;
}

/* The older interface: descriptors are empty. */
int cudnnCreate(void **handle) { *handle = calloc(1, 256); return 0; }
int cudnnDestroy(void *handle) { free(handle); return 0; }
int cudnnSetStream(void *handle, void *stream) { *(void **)handle = stream; return 0; }
int cudnnGetStream(void *handle, void **stream) { *stream = *(void **)handle; return 0; }
size_t cudnnGetVersion(void) { return CUDNN_VERSION; }
size_t cudnnGetCudartVersion(void) { return CUDA_VERSION; }
int cudnnGetProperty(int part, int *value) {
    *value = part == 0 ? CUDNN_VERSION / 10000 : part == 1 ? CUDNN_VERSION / 100 % 100 : CUDNN_VERSION % 100;
    return 0;
}
const char *cudnnGetErrorString(int status) { return status ? "CUDNN_STATUS_NOT_SUPPORTED (emulated GPU)" : "CUDNN_STATUS_SUCCESS"; }
void cudnnGetLastErrorString(char *text, size_t room) { if (room) *text = 0; }

#define DESCRIPTOR(name) \
    int cudnnCreate##name##Descriptor(void **made) { *made = calloc(1, 512); return 0; } \
    int cudnnDestroy##name##Descriptor(void *made) { free(made); return 0; }
DESCRIPTOR(Tensor)
DESCRIPTOR(Filter)
DESCRIPTOR(Convolution)
DESCRIPTOR(Activation)
DESCRIPTOR(Dropout)
DESCRIPTOR(Pooling)

#define ACCEPTED(name) int cudnn##name(void) { return 0; }
ACCEPTED(SetTensorNdDescriptor)
ACCEPTED(SetFilterNdDescriptor)
ACCEPTED(SetConvolutionNdDescriptor)
ACCEPTED(SetConvolutionGroupCount)
ACCEPTED(SetConvolutionMathType)
ACCEPTED(SetActivationDescriptor)
ACCEPTED(SetDropoutDescriptor)
ACCEPTED(RestoreDropoutDescriptor)
ACCEPTED(SetPooling2dDescriptor)

#define LAUNCHED(name) int cudnn##name(void) { gpumem_launched("cudnn" #name); return 0; }
LAUNCHED(PoolingForward)
LAUNCHED(BatchNormalizationForwardTrainingEx)
LAUNCHED(BatchNormalizationBackwardEx)
LAUNCHED(BatchNormalizationForwardInference)

int cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(
    void *h, int mode, int ops, void *x, void *z, void *y, void *norm, void *activation, size_t *bytes
) { *bytes = 0; return 0; }
int cudnnGetBatchNormalizationBackwardExWorkspaceSize(
    void *h, int mode, int ops, void *x, void *y, void *dy, void *dz, void *dx, void *norm, void *activation, size_t *bytes
) { *bytes = 0; return 0; }
int cudnnGetBatchNormalizationTrainingExReserveSpaceSize(void *h, int mode, int ops, void *activation, void *x, size_t *bytes) {
    *bytes = 0;
    return 0;
}
/* What an H100 answers is not known; this is 132 multiprocessors times 2,048 threads times 8 bytes. */
int cudnnDropoutGetStatesSize(void *handle, size_t *bytes) { *bytes = 2162688; return 0; }
