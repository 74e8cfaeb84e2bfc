/* cuDNN. Its graph interface only stores attributes. The real cuDNN plans graphs with convolutions if it is installed
   (cudnn_real.c). Each other graph of operations has a single engine. cuDNN's front end is compiled into torch and computes most
   of attention's workspaces itself, so these are as large as on a real GPU. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "cudnn_store.h"
#include "emulated.h"

enum { NOT_SUPPORTED = 3000 };

/* The size in bytes of a value with a cudnnBackendAttributeType_t. Types that are not listed are enumerations. */
size_t gpumem_cudnn_width(int type) {
    switch (type) {
    case HANDLE: case INT64: case 5: case 6: case DESCRIPTOR: return 8; /* 5: double, 6: pointer */
    case 2: case CHARACTER: return 1;                                   /* 2: boolean */
    case 26: return 16;                                                 /* fraction */
    default: return 4;
    }
}

static long convolutions;
/* The number of convolutions that have run or were captured in a graph. */
long gpumem_convolutions(void) { return __atomic_load_n(&convolutions, __ATOMIC_RELAXED); }
/* Called right before a convolution without a plan runs, with the estimated upper bound for the convolution's workspace. */
static void (*unplanned)(int64_t most);
void gpumem_tell_unplanned(void (*tell)(int64_t)) { unplanned = tell; }
/* The largest estimated upper bound for a workspace so far. Tests compare planned workspaces with this number. */
int64_t gpumem_most_workspace;

static Attribute *attribute_of(const Descriptor *descriptor, int name) {
    Attribute *one = descriptor->attributes;
    while (one && one->name != name) one = one->next;
    return one;
}

int cudnnBackendCreateDescriptor(int type, Descriptor **made) {
    *made = calloc(1, sizeof **made);
    (*made)->type = type;
    (*made)->holders = 1;
    (*made)->convolution = type >= FIRST_CONVOLUTION && type <= LAST_CONVOLUTION;
    return 0;
}
int cudnnBackendDestroyDescriptor(Descriptor *descriptor);

static void forget_values(Attribute *attribute) {
    if (attribute->type == DESCRIPTOR)
        for (int64_t i = 0; i < attribute->count; i++) cudnnBackendDestroyDescriptor(((Descriptor **)attribute->values)[i]);
    free(attribute->values);
}
int cudnnBackendDestroyDescriptor(Descriptor *descriptor) {
    if (!descriptor || __atomic_sub_fetch(&descriptor->holders, 1, __ATOMIC_ACQ_REL)) return 0;
    for (Attribute *one = descriptor->attributes; one;) {
        Attribute *next = one->next;
        forget_values(one);
        free(one);
        one = next;
    }
    if (descriptor->real) gpumem_really_destroy(descriptor->real);
    free(descriptor);
    return 0;
}
int cudnnBackendInitialize(Descriptor *descriptor) { return 0; }

/* The size in bytes of an element with a cudnnDataType_t: 2 for float16 and bfloat16, 8 for double, 4 for all others. */
static int64_t element_width(const Attribute *type) {
    switch (type ? *(int *)type->values : 0) {
    case 2: case 9: return 2;
    case 1: return 8;
    default: return 4;
    }
}

/* Estimates an upper bound for a convolution's workspace: copies of weight, input and output in another layout, the input unfolded
   for a matrix product, and 16 MiB for partial sums. Copies have the tensor's own data type, and the number of channels is
   rounded up to a multiple of 8. A weight has at least 4 bytes for each element, because its gradient is summed in this size. No
   document states a bound, but no plan that was tried needs more (tests/emulated/test_convolutions.py). */
