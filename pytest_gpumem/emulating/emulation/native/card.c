/* Counts the bytes taken on each device: by this process alone, or by all processes with the same file in GPUMEM_EMULATED_CARD.

   The file is an array of slots, one for each process. A process holds a record lock on its slot's number. The system frees this
   lock when the process ends, even if it is killed. The next process that needs room then empties the slot. These functions are
   not thread-safe, so addresses.c calls them under its lock. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "emulated.h"

#define MOST_PROCESSES 256
typedef struct {
    size_t used[MOST_DEVICES];
    int in_use;
} Slot;
/* The bytes to lock, which come after the slots' contents: from FIRST_LOCK on, a byte for each slot, which its process locks; and
   MUTEX, which a process locks while it reads or writes slots. */
static const off_t FIRST_LOCK = 1 << 24, MUTEX = (1 << 24) - 1;

static Slot own_card;
static Slot *slots = NULL, *own = &own_card;
static int file = -1;
static pid_t opened_by;

static int take(int command, int kind, off_t at) {
    struct flock lock = {.l_type = (short)kind, .l_whence = SEEK_SET, .l_start = at, .l_len = 1};
    int done;
    while ((done = fcntl(file, command, &lock)) == -1 && errno == EINTR && command == F_SETLKW) {}
    return command == F_GETLK ? lock.l_type == F_UNLCK : done == 0;
}
static void begin(void) { if (slots) take(F_SETLKW, F_WRLCK, MUTEX); }
static void end(void) { if (slots) take(F_SETLK, F_UNLCK, MUTEX); }

static int find_slot(void) {
    begin();
    for (int i = 0; i < MOST_PROCESSES; i++) {
        if (!take(F_SETLK, F_WRLCK, FIRST_LOCK + i)) continue;
        own = &slots[i];
        memset(own, 0, sizeof *own);
        own->in_use = 1;
        break;
    }
    end();
    return own != &own_card;
}

/* Opens the card's file once in each process. A forked child opens it again, because it has neither its parent's locks nor its
   parent's bytes. */
static void open_card(void) {
    if (opened_by == getpid()) return;
    opened_by = getpid();
    if (file >= 0) close(file);
    file = -1;
    slots = NULL;
    own = &own_card;
    memset(own, 0, sizeof *own);
    const char *path = getenv("GPUMEM_EMULATED_CARD");
    if (!path || !*path) return;
    file = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (file >= 0 && !ftruncate(file, sizeof(Slot) * MOST_PROCESSES)) {
        void *at = mmap(NULL, sizeof(Slot) * MOST_PROCESSES, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        if (at != MAP_FAILED) slots = at;
    }
    if (slots && find_slot()) return;
    slots = NULL;
    own = &own_card;
    fprintf(stderr, "pytest-gpumem: GPUMEM_EMULATED_CARD=%s cannot be shared (%s): this process has a card of its own\n", path,
            errno ? strerror(errno) : "too many processes");
}

static void forget_the_dead(void) {
    for (int i = 0; slots && i < MOST_PROCESSES; i++)
        if (slots[i].in_use && &slots[i] != own && take(F_GETLK, F_WRLCK, FIRST_LOCK + i)) memset(&slots[i], 0, sizeof *slots);
}

static size_t sum(int device) {
    size_t total = slots ? 0 : own->used[device];
    for (int i = 0; slots && i < MOST_PROCESSES; i++) total += slots[i].used[device];
    return total;
}

/* The bytes of the CUDA context that a process gets when it first uses a device; 0 if the process has used the device before. */
static size_t context_to_come(int device) { return own->used[device] ? 0 : gpumem_gpu.context_bytes; }

int gpumem_card_take(int device, size_t bytes) {
    open_card();
    begin();
    size_t wanted = bytes + context_to_come(device);
    if (sum(device) + wanted > gpumem_gpu.total_bytes) forget_the_dead();
    int fits = sum(device) + wanted <= gpumem_gpu.total_bytes;
    if (fits) own->used[device] += wanted;
    end();
    return fits;
}

void gpumem_card_give_back(int device, size_t bytes) {
    open_card();
    begin();
    own->used[device] -= bytes < own->used[device] ? bytes : own->used[device];
    end();
}

size_t gpumem_card_used(int device) {
    open_card();
    begin();
    forget_the_dead();
    own->used[device] += context_to_come(device);
    size_t total = sum(device);
    end();
    return total < gpumem_gpu.total_bytes ? total : gpumem_gpu.total_bytes;
}
