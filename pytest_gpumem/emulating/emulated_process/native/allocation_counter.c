/* Counts torch's allocations on the CPU and on CUDA devices, in all threads of a process.

   torch's allocator for the CPU is in libc10.so. It gets each block from `posix_memalign`, and frees it by `free`. `counter_install`
   puts the functions here in their place, in libc10.so's table of other libraries' functions (the global offset table). Other
   libraries keep the original functions. A freed block counts only if its allocation was counted.

   torch's allocator for CUDA is in libc10_cuda.so. It reports each allocation and each free to torch's profiler by a function in
   libc10.so. `cuda_install` puts a function here in its place, which then calls torch's function. The allocator for the CPU reports
   to the same function, but only while a profiler records the thread. `profiled_install` replaces it there as well.

   Several processes may share a file with the bytes that each of them holds now, on each device (`struct shared`). So the highest
   sum over all processes is known, also if nobody looks when it is reached.

   While it records, each allocation gets its call stack and autograd's running node, and each new node its call stack. A node asks
   torch for its number by a function in libtorch_cpu.so. `counter_watch_nodes` puts a function here in its place in each library.
   `counter_watch_tensors` does the same with the two functions that allocate the memory of a new tensor, so an allocation within
   them also gets the tensor's dtype and shape.

   A thread with `lock` never waits for Python's lock: Python is called after `lock` is released. Call stacks are read without
   running Python code, because Python would call the program's signal handlers, and their exceptions would be lost. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <elf.h>
#include <fcntl.h>
#if __has_include(<execinfo.h>)
#include <execinfo.h>
#else
#define backtrace(addresses, most) 0
#endif
#include <link.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#if defined(__x86_64__)
#define JUMP_SLOT R_X86_64_JUMP_SLOT
#define GLOB_DAT R_X86_64_GLOB_DAT
#elif defined(__aarch64__)
#define JUMP_SLOT R_AARCH64_JUMP_SLOT
#define GLOB_DAT R_AARCH64_GLOB_DAT
#else
#error "the processor is not known"
#endif

struct block {
    uintptr_t address; /* 0 for a free place */
    int64_t bytes;
};

/* A running Python function: its code object, and the line. */
struct frame {
    void *code;
    int64_t line;
};

/* A node in autograd's graph: the thread that created it, and its number in this thread. 0, 0 for no node. A running node has its
   C++ class, and a `torch.autograd.Function` the name of its Python class. */
struct node {
    uint64_t thread, number;
    void *class;
    const char *name;
};

/* A new tensor: torch's number for its dtype, and its sizes. Without a tensor, the number is -1. */
struct shape {
    int64_t dtype;
    size_t dims;
    const int64_t *sizes;
};

/* An entry in the history. An allocation has the thread's note, the node that runs, and the call stack, innermost first. A node's
   creation has a note, the node, and the Python frames. Its address is 1 if another node creates it in backward. The begin of a
   backward pass has a note, the Python frames, and the pass's number as address, and its end has this number. */
struct event {
    uintptr_t address;
    int64_t bytes, kind, device, note;
    struct node node;
    int64_t depth, native_depth;
    struct frame *frames;
    void **native;  /* return addresses; they follow the frames in memory */
    int64_t *shape; /* of the new tensor: the dtype, the number of dimensions, and the sizes; NULL if it is unknown */
};

#define FREED 0
#define ALLOCATED 1
#define CREATED_NODE 2
#define BEGAN_BACKWARD 3
#define ENDED_BACKWARD 4

/* Functions of Python, by which a thread without Python's lock calls Python, keeps an exception that it is raising, and reads
   frames. */
struct python {
    int (*ensure)(void);
    void (*release)(int);
    void (*fetch)(void **, void **, void **);
    void (*restore)(void *, void *, void *);
    void *(*frame)(void);
    void *(*outer_frame)(void *);
    void *(*code)(void *);
    int (*line)(void *);
    void (*increase)(void *);
    void (*decrease)(void *);
};

#define MOST_FRAMES 64
#define MOST_DEVICES 64
#define MOST_PROCESSES 512
#define MOST_NATIVE_FRAMES 128
#define MOST_NAMES 1024

/* A process's place in the file. */
struct process {
    int64_t owner; /* 0 for a free place */
    int64_t live[MOST_DEVICES];
};

/* The file, by the devices' indices in the machine. Only atomic operations change it. */
struct shared {
    int64_t sum[MOST_DEVICES], highest[MOST_DEVICES]; /* `highest`: of `sum`, since the last `shared_restart` */
    struct process processes[MOST_PROCESSES];
};

