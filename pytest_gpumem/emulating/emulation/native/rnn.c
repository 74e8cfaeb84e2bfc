/* cuDNN's recurrent layers. The addresses of their parameters follow from the parameters' shapes. Only the real cuDNN knows the
   sizes of their buffers, and needs a GPU to compute them. So the bytes kept for backward follow a rule that was found on an
   H100, and workspaces are lower bounds for the sizes on an H100. */
#include <stdint.h>
#include <string.h>

#include "cudnn_store.h"
#include "emulated.h"

/* cudnnRNNMode_t, cudnnRNNBiasMode_t, cudnnForwardMode_t, cudnnRNNDataLayout_t */
enum { LSTM = 2, GRU = 3, NO_BIAS = 0, DOUBLE_BIAS = 2, TRAINING = 1, PACKED = 1 };

typedef struct { int mode, bias, directions, type, input, hidden, projected, layers; } Rnn;
typedef struct { int64_t tokens; } Sequences; /* in all samples together, without padding if the samples are packed */

static long layers_run;
static int64_t most_kept;
/* The number of forward and backward passes of recurrent layers, and the most bytes that one pass has kept for backward. */
long gpumem_recurrent(void) { return __atomic_load_n(&layers_run, __ATOMIC_RELAXED); }
void gpumem_tell_most_kept(int64_t *bytes) { *bytes = __atomic_load_n(&most_kept, __ATOMIC_RELAXED); }

static int64_t bytes_of(int type) { return type == 1 ? 8 : type == 0 ? 4 : 2; } /* double; float; float16 and bfloat16 */
static int gates_of(const Rnn *rnn) { return rnn->mode == LSTM ? 4 : rnn->mode == GRU ? 3 : 1; }

int cudnnSetRNNDescriptor_v8(
    Rnn *rnn, int algorithm, int mode, int bias, int direction, int input_mode, int type, int precision, int math, int input,
    int hidden, int projected, int layers, void *dropout, unsigned flags
) {
    *rnn = (Rnn){mode, bias, direction ? 2 : 1, type, input, hidden, projected, layers};
    return 0;
}
int cudnnSetRNNDataDescriptor(
    Sequences *sequences, int type, int layout, int longest, int batch, int width, const int *lengths, void *padding
) {
    sequences->tokens = (int64_t)longest * batch;
    if (layout != PACKED) return 0;
    sequences->tokens = 0;
    for (int i = 0; i < batch; i++) sequences->tokens += lengths[i];
    return 0;
}

/* The numbers of elements in a layer's matrices: each gate has a matrix for the input and one for the state, and the layer has a
   projection. */
typedef struct { int64_t input, state, projection; } Matrices;
static Matrices matrices_of(const Rnn *rnn, int pseudo_layer) {
    int64_t hidden = rnn->hidden, output = rnn->projected;
    int first = pseudo_layer < rnn->directions;
    return (Matrices){
        hidden * (first ? rnn->input : output * rnn->directions), hidden * output, output == hidden ? 0 : hidden * output,
    };
}
static int64_t elements_of(const Rnn *rnn, int pseudo_layer) {
    Matrices m = matrices_of(rnn, pseudo_layer);
    return gates_of(rnn) * (m.input + m.state) + m.projection;
}
static int64_t biases_of(const Rnn *rnn) { /* in one layer and direction */
    int vectors = rnn->bias == NO_BIAS ? 0 : rnn->bias == DOUBLE_BIAS ? 2 : 1;
    return (int64_t)vectors * gates_of(rnn) * rnn->hidden;
}

int cudnnGetRNNWeightSpaceSize(void *handle, const Rnn *rnn, size_t *bytes) {
    int64_t elements = 0;
    for (int layer = 0; layer < rnn->layers * rnn->directions; layer++) elements += elements_of(rnn, layer) + biases_of(rnn);
    *bytes = (size_t)(elements * bytes_of(rnn->type));
    return 0;
}

/* All matrices come first, layer by layer, and then all biases. In a layer, the parameters for the input come first, one for each
   gate, then those for the state, and the projection last. */