static int64_t most_workspace(const Descriptor *operation) {
    int first = operation->type == FIRST_CONVOLUTION ? 703 : operation->type == LAST_CONVOLUTION ? 709 : 715;
    int64_t bytes = 0, unfolded = 1, width = 1;
    for (int i = 0; i < 3; i++) { /* weight, input, output */
        const Attribute *operand = attribute_of(operation, first + i);
        const Descriptor *tensor = operand ? *(Descriptor **)operand->values : NULL;
        const Attribute *sizes = tensor ? attribute_of(tensor, TENSOR_SIZES) : NULL;
        const Attribute *type = tensor ? attribute_of(tensor, TENSOR_TYPE) : NULL;
        if (!sizes) return 0;
        if (element_width(type) > width) width = element_width(type);
        int64_t product = 1;
        for (int64_t at = 0; at < sizes->count; at++) {
            int64_t size = ((int64_t *)sizes->values)[at];
            if (at == 1) size = (size + 7) / 8 * 8;
            product *= size;
            /* The unfolded input has, for each position of the output, all input channels at each position of the weight. */
            if (at == 1 ? i == 1 : at == 0 ? i == 2 : i != 1) unfolded *= size;
        }
        bytes += product * (i == 0 && width < 4 ? 4 : element_width(type));
    }
    return bytes + width * unfolded + 16 * (int64_t)MIB;
}

/* The bytes of a sum's operand in half precision, if the sum adds up heads; otherwise 0. */
static int64_t whole_heads(const Descriptor *reduction) {
    const int64_t *sizes[2];
    for (int i = 0; i < 2; i++) {
        const Attribute *operand = attribute_of(reduction, i ? REDUCTION_OUTPUT : REDUCTION_INPUT);
        const Attribute *kept = operand ? attribute_of(*(Descriptor **)operand->values, TENSOR_SIZES) : NULL;
        if (!kept || kept->count != 4) return 0;
        sizes[i] = kept->values;
    }
    const int64_t *of = sizes[0], *to = sizes[1];
    return of[0] == to[0] && of[1] > to[1] && of[2] == to[2] && of[3] == to[3] ? 2 * of[0] * of[1] * of[2] * of[3] : 0;
}

/* The bytes that attention's plans needed on an H100 (cuDNN 9.19) in addition to the front end's workspaces: 256 bytes in each of
   17 cases, and in backward also the gradients of keys and values for all heads, if heads share keys and values. Other GPUs were
   not measured, so nothing is added there. */
static int64_t workspace_of_attention(const Descriptor *plan) { return gpumem_gpu.major == 9 ? 256 + plan->whole_heads : 0; }