/* Functions of torch, the class of nodes that are written in Python, and the places of fields in bytes. */
struct autograd {
    struct reference {
        char *node, *owner, *unused; /* with more than two pointers, C and C++ return it in the same way */
    } (*current_node)(void);
    uint64_t (*thread)(void);
    uint64_t (*next_number)(void);
    void *python_class;
    int64_t number_at, thread_at, is_counted_in_node; /* in a node */
    int64_t object_at;                                /* in a node in Python: the Python object */
    int64_t type_at, name_at;                         /* in a Python object, and in its type */
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct block *blocks;
static size_t places, used; /* `places` is a power of two */
static int64_t live, peak, allocations;

static struct event *events;
static size_t event_count, event_places, most_events;
static int is_recording, is_cut; /* `is_cut`: the history had no room for an entry */
static int64_t recording;        /* the number of recordings so far */

static struct python python;
static struct autograd autograd;
static int may_call_python;
static void (*at_begin)(void); /* called after the first allocation */
static int has_begun;
static __thread int is_calling;
static __thread int64_t current_note;
static __thread struct shape new_shape = {-1, 0, NULL}; /* of the tensor for which the thread is about to allocate memory */
static __thread int64_t *test_shape; /* room for the dtype and two sizes of a tensor in a test, or NULL */
static int trusts_shapes;            /* tests have shown correct dtypes and shapes */

/* Where published bytes come from: all allocations on the CPU, CUDA's allocator, or the allocations on the CPU in threads that a
   profiler records. */
enum source { COUNTED, CUDA, PROFILED };

/* A file in which this process publishes its bytes. */
struct publication {
    struct shared *table;
    struct process *process; /* NULL if nothing is published */
    enum source source;
    int32_t in_machine[MOST_DEVICES]; /* the devices' indices in the machine; -1 for a device that is not published */
};

/* This process's test has the first file. If this process runs tests itself, they have the second file. */
static struct publication publications[2];
static int pauses; /* in the second publication */

static void raise_to(int64_t *highest, int64_t bytes) {
    int64_t before = __atomic_load_n(highest, __ATOMIC_SEQ_CST);
    while (before < bytes &&
           !__atomic_compare_exchange_n(highest, &before, bytes, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
    }
}

/* Only a process itself changes its bytes. If it is killed meanwhile, `sum` is too high, and never too low. */
static void set_live(struct shared *table, struct process *process, int device, int64_t bytes) {
    int64_t change = bytes - process->live[device];
    if (change > 0)
        raise_to(&table->highest[device], __atomic_add_fetch(&table->sum[device], change, __ATOMIC_SEQ_CST));
    __atomic_store_n(&process->live[device], bytes, __ATOMIC_SEQ_CST);
    if (change < 0)
        __atomic_add_fetch(&table->sum[device], change, __ATOMIC_SEQ_CST);
}

/* Publish the bytes in a device's tensors. The caller has `lock`. */
static void publish(enum source source, int device, int64_t bytes) {
    for (struct publication *one = publications; one < publications + 2; one++)
        if (one->process && one->source == source && one->in_machine[device] >= 0 && !(pauses && one == publications + 1))
            set_live(one->table, one->process, one->in_machine[device], bytes);
}

static size_t place_of(uintptr_t address) {
    return (size_t)((address >> 4) * UINT64_C(0x9E3779B97F4A7C15) >> 20) & (places - 1);
}

static void put(uintptr_t address, int64_t bytes) {
    size_t place = place_of(address);
    while (blocks[place].address && blocks[place].address != address)
        place = (place + 1) & (places - 1);
    if (!blocks[place].address)
        used++;
    else
        live -= blocks[place].bytes; /* freed by a function that does not count */
    blocks[place] = (struct block){address, bytes};
}

static int grow(void) {
    struct block *old = blocks;
    size_t old_places = places, new_places = places ? places * 2 : 1024;
    struct block *larger = calloc(new_places, sizeof *larger);
    if (!larger)
        return 0;
    blocks = larger;
    places = new_places;
    used = 0;
    for (size_t place = 0; place < old_places; place++)
        if (old[place].address)
            put(old[place].address, old[place].bytes);
    free(old);
    return 1;
}

/* Remove a block, and move later blocks with the same hash towards their place. Return its bytes, or -1 for an unknown block. */
static int64_t take(uintptr_t address) {
    if (!places)
        return -1;
    size_t place = place_of(address), next;
    while (blocks[place].address != address) {
        if (!blocks[place].address)
            return -1;
        place = (place + 1) & (places - 1);
    }
    int64_t bytes = blocks[place].bytes;
    used--;
    for (next = (place + 1) & (places - 1); blocks[next].address; next = (next + 1) & (places - 1)) {
        size_t first = place_of(blocks[next].address);
        if (((next - first) & (places - 1)) >= ((next - place) & (places - 1))) {
            blocks[place] = blocks[next];
            place = next;
        }
    }
    blocks[place].address = 0;
    return bytes;
}

/* Return a copy of a name that stays, or NULL. There are as many names as classes. */
static const char *kept_name(const char *name) {
    static char *names[MOST_NAMES];
    size_t index = 0;
    pthread_mutex_lock(&lock);
    while (index < MOST_NAMES && names[index] && strcmp(names[index], name))
        index++;
    if (index < MOST_NAMES && !names[index])
        names[index] = strdup(name);
    const char *kept = index < MOST_NAMES ? names[index] : NULL;
    pthread_mutex_unlock(&lock);
    return kept;
}

static void *pointer_at(const void *object, int64_t place) {
    void *pointer;
    memcpy(&pointer, (const char *)object + place, sizeof pointer);
    return pointer;
}

/* Return the node that this thread runs in backward. The node and its Python object stay while it runs. */
static struct node running_node(void) {
    struct node node = {0, 0, NULL, NULL};
    if (!autograd.current_node || !__atomic_load_n(&is_recording, __ATOMIC_RELAXED))
        return node;
    struct reference found = autograd.current_node();
    if (!found.node)
        return node;
    memcpy(&node.number, found.node + autograd.number_at, sizeof node.number);
    memcpy(&node.thread, found.node + autograd.thread_at, sizeof node.thread);
    node.class = pointer_at(found.node, 0);
    void *object = node.class == autograd.python_class ? pointer_at(found.node, autograd.object_at) : NULL;
    if (object)
        node.name = kept_name(pointer_at(pointer_at(object, autograd.type_at), autograd.name_at));
    /* Give back the reference. It is not the last one, because this thread runs the node. Both kinds of owners count at 8. */
    __atomic_fetch_sub((int32_t *)((autograd.is_counted_in_node ? found.node : found.owner) + 8), 1, __ATOMIC_ACQ_REL);
    return node;
}

/* Return the entry's index in the history, or SIZE_MAX. */
static size_t note(uintptr_t address, int64_t bytes, int64_t kind, int64_t device, struct node node) {
    if (!is_recording)
        return SIZE_MAX;
    if (event_count == event_places) {
        size_t more = event_places ? event_places * 2 : 4096;
        struct event *larger = event_count < most_events ? realloc(events, more * sizeof *larger) : NULL;
        if (!larger) {
            is_cut = 1;
            return SIZE_MAX;
        }
        events = larger;
        event_places = more;
    }
    int64_t *shape = kind == ALLOCATED && new_shape.dtype >= 0 ? malloc((2 + new_shape.dims) * sizeof *shape) : NULL;
    if (shape) {
        shape[0] = new_shape.dtype;
        shape[1] = (int64_t)new_shape.dims;
        if (new_shape.dims)
            memcpy(shape + 2, new_shape.sizes, new_shape.dims * sizeof *shape);
    }
    events[event_count] = (struct event){address, bytes, kind, device, current_note, node, 0, 0, NULL, NULL, shape};
    return event_count++;
}

/* Read the calling thread's Python frames, innermost first. A thread that runs no Python code has none. */
static int64_t read_frames(struct frame found[MOST_FRAMES]) {
    int64_t depth = 0;
    void *frame = python.frame();
    if (frame)
        python.increase(frame);
    while (frame && depth < MOST_FRAMES) {
        void *outer = python.outer_frame(frame);
        found[depth++] = (struct frame){python.code(frame), python.line(frame)};
        python.decrease(frame);
        frame = outer;
    }
    if (frame)
        python.decrease(frame);
    return depth;
}

/* Note the calling thread's call stack in an entry of the history. */
static void note_stack(size_t index, int64_t in_recording, void *const *native, int64_t native_depth) {
    struct frame found[MOST_FRAMES];
    int64_t depth = read_frames(found);
    size_t bytes = (size_t)depth * sizeof *found, native_bytes = (size_t)native_depth * sizeof *native;
    char *stack = bytes + native_bytes ? malloc(bytes + native_bytes) : NULL;
    pthread_mutex_lock(&lock);
    int is_kept = stack && is_recording && recording == in_recording;
    if (is_kept) {
        struct event *event = &events[index];
        event->frames = (struct frame *)stack;
        event->native = (void **)(stack + bytes);
        memcpy(event->frames, found, bytes);
        memcpy(event->native, native, native_bytes);
        event->depth = depth;
        event->native_depth = native_depth;
    }
    pthread_mutex_unlock(&lock);
    if (!is_kept) {
        free(stack);
        while (depth)
            python.decrease(found[--depth].code);
    }
}

static void call_python(void (*begin)(void), size_t index, int64_t in_recording, int has_native) {
    void *type, *value, *traceback, *native[MOST_NATIVE_FRAMES];
    if (is_calling || !__atomic_load_n(&may_call_python, __ATOMIC_ACQUIRE))
        return;
    is_calling = 1;
    int64_t native_depth = has_native && index != SIZE_MAX ? backtrace(native, MOST_NATIVE_FRAMES) : 0;
    int state = python.ensure();
    python.fetch(&type, &value, &traceback);
    if (begin)
        begin();
    if (index != SIZE_MAX)
        note_stack(index, in_recording, native, native_depth);
    python.restore(type, value, traceback);
    python.release(state);
    is_calling = 0;
}

static int counted_memalign(void **result, size_t alignment, size_t bytes) {
    int error = posix_memalign(result, alignment, bytes);
    if (error)
        return error;
    void (*begin)(void) = NULL;
    struct node node = running_node();
    pthread_mutex_lock(&lock);
    if (used * 2 < places || grow()) {
        put((uintptr_t)*result, (int64_t)bytes);
        live += (int64_t)bytes;
        peak = live > peak ? live : peak;
        publish(COUNTED, 0, live);
    }
    allocations++;
    size_t index = note((uintptr_t)*result, (int64_t)bytes, ALLOCATED, 0, node);
    int64_t in_recording = recording;
    if (!has_begun && at_begin && !is_calling) {
        begin = at_begin;
        has_begun = 1;
    }
    pthread_mutex_unlock(&lock);
    if (begin) {
        call_python(begin, SIZE_MAX, 0, 0);
        node = running_node();
        pthread_mutex_lock(&lock);
        if (index == SIZE_MAX) /* perhaps the function has begun a recording, which begins with this block */
            index = note((uintptr_t)*result, (int64_t)bytes, ALLOCATED, 0, node);
        in_recording = recording;
        pthread_mutex_unlock(&lock);
    }
    if (index != SIZE_MAX)
        call_python(NULL, index, in_recording, 1);
    return 0;
}

/* Return the number of a new node in autograd's graph. */
static uint64_t noted_number(void) {
    uint64_t number = autograd.next_number();
    if (__atomic_load_n(&is_recording, __ATOMIC_RELAXED)) {
        struct node node = {autograd.thread(), number, NULL, NULL};
        uintptr_t is_in_backward = running_node().class != NULL;
        pthread_mutex_lock(&lock);
        size_t index = note(is_in_backward, 0, CREATED_NODE, 0, node);
        int64_t in_recording = recording;
        pthread_mutex_unlock(&lock);
        if (index != SIZE_MAX)
            call_python(NULL, index, in_recording, 0);
    }
    return number;
}

#if defined(__x86_64__)
/* at::detail::empty_generic and at::detail::empty_strided_generic. In C++ they return a tensor, so the caller says where to. Small
   arguments are passed in full registers or in full words on the stack. An array is a pointer and a length. */
typedef void *(*empty)(void *, const int64_t *, size_t, void *, uint64_t, int64_t, int64_t);
typedef void *(*empty_strided)(void *, const int64_t *, size_t, const int64_t *, size_t, void *, uint64_t, int64_t);

static empty torchs_empty;
static empty_strided torchs_empty_strided;

/* Note the shape of a tensor for which memory is about to be allocated. */
static void note_shape(int64_t dtype, size_t dims, const int64_t *sizes) {
    if (test_shape && dims == 2) {
        test_shape[0] = (int8_t)dtype;
        memcpy(test_shape + 1, sizes, dims * sizeof *sizes);
    } else if (__atomic_load_n(&trusts_shapes, __ATOMIC_RELAXED))
        new_shape = (struct shape){(int8_t)dtype, dims, sizes};
}

static void restore_shape(struct shape *outer) { new_shape = *outer; }

/* Torch's function raises a C++ exception if memory runs out. Then `restore_shape` is called as well. */
static void *noted_empty(void *tensor, const int64_t *sizes, size_t dims, void *allocator, uint64_t keys, int64_t dtype,
                         int64_t format) {
    __attribute__((cleanup(restore_shape))) struct shape outer = new_shape;
    note_shape(dtype, dims, sizes);
    return torchs_empty(tensor, sizes, dims, allocator, keys, dtype, format);
}

static void *noted_empty_strided(void *tensor, const int64_t *sizes, size_t dims, const int64_t *strides, size_t stride_count,
                                 void *allocator, uint64_t keys, int64_t dtype) {
    __attribute__((cleanup(restore_shape))) struct shape outer = new_shape;
    note_shape(dtype, dims, sizes);
    return torchs_empty_strided(tensor, sizes, dims, strides, stride_count, allocator, keys, dtype);
}
#endif

static void counted_free(void *address) {
    if (address) {
        pthread_mutex_lock(&lock);
        int64_t bytes = take((uintptr_t)address);
        if (bytes >= 0) {
            live -= bytes;
            publish(COUNTED, 0, live);
            note((uintptr_t)address, bytes, FREED, 0, (struct node){0, 0, NULL, NULL});
        }
        pthread_mutex_unlock(&lock);
    }
    free(address);
}

static void forget(void) {
    if (places)
        memset(blocks, 0, places * sizeof *blocks);
    used = 0;
    live = peak = allocations = 0;
    has_begun = 0;
}

static void before_fork(void) { pthread_mutex_lock(&lock); }

static void in_parent(void) { pthread_mutex_unlock(&lock); }

/* A fork counts its own allocations. Blocks of its parent are shared with the parent until somebody writes to them. */
static void in_child(void) {
    forget();
    event_count = 0; /* its frames stay allocated, because nobody may call Python here */
    is_recording = is_calling = 0;
    publications[0].process = publications[1].process = NULL; /* the parent's */
    pauses = 0;
    pthread_mutex_unlock(&lock);
}

static void replace(uintptr_t slot, void *function, uintptr_t read_only, uintptr_t read_only_end) {
    uintptr_t page_bytes = (uintptr_t)sysconf(_SC_PAGESIZE), page = slot & ~(page_bytes - 1);
    /* The loader made only whole pages read-only. */
    int is_read_only = page >= (read_only & ~(page_bytes - 1)) && page < (read_only_end & ~(page_bytes - 1));
    if (is_read_only && mprotect((void *)page, page_bytes, PROT_READ | PROT_WRITE))
        return;
    __atomic_store_n((void **)slot, function, __ATOMIC_SEQ_CST);
    if (is_read_only)
        mprotect((void *)page, page_bytes, PROT_READ);
}

/* Functions that libraries get from other libraries, and the functions here in their place, up to an entry without a name. */
struct replacement {
    const char *library; /* "/libc10.so", or NULL for all libraries */
    const char *function;
    void *ours;
    int is_replaced;
};

static int in_library(struct dl_phdr_info *library, size_t size, void *replacements) {
    (void)size;
    const char *name = strrchr(library->dlpi_name, '/');
    struct replacement *first = replacements;
    if (!name || (first->library && strcmp(name, first->library)))
        return 0;
    uintptr_t base = library->dlpi_addr, read_only = 0, read_only_end = 0;
    const ElfW(Dyn) *dynamic = NULL;
    for (int index = 0; index < library->dlpi_phnum; index++) {
        const ElfW(Phdr) *part = &library->dlpi_phdr[index];
        if (part->p_type == PT_DYNAMIC)
            dynamic = (const ElfW(Dyn) *)(base + part->p_vaddr);
        if (part->p_type == PT_GNU_RELRO) {
            read_only = base + part->p_vaddr;
            read_only_end = read_only + part->p_memsz;
        }
    }
    uintptr_t tables[2] = {0, 0}, symbols = 0, strings = 0;
    size_t sizes[2] = {0, 0};
    for (; dynamic && dynamic->d_tag != DT_NULL; dynamic++) {
        uintptr_t value = dynamic->d_un.d_ptr, address = value < base ? base + value : value; /* musl leaves offsets */
        switch (dynamic->d_tag) {
        case DT_JMPREL: tables[0] = address; break;
        case DT_PLTRELSZ: sizes[0] = value; break;
        case DT_RELA: tables[1] = address; break;
        case DT_RELASZ: sizes[1] = value; break;
        case DT_SYMTAB: symbols = address; break;
        case DT_STRTAB: strings = address; break;
        }
    }
    for (int table = 0; table < 2 && symbols && strings; table++) {
        const ElfW(Rela) *entry = (const ElfW(Rela) *)tables[table];
        for (size_t count = tables[table] ? sizes[table] / sizeof *entry : 0; count; count--, entry++) {
            uint32_t type = ELF64_R_TYPE(entry->r_info);
            if (type != JUMP_SLOT && type != GLOB_DAT)
                continue;
            const ElfW(Sym) *symbol = (const ElfW(Sym) *)symbols + ELF64_R_SYM(entry->r_info);
            const char *function = (const char *)strings + symbol->st_name;
            for (struct replacement *one = first; one->function; one++)
                if (!strcmp(function, one->function)) {
                    replace(base + entry->r_offset, one->ours, read_only, read_only_end);
                    one->is_replaced = 1;
                }
        }
    }
    return first->library != NULL;
}

/* Return 0 if no library calls one of the functions. */
static int replace_all(struct replacement *replacements) {
    dl_iterate_phdr(in_library, replacements);
    while (replacements->function && replacements->is_replaced)
        replacements++;
    return !replacements->function;
}

/* Let forks begin without their parent's blocks and place. Return 0 if this fails. */
static int watch_forks(void) {
    static int is_watching;
    return is_watching = is_watching || !pthread_atfork(before_fork, in_parent, in_child);
}

/* Take Python's functions. Return 0 if this fails. Further calls in this process and in its forks change nothing. */
int counter_prepare(const struct python *functions) {
    static int is_prepared;
    if (is_prepared)
        return 1;
    python = *functions;
    __atomic_store_n(&may_call_python, 1, __ATOMIC_RELEASE);
    return is_prepared = watch_forks();
}

/* Begin to count on the CPU. Return 0 if libc10.so does not call these functions. Further calls change nothing. */
int counter_install(void) {
    static int is_found;
    if (is_found)
        return 1;
    struct replacement replacements[] = {
        {"/libc10.so", "posix_memalign", (void *)counted_memalign, 0},
        {"/libc10.so", "free", (void *)counted_free, 0},
        {NULL, NULL, NULL, 0},
    };
    return is_found = replace_all(replacements);
}

/* Record new nodes and running nodes from now on. Return 0 if no library creates nodes by this function. */
int counter_watch_nodes(const struct autograd *functions, const char *next_number) {
    static int is_found;
    if (is_found)
        return 1;
    struct replacement replacements[] = {
        {NULL, next_number, (void *)noted_number, 0},
        {NULL, NULL, NULL, 0},
    };
    autograd = *functions;
    return is_found = replace_all(replacements);
}

/* See the dtypes and shapes of new tensors from now on. They are recorded after `counter_trust_shapes`. The functions and their
   names are those of `empty` and `empty_strided`. Return 0 if no library calls them. */
int counter_watch_tensors(void *const functions[2], const char *const names[2]) {
    static int is_found;
#if defined(__x86_64__)
    if (is_found)
        return 1;
    struct replacement replacements[] = {
        {NULL, names[0], (void *)noted_empty, 0},
        {NULL, names[1], (void *)noted_empty_strided, 0},
        {NULL, NULL, NULL, 0},
    };
    torchs_empty = (empty)functions[0];
    torchs_empty_strided = (empty_strided)functions[1];
    is_found = replace_all(replacements);
#endif
    return is_found;
}

/* Write the dtype and the sizes of each new tensor with two dimensions in this thread. With NULL, write nothing. */
void counter_test_shapes(int64_t shape[3]) { test_shape = shape; }

/* Record dtypes and shapes from now on. */
void counter_trust_shapes(void) { __atomic_store_n(&trusts_shapes, 1, __ATOMIC_RELAXED); }

/* Forget everything that was counted, and call a function after the next allocation. */
void counter_begin(void (*begin)(void)) {
    pthread_mutex_lock(&lock);
    forget();
    at_begin = begin;
    pthread_mutex_unlock(&lock);
}

/* Write the live bytes, the peak, the number of allocations, and whether the history lacks entries. */
void counter_read(int64_t figures[4]) {
    pthread_mutex_lock(&lock);
    figures[0] = live;
    figures[1] = peak;
    figures[2] = allocations;
    figures[3] = is_cut;
    pthread_mutex_unlock(&lock);
}

/* Begin a new peak at the live bytes. */
void counter_restart_peak(void) {
    pthread_mutex_lock(&lock);
    peak = live;
    pthread_mutex_unlock(&lock);
}

/* Call Python no more, because it ends. */
void counter_stop_calls(void) { __atomic_store_n(&may_call_python, 0, __ATOMIC_RELEASE); }

/* Note that the calling thread begins or ends a backward pass. */
void counter_note_backward(int64_t kind, uintptr_t number) {
    pthread_mutex_lock(&lock);
    size_t index = note(number, 0, kind, 0, (struct node){0, 0, NULL, NULL});
    int64_t in_recording = recording;
    pthread_mutex_unlock(&lock);
    if (index != SIZE_MAX && kind == BEGAN_BACKWARD)
        call_python(NULL, index, in_recording, 0);
}

/* Note a number at each further allocation of the calling thread. */
void counter_note(int64_t note) { current_note = note; }

/* Record no more. The history stays, because another thread may read it. */
void counter_stop_recording(void) {
    pthread_mutex_lock(&lock);
    is_recording = 0;
    pthread_mutex_unlock(&lock);
}

/* Stop recording, and delete the history. The caller has Python's lock, and nobody reads the history. */
void counter_delete_history(void) {
    pthread_mutex_lock(&lock);
    struct event *old = events;
    size_t count = event_count;
    is_recording = 0;
    event_count = event_places = 0;
    events = NULL;
    pthread_mutex_unlock(&lock);
    for (size_t index = 0; index < count; index++) {
        while (old[index].depth)
            python.decrease(old[index].frames[--old[index].depth].code);
        free(old[index].frames);
        free(old[index].shape);
    }
    free(old);
}

/* Delete the history, and begin a new one. The caller has Python's lock, and nobody reads the history. */
void counter_record(size_t most) {
    void *native[MOST_NATIVE_FRAMES];
    (void)!backtrace(native, MOST_NATIVE_FRAMES); /* the first call loads a library */
    counter_delete_history();
    pthread_mutex_lock(&lock);
    most_events = most;
    is_cut = 0;
    recording++;
    is_recording = 1;
    pthread_mutex_unlock(&lock);
}

/* Write at most `most` entries of the history and live blocks. Return the numbers of all of them in `counts`. */
void counter_copy(struct event *history, struct block *alive, size_t most, size_t counts[2]) {
    pthread_mutex_lock(&lock);
    counts[0] = event_count;
    counts[1] = used;
    if (event_count <= most && used <= most) {
        memcpy(history, events, event_count * sizeof *history);
        for (size_t place = 0; place < places; place++)
            if (blocks[place].address)
                *alive++ = blocks[place];
    }
    pthread_mutex_unlock(&lock);
}

/* c10::Device. It is passed like an integer of two bytes. */
struct device {
    int8_t type, index;
};

#define ON_CPU 0
#define ON_CUDA 1
#define REPORT "_ZN3c1027reportMemoryUsageToProfilerEPvlmmNS_6DeviceE" /* c10::reportMemoryUsageToProfiler */

typedef void (*report)(void *, int64_t, size_t, size_t, struct device);

static report torchs_report;
static struct {
    int64_t live, peak, allocations;
} on_cuda[MOST_DEVICES];
static int64_t profiled_live; /* on the CPU */

/* Called by torch's allocator at each allocation, and at each free with negative bytes. The calling thread has the lock of the
   device's allocator, and perhaps Python's lock. So this function must wait for no lock except `lock`, and must not call Python.
   `bytes` is the block's size after rounding, and `allocated` the sum over the device's live blocks in this process. */
static void counted_report(void *address, int64_t bytes, size_t allocated, size_t reserved, struct device device) {
    if (device.type == ON_CPU) {
        pthread_mutex_lock(&lock);
        publish(PROFILED, 0, profiled_live = (int64_t)allocated);
        pthread_mutex_unlock(&lock);
    }
    if (device.type == ON_CUDA && device.index >= 0 && device.index < MOST_DEVICES) {
        struct node node = running_node();
        pthread_mutex_lock(&lock);
        if (bytes > 0)
            note((uintptr_t)address, bytes, ALLOCATED, device.index, node);
        on_cuda[device.index].live = (int64_t)allocated;
        if (on_cuda[device.index].peak < (int64_t)allocated)
            on_cuda[device.index].peak = (int64_t)allocated;
        on_cuda[device.index].allocations += bytes > 0;
        publish(CUDA, device.index, (int64_t)allocated);
        pthread_mutex_unlock(&lock);
    }
    torchs_report(address, bytes, allocated, reserved, device);
}

/* Let a library call `counted_report`. Return 0 if it is not loaded, or does not report its allocations by this function. The table
   may have a stub that finds torch's function at the first call, so torch's function is looked up. */
static int replace_report(const char *reporting) {
    void *library = dlopen("libc10.so", RTLD_LAZY | RTLD_NOLOAD);
    torchs_report = library ? (report)dlsym(library, REPORT) : NULL;
    struct replacement replacements[] = {
        {reporting, REPORT, (void *)counted_report, 0},
        {NULL, NULL, NULL, 0},
    };
    return torchs_report && watch_forks() && replace_all(replacements);
}

/* Begin to count on CUDA devices. Return 0 if this fails. Further calls change nothing. */
int cuda_install(void) {
    static int is_found;
    return is_found = is_found || replace_report("/libc10_cuda.so");
}

/* Begin to count on the CPU in threads that a profiler records. Return 0 if this fails. Further calls change nothing. */
int profiled_install(void) {
    static int is_found;
    return is_found = is_found || replace_report("/libc10.so");
}

/* Write a CUDA device's allocated bytes, their peak, and the number of allocations. */
void cuda_read(int device, int64_t figures[3]) {
    pthread_mutex_lock(&lock);
    figures[0] = on_cuda[device].live;
    figures[1] = on_cuda[device].peak;
    figures[2] = on_cuda[device].allocations;
    pthread_mutex_unlock(&lock);
}

/* Begin a new peak at a CUDA device's allocated bytes. */
void cuda_restart_peak(int device) {
    pthread_mutex_lock(&lock);
    on_cuda[device].peak = on_cuda[device].live;
    pthread_mutex_unlock(&lock);
}

size_t shared_bytes(void) { return sizeof(struct shared); }

/* Return an open file as a table for several processes, or NULL. */
struct shared *shared_map(int file) {
    void *table = mmap(NULL, sizeof(struct shared), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    return table == MAP_FAILED ? NULL : table;
}

static struct process *process_of(struct shared *table, int64_t owner) {
    for (int place = 0; place < MOST_PROCESSES; place++)
        if (__atomic_load_n(&table->processes[place].owner, __ATOMIC_SEQ_CST) == owner)
            return &table->processes[place];
    return NULL;
}

static void clear(struct shared *table, struct process *process) {
    for (int device = 0; device < MOST_DEVICES; device++)
        set_live(table, process, device, 0);
}

/* Take this process's bytes out of a file. `is_own` is 1 for the file of tests in this process. */
void shared_leave(int is_own) {
    struct publication *left = &publications[is_own];
    pthread_mutex_lock(&lock);
    if (left->process) {
        clear(left->table, left->process);
        __atomic_store_n(&left->process->owner, 0, __ATOMIC_SEQ_CST);
    }
    left->process = NULL;
    pthread_mutex_unlock(&lock);
}

static int64_t current(enum source source, int device) {
    return source == CUDA ? on_cuda[device].live : source == PROFILED ? profiled_live : live;
}

/* Publish this process's bytes in a table from now on. Return 0 if the table is full.

   `owner` identifies the process. If the process ran another program before, it takes that program's place. `indices` are the
   machine's indices of this process's first `count` devices. On the CPU there is one device. */
int shared_publish(struct shared *table, int64_t owner, const int32_t *indices, int count, enum source source, int is_own) {
    shared_leave(is_own);
    struct process *process = process_of(table, owner);
    while (!process && (process = process_of(table, 0))) {
        int64_t nobody = 0;
        if (!__atomic_compare_exchange_n(&process->owner, &nobody, owner, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
            process = NULL; /* another process has taken this place */
    }
    if (!process)
        return 0;
    clear(table, process);
    struct publication *begun = &publications[is_own];
    pthread_mutex_lock(&lock);
    *begun = (struct publication){table, process, source, {0}};
    for (int device = 0; device < MOST_DEVICES; device++) {
        begun->in_machine[device] = device < count && indices[device] < MOST_DEVICES ? indices[device] : -1;
        publish(source, device, current(source, device));
    }
    pthread_mutex_unlock(&lock);
    return 1;
}

/* Leave the bytes that this process publishes for its own tests as they are, until as many calls of `shared_resume`. */
void shared_pause(void) {
    pthread_mutex_lock(&lock);
    pauses++;
    pthread_mutex_unlock(&lock);
}

void shared_resume(void) {
    struct publication *own = &publications[1];
    pthread_mutex_lock(&lock);
    if (pauses && !--pauses && own->process)
        for (int device = 0; device < MOST_DEVICES; device++)
            publish(own->source, device, current(own->source, device));
    pthread_mutex_unlock(&lock);
}

/* Return the bytes on a device that this process publishes in a table for its own tests; -1 if it publishes none there. */
int64_t shared_own(struct shared *table, int device) {
    struct publication *own = &publications[1];
    pthread_mutex_lock(&lock);
    int is_published = own->process && own->table == table && own->in_machine[device] >= 0;
    int64_t bytes = is_published ? own->process->live[own->in_machine[device]] : -1;
    pthread_mutex_unlock(&lock);
    return bytes;
}

/* Unmap a table. If this process publishes its bytes there, it stops. */
void shared_unmap(struct shared *table) {
    for (int is_own = 0; is_own < 2; is_own++)
        if (publications[is_own].table == table)
            shared_leave(is_own);
    munmap(table, sizeof *table);
}

/* Write the owners of all places, and 0 for each free place. */
void shared_owners(struct shared *table, int64_t owners[MOST_PROCESSES]) {
    for (int place = 0; place < MOST_PROCESSES; place++)
        owners[place] = __atomic_load_n(&table->processes[place].owner, __ATOMIC_SEQ_CST);
}

/* Take the bytes of a process that was killed out of the table. */
void shared_remove(struct shared *table, int64_t owner) {
    struct process *process = process_of(table, owner);
    if (process) {
        clear(table, process);
        __atomic_store_n(&process->owner, 0, __ATOMIC_SEQ_CST);
    }
}

/* Write the highest sum on each device since the last call, and begin again at the current sum. */
void shared_restart(struct shared *table, int64_t highest[MOST_DEVICES]) {
    for (int device = 0; device < MOST_DEVICES; device++) {
        highest[device] = __atomic_exchange_n(&table->highest[device], 0, __ATOMIC_SEQ_CST);
        raise_to(&table->highest[device], __atomic_load_n(&table->sum[device], __ATOMIC_SEQ_CST));
    }
}

#ifdef __GLIBC__
/* The file for this process's exit status. A fork has its parent's, which it does not write. */
static struct {
    pid_t process;
    char folder[4096], name[64];
} status_file;

static void write_status(int status, void *unused) {
    (void)unused;
    if (status_file.process != getpid())
        return;
    int folder = open(status_file.folder, O_DIRECTORY | O_NOFOLLOW | O_RDONLY);
    struct stat about;
    /* The session may have ended, and somebody else may have made a folder with this name. */
    if (folder >= 0 && !fstat(folder, &about) && about.st_uid == getuid()) {
        int file = openat(folder, status_file.name, O_CREAT | O_EXCL | O_NOFOLLOW | O_WRONLY, 0600);
        if (file >= 0) {
            dprintf(file, "%d", status & 0xff);
            close(file);
        }
    }
    if (folder >= 0)
        close(folder);
}

/* Be called when this process calls `exit`, as Python does at its end. The destructors of libraries that were loaded before run
   afterwards, and may crash. So this comes before torch is loaded. */
void exit_prepare(void) {
    static int is_prepared;
    is_prepared = is_prepared || !on_exit(write_status, NULL);
}

/* Write this process's exit status into a new file in a folder. */
void exit_watch(const char *folder, const char *name) {
    if (strlen(folder) >= sizeof status_file.folder || strlen(name) >= sizeof status_file.name)
        return;
    strcpy(status_file.folder, folder);
    strcpy(status_file.name, name);
    status_file.process = getpid();
}
#endif
