/* CUPTI. These functions report to the profiler that nothing can be traced. kernels.c counts kernel launches. */
#include <stddef.h>
#include <stdint.h>

enum { NOT_INITIALIZED = 15 };

int cuptiGetResultString(int result, const char **text) { *text = "the emulated GPU traces nothing"; return 0; }
int cuptiGetVersion(uint32_t *version) { *version = 0; return NOT_INITIALIZED; }
int cuptiSubscribe(void) { return NOT_INITIALIZED; }
