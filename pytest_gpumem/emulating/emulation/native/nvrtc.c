/* NVRTC, with which torch compiles some of its own kernels while a program runs (for example erfinv). Kernels do nothing, so
   nothing is compiled. */
#include <stdlib.h>
#include <string.h>

#include "emulated.h"

enum { OUT_OF_MEMORY = 1, INVALID_INPUT = 3, NAME_NOT_VALID = 10 };

typedef struct Name {
    char *text;
    struct Name *next;
} Name;
typedef struct { Name *names; } Program;

int nvrtcVersion(int *major, int *minor) {
    *major = CUDA_VERSION / 1000;
    *minor = CUDA_VERSION % 1000 / 10;
    return 0;
}
int nvrtcCreateProgram(
    Program **made, const char *source, const char *name, int header_count, const char *const *headers,
    const char *const *header_names
) {
    *made = calloc(1, sizeof **made);
    return *made ? 0 : OUT_OF_MEMORY;
}
int nvrtcDestroyProgram(Program **program) {
    if (!program || !*program) return INVALID_INPUT;
    for (Name *one = (*program)->names; one;) {
        Name *next = one->next;
        free(one->text);
        free(one);
        one = next;
    }
    free(*program);
    *program = NULL;
    return 0;
}
int nvrtcCompileProgram(Program *program, int count, const char *const *options) { return 0; }
int nvrtcAddNameExpression(Program *program, const char *name) {
    Name *made = malloc(sizeof *made);
    if (!made) return OUT_OF_MEMORY;
    *made = (Name){strdup(name), program->names};
    program->names = made;
    return 0;
}
/* A kernel keeps its name from the source, and is counted under this name. */
int nvrtcGetLoweredName(Program *program, const char *name, const char **lowered) {
    for (Name *one = program->names; one; one = one->next)
        if (!strcmp(one->text, name)) {
            *lowered = one->text;
            return 0;
        }
    return NAME_NOT_VALID;
}
/* The compiled code and the log are empty texts. */
#define TEXT(what) \
    int nvrtcGet##what##Size(Program *program, size_t *bytes) { *bytes = 1; return 0; } \
    int nvrtcGet##what(Program *program, char *text) { *text = 0; return 0; }
TEXT(PTX)
TEXT(CUBIN)
TEXT(ProgramLog)
