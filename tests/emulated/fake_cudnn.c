/* A cuDNN that knows two engines for any graph: the first cannot be planned, and the second takes `WORKSPACE` bytes. It refuses what a
   library without a GPU would refuse: a handle, and heuristics and plans of no GPU. */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#ifndef WORKSPACE
#define WORKSPACE 4096
#endif
enum { CONFIG = 3, HEURISTICS = 4, PLAN = 5, DEVICE = 38 };
typedef struct Descriptor { int type, number, has_device, is_good; } Descriptor;

size_t cudnnGetVersion(void) { return 92000; }
int cudnnBackendCreateDescriptor(int type, Descriptor **made) {
#ifdef TOO_OLD
    if (type == DEVICE) return 2012;
#endif
    *made = calloc(1, sizeof **made);
    (*made)->type = type;
    return 0;
}
int cudnnBackendDestroyDescriptor(Descriptor *descriptor) { free(descriptor); return 0; }
int cudnnBackendSetAttribute(Descriptor *descriptor, int name, int type, int64_t count, const void *values) {
    if (type == 0) return 2000;
    if (name == 204 || name == 407) descriptor->has_device = (*(Descriptor *const *)values)->type == DEVICE;
    if (name == 401) descriptor->number = (*(Descriptor *const *)values)->number;
    if (name == 201 || name == 401) descriptor->is_good = (*(Descriptor *const *)values)->is_good;
    return 0;
}
int cudnnBackendFinalize(Descriptor *descriptor) {
#ifdef CRASHES
    if (descriptor->type == PLAN) __builtin_trap();
#endif
    if (descriptor->type == PLAN || descriptor->type == HEURISTICS) {
        if (!descriptor->has_device || !descriptor->is_good) return 2000;
    }
    descriptor->is_good = 1;
    return descriptor->type == PLAN && descriptor->number == 0 ? 3000 : 0;
}
int cudnnBackendGetAttribute(Descriptor *descriptor, int name, int type, int64_t wanted, int64_t *found, void *values) {
    int64_t unasked;
    if (!found) found = &unasked;
    *found = 0;
    if (descriptor->type == HEURISTICS && name == 202) {
        *found = values && wanted < 2 ? wanted : 2;
        for (int64_t i = 0; values && i < wanted; i++) {
            ((Descriptor **)values)[i]->number = (int)i;
            ((Descriptor **)values)[i]->is_good = 1;
        }
    } else if (descriptor->type == CONFIG && name == 300) {
        *found = 1;
    } else if (type == 3 && wanted) { /* a number: the plan's workspace, or the engine's */
        *found = 1;
        *(int64_t *)values = descriptor->type == PLAN && name == 402 ? WORKSPACE : 0;
    }
    return 0;
}
