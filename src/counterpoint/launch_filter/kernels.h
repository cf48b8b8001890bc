// What is known of kernels, by handle: a hash table that a launch reads without a lock, and what else is known of each.
#ifndef COUNTERPOINT_KERNELS_H
#define COUNTERPOINT_KERNELS_H

#include "filter.h"

#define KERNEL_PLACES 32768  // a power of two
#define PLACE_SHIFT 49       // 64 minus its base-2 logarithm

struct kernel_entry {
    uintptr_t kernel;  // 0: free
    uint64_t stamp;    // 0: not decided
    uint64_t words[3];
    struct function_record *record;
    uint64_t proven_stamp, given_up_stamp;
};

// What the driver told of a kernel. This structure owns the texts.
struct identity {
    struct kernel_facts facts;
    char *name, *demangled;
};

HIDDEN extern struct kernel_entry kernel_entries[KERNEL_PLACES];
HIDDEN extern bool is_kernel_table_full;

static inline uint32_t place_of(uintptr_t kernel) {
    return (uint32_t)((uint64_t)kernel * 0x9E3779B97F4A7C15ULL >> PLACE_SHIFT);
}

// Needs no lock. At most `MAX_USED` slots are taken, so every search soon ends at a free slot.
static inline struct kernel_entry *find_kernel(uintptr_t kernel) {
    for (uint32_t place = place_of(kernel);; place = (place + 1) % KERNEL_PLACES) {
        const uintptr_t found = LOAD(&kernel_entries[place].kernel);
        if (LIKELY(found == kernel)) return &kernel_entries[place];
        if (!found) return NULL;
    }
}

HIDDEN void identify(const struct driver_calls *driver, uintptr_t kernel, struct identity *identity);  // with no lock held
HIDDEN void free_identity(struct identity *identity);

// Call all of these under `filter_lock`.
HIDDEN void forget_kernels(void);                             // all of them, in a process that just started or was forked
HIDDEN struct kernel_entry *keep_kernel(uintptr_t kernel);    // NULL: the table is full
HIDDEN bool is_kernel_known(const struct kernel_entry *entry);
HIDDEN void learn_kernel(struct kernel_entry *entry, struct identity *identity);  // takes the texts; the caller frees what remains
HIDDEN uint32_t lives_of(const struct kernel_entry *entry);  // rises when the handle is freed
HIDDEN bool rule_names_kernel(const struct rule_record *rule, const struct kernel_entry *entry);

// Only for the thread that has the turn to query the driver (decide.c).
HIDDEN struct cap_state *cap_of(const struct kernel_entry *entry);

#endif