int cudnnGetRNNWeightParams(
    void *handle, const Rnn *rnn, int layer, size_t bytes, char *space, int number, Shape *matrix, char **at_matrix, Shape *bias,
    char **at_bias
) {
    int gates = gates_of(rnn);
    int64_t width = bytes_of(rnn->type), before = 0, all = 0;
    Matrices m = matrices_of(rnn, layer);
    for (int one = 0; one < rnn->layers * rnn->directions; one++) {
        if (one < layer) before += elements_of(rnn, one);
        all += elements_of(rnn, one);
    }
    int is_projection = number == 2 * gates, of_input = number < gates;
    if (number < 0 || number > 2 * gates || (is_projection && !m.projection)) {
        if (matrix) *matrix = (Shape){rnn->type};
        if (at_matrix) *at_matrix = NULL;
        if (at_bias) *at_bias = NULL;
        return 0;
    }
    int64_t within = of_input ? number * m.input : gates * m.input + (int64_t)(number - gates) * m.state;
    int64_t elements = is_projection ? m.projection : of_input ? m.input : m.state;
    int rows = is_projection ? rnn->projected : rnn->hidden;
    if (matrix) *matrix = (Shape){rnn->type, 3, {1, rows, (int)(elements / rows)}, {(int)elements, (int)(elements / rows), 1}};
    if (at_matrix) *at_matrix = space + (before + within) * width;
    int has_bias = !is_projection && biases_of(rnn) > 0 && (of_input || rnn->bias == DOUBLE_BIAS);
    if (bias) *bias = has_bias ? (Shape){rnn->type, 3, {1, rnn->hidden, 1}, {rnn->hidden, 1, 1}} : (Shape){rnn->type};
    if (at_bias) *at_bias = has_bias ? space + (all + layer * biases_of(rnn) + (int64_t)number * rnn->hidden) * width : NULL;
    return 0;
}

/* The bytes kept for backward: for each unit and token in each layer, 5 values in an LSTM (its gates and its cell's state), 6 in a
   GRU and 1 in a plain RNN; the output that each layer except the last passes to the next layer; and 256 bytes. This rule is
   correct for 462 of 462 layers on an H100 (cuDNN 9.19, one and two layers and directions, 1 to 8,192 tokens, float32 and
   float16). It also agrees with the two layers in github.com/pytorch/pytorch/issues/2895 (a P100, 2017), whose figures are
   rounded, so they do not show the 256 bytes.
   The workspace: on the H100 it had at least 8 MiB for each layer and direction, all matrices, and 3 values for each unit and
   token in each direction. In the median, this lower bound is 3 % below the real size. It is much lower if a kernel keeps the
   weights of a layer with few units. */
static const int64_t KEPT_BESIDE = 256, OF_A_LAYER = 8 << 20;

int cudnnGetRNNTempSpaceSizes(
    void *handle, const Rnn *rnn, int mode, const Sequences *sequences, size_t *workspace, size_t *kept
) {
    int64_t values = rnn->mode == LSTM ? 5 : rnn->mode == GRU ? 6 : 1, width = bytes_of(rnn->type), matrices = 0;
    int64_t tokens = sequences->tokens * rnn->directions, layers = rnn->layers * rnn->directions;
    int64_t a_token = rnn->layers * values * rnn->hidden + (int64_t)(rnn->layers - 1) * rnn->projected;
    for (int layer = 0; layer < layers; layer++) matrices += elements_of(rnn, layer);
    int64_t least = layers * OF_A_LAYER + (matrices + 3 * tokens * rnn->hidden) * width;
    if (workspace) *workspace = gpumem_gpu.major == 9 ? (size_t)least : 0; /* other GPUs were not measured */
    if (!kept) return 0;
    *kept = mode == TRAINING ? (size_t)(tokens * a_token * width + KEPT_BESIDE) : 0;
    int64_t most = __atomic_load_n(&most_kept, __ATOMIC_RELAXED);
    while ((int64_t)*kept > most
           && !__atomic_compare_exchange_n(&most_kept, &most, (int64_t)*kept, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {}
    return 0;
}

#define RUN(name) \
    int name(void) { \
        __atomic_add_fetch(&layers_run, 1, __ATOMIC_RELAXED); \
        gpumem_launched(#name); \
        return 0; \
    }
RUN(cudnnRNNForward)
RUN(cudnnRNNBackwardData_v8)
RUN(cudnnRNNBackwardWeights_v8)
