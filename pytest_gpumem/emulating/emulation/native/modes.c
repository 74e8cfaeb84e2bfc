/* torch's operators are not told of the mode that computes values (emulating/host_values/mode.py), which no program on a real GPU has.

   Operators that are made of others, and derivatives, ask whether any dispatch mode is active, and then write to no tensor in
   place, which takes more memory (`isTensorSubclassLike` in ATen). A function of libc10 answers. torch finds this one first, as
   the stand-ins are loaded before it, with symbols for all. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <link.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

static int64_t hidden;
static uintptr_t first, last; /* where libtorch_cpu's code lies, which has the operators; Python's bindings are in another */

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

/* From now on operators count a thread's dispatch modes only if there are more than one. */
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