int cudnnBackendFinalize(Descriptor *descriptor) {
    int is = descriptor->type;
    if (is == REDUCTION) descriptor->whole_heads = whole_heads(descriptor);
    if (is >= FIRST_CONVOLUTION && is <= LAST_CONVOLUTION) descriptor->most = most_workspace(descriptor);
    return descriptor->convolution && gpumem_cudnn_release() ? gpumem_really_finalize(descriptor) : 0;
}
int cudnnBackendExecute(void *handle, Descriptor *plan, Descriptor *pack) {
    if (plan->convolution) __atomic_add_fetch(&convolutions, 1, __ATOMIC_RELAXED);
    int64_t most = __atomic_load_n(&gpumem_most_workspace, __ATOMIC_RELAXED);
    while (plan->most > most
           && !__atomic_compare_exchange_n(&gpumem_most_workspace, &most, plan->most, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {}
    if (unplanned && plan->convolution && !plan->real) unplanned(plan->most);
    gpumem_launched("cudnnBackendExecute");
    return 0;
}

static void made_of(Descriptor *descriptor, const Descriptor *part) {
    if (descriptor->type == GRAPH) descriptor->whole_heads += part->whole_heads;
    else if (part->whole_heads > descriptor->whole_heads) descriptor->whole_heads = part->whole_heads;
    descriptor->convolution |= part->convolution;
    if (part->most > descriptor->most) descriptor->most = part->most;
}

/* The descriptor keeps the attribute, and the attribute keeps the descriptors to which it refers. */
int cudnnBackendSetAttribute(Descriptor *descriptor, int name, int type, int64_t count, const void *values) {
    size_t bytes = (size_t)count * gpumem_cudnn_width(type);
    Attribute *kept = attribute_of(descriptor, name);
    if (!kept) {
        Attribute **end = &descriptor->attributes;
        while (*end) end = &(*end)->next;
        *end = kept = calloc(1, sizeof *kept);
    }
    if (type == DESCRIPTOR)
        for (int64_t i = 0; i < count; i++) {
            Descriptor *one = ((Descriptor *const *)values)[i];
            if (!one) continue;
            __atomic_add_fetch(&one->holders, 1, __ATOMIC_RELAXED);
            made_of(descriptor, one);
        }
    forget_values(kept);
    *kept = (Attribute){name, type, count, malloc(bytes + 1), kept->next};
    memcpy(kept->values, values, bytes);
    return 0;
}
int cudnnBackendGetAttribute(Descriptor *descriptor, int name, int type, int64_t wanted, int64_t *found, void *values) {
    if (type == DESCRIPTOR && values)
        for (int64_t i = 0; i < wanted; i++) made_of(((Descriptor **)values)[i], descriptor);
    if (descriptor->real) return gpumem_really_get(descriptor, name, type, wanted, found, values);
    int64_t unasked;
    if (!found) found = &unasked;
    *found = 1;
    int is = descriptor->type;
    if (is == HEURISTICS && name == HEURISTICS_RESULTS) return 0;
    if (is == ENGINE_CONFIG && name == CONFIG_ENGINE) return 0;
    if ((is == ENGINE_CONFIG && name == CONFIG_WORKSPACE) || (is == PLAN && name == PLAN_WORKSPACE)) {
        if (wanted) *(int64_t *)values = descriptor->convolution ? 0 : workspace_of_attention(descriptor);
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
    const Attribute *kept = attribute_of(descriptor, name);
    if (kept) {
        *found = kept->count;
        if (values) memcpy(values, kept->values, (size_t)(wanted < kept->count ? wanted : kept->count) * gpumem_cudnn_width(type));
        return 0;
    }
    if (is == ENGINE && type == INT64 && wanted) *(int64_t *)values = 0;
    else *found = 0;
    return 0;
}

/* cuDNN's older interface. Its descriptors are empty. */
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
const char *cudnnGetErrorString(int status) {
    if (!status) return "CUDNN_STATUS_SUCCESS";
    return status == NOT_SUPPORTED && *gpumem_last_lacking() ? gpumem_last_lacking() : "CUDNN_STATUS_NOT_SUPPORTED (emulated GPU)";
}
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
DESCRIPTOR(RNN)
DESCRIPTOR(RNNData)
DESCRIPTOR(SpatialTransformer)

#define ACCEPTED(name) int cudnn##name(void) { return 0; }
ACCEPTED(SetFilterNdDescriptor)
ACCEPTED(SetConvolutionNdDescriptor)
ACCEPTED(SetConvolutionGroupCount)
ACCEPTED(SetConvolutionMathType)
ACCEPTED(SetActivationDescriptor)
ACCEPTED(SetDropoutDescriptor)
ACCEPTED(RestoreDropoutDescriptor)
ACCEPTED(SetPooling2dDescriptor)
ACCEPTED(SetSpatialTransformerNdDescriptor)

int cudnnSetTensorNdDescriptor(Shape *shape, int type, int rank, const int *sizes, const int *strides) {
    if (rank > MOST_DIMENSIONS) return 2000; /* bad parameter */
    *shape = (Shape){type, rank};
    memcpy(shape->sizes, sizes, (size_t)rank * sizeof *sizes);
    memcpy(shape->strides, strides, (size_t)rank * sizeof *strides);
    return 0;
}
int cudnnGetTensorNdDescriptor(const Shape *shape, int most, int *type, int *rank, int *sizes, int *strides) {
    int known = shape->rank < most ? shape->rank : most;
    *type = shape->type;
    *rank = shape->rank;
    memcpy(sizes, shape->sizes, (size_t)known * sizeof *sizes);
    memcpy(strides, shape->strides, (size_t)known * sizeof *strides);
    return 0;
}

#define LAUNCHED(name) int cudnn##name(void) { gpumem_launched("cudnn" #name); return 0; }
LAUNCHED(PoolingForward)
LAUNCHED(BatchNormalizationForwardTrainingEx)
LAUNCHED(BatchNormalizationBackwardEx)
LAUNCHED(BatchNormalizationForwardInference)
LAUNCHED(SpatialTfGridGeneratorForward)
LAUNCHED(SpatialTfGridGeneratorBackward)
LAUNCHED(SpatialTfSamplerForward)
LAUNCHED(SpatialTfSamplerBackward)

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
/* The size on a real GPU is not known. The result is 8 bytes for each of the GPU's threads. */
int cudnnDropoutGetStatesSize(void *handle, size_t *bytes) {
    *bytes = (size_t)gpumem_gpu.multiprocessors * (size_t)gpumem_gpu.threads_per_multiprocessor * 8;
    return 0;
}
