/* Hides the dispatch mode that computes values (emulating/host_values/mode.py) from torch's operators, because a program on a real
   GPU has no such mode.

   Composite operators and derivatives check whether a dispatch mode is active (`isTensorSubclassLike` in ATen). If there is a
   mode, they do not write to tensors in place, and need more memory. The check calls a function in libc10. The stand-ins are
   loaded before libc10 and with global symbols, so torch finds the function with this name here first. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <link.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

static int64_t hidden;
static uintptr_t first, last; /* addresses of the code in libtorch_cpu, which has the operators but not Python's bindings */

static int is_operators_library(struct dl_phdr_info *library, size_t size, void *unused) {
    if (!strstr(library->dlpi_name, "libtorch_cpu.")) return 0;
    for (int i = 0; i < library->dlpi_phnum; i++) {
        const ElfW(Phdr) *part = &library->dlpi_phdr[i];
        if (part->p_type != PT_LOAD || !(part->p_flags & PF_X)) continue;
        first = library->dlpi_addr + part->p_vaddr;
        last = first + part->p_memsz;
    }
    return 1;
}

/* From now on, operators see dispatch modes only if there is more than one in a thread. */
void gpumem_hide_a_mode(void) {
    dl_iterate_phdr(is_operators_library, NULL);
    hidden = 1;
}

/* c10::impl::dispatch_mode_enabled() */
bool _ZN3c104impl21dispatch_mode_enabledEv(void) {
    static int64_t (*active)(void); /* c10::impl::TorchDispatchModeTLS::stack_len() */
    uintptr_t caller = (uintptr_t)__builtin_return_address(0);
    if (!active) {
        void *c10 = dlopen("libc10.so", RTLD_LAZY | RTLD_NOLOAD);
        active = c10 ? (int64_t (*)(void))dlsym(c10, "_ZN3c104impl20TorchDispatchModeTLS9stack_lenEv") : NULL;
        if (!active) abort();
    }
    return active() > (caller >= first && caller < last ? hidden : 0);
}
