// The interfaces between the parts of the launch filter. The parts, lowest first:
//
//   lookup.c   finds the real functions, and answers look-ups of launches (dlsym, dlvsym)
//   guard.c    keeps a truncated block from ending the job
//   block.c    this process's control block: made at the first look-up, again in a forked child
//   rules.c    the table of rules in force, and patterns
//   kernels.c  kernels by handle: names, modules, the census
//   decide.c   which kernel gets which controls: decided once per kernel and table, remembered, counted
//   cuda.c     CUDA's entry points      cuda_controls.c   what the controls need of the CUDA driver
//   hip.c      HIP's entry points and controls: experimental, never run on AMD hardware, built on request only (WITH_HIP)
//
// Memory rules. The hot path takes no lock. It reads words that other threads may write, always by the atomics below (gcc's, because
// they also work on plain structures of the mapped file). Everything else happens under one mutex, `filter_lock`; fork waits for it.
// Under the mutex, nothing is called that could wait for another thread: not the dynamic loader (a thread that launches from a
// library's constructor holds its lock), not the driver, not the demangler. Threads that query the driver about a kernel take turns
// instead (decide.c), and no thread waits for its turn without a limit.
#ifndef COUNTERPOINT_FILTER_H
#define COUNTERPOINT_FILTER_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "block.h"

#define HIDDEN __attribute__((visibility("hidden")))
#define EXPORTED __attribute__((visibility("default")))
#define LIKELY(condition) __builtin_expect(!!(condition), 1)
#define UNLIKELY(condition) __builtin_expect(!!(condition), 0)

#define LOAD(address) __atomic_load_n(address, __ATOMIC_ACQUIRE)
#define LOAD_RELAXED(address) __atomic_load_n(address, __ATOMIC_RELAXED)
#define STORE(address, value) __atomic_store_n(address, value, __ATOMIC_RELEASE)
#define STORE_RELAXED(address, value) __atomic_store_n(address, value, __ATOMIC_RELAXED)
#define ADD(address, value) ((void)__atomic_fetch_add(address, value, __ATOMIC_RELAXED))

// --- lookup.c -----------------------------------------------------------------------------------------------------------------

// How a caller found an entry point. The function after ours in the search order may belong to another preloaded library; the driver's
// own look-up returns the driver's. Each call is passed on to the function that it would have reached without us.
enum route { ROUTE_NEXT = 0, ROUTE_DRIVER = 1, NUM_ROUTES = 2 };

// One entry point that the filter replaces.
struct entry_point {
    const char *symbol;     // name in the driver's library
    const char *base;       // name for cuGetProcAddress
    int since;              // the first driver version for which cuGetProcAddress means this one
    bool is_per_thread;     // the version for the per-thread default stream
    bool is_launch;
    void *own[NUM_ROUTES];  // our functions: the exported one, and the one for look-ups in the driver
    void *real[NUM_ROUTES];
};

struct driver_library {
    const char *loaded_names[5];  // names for dlopen; the rest is NULL
    const char *file_prefix;  // beginning of its file name
    struct entry_point *entry_points;
    size_t num_entry_points;
};

HIDDEN extern const struct driver_library cuda_library, hip_library;

HIDDEN void *next_symbol(const char *symbol);                                             // after this library in the search order
HIDDEN void *driver_symbol(const struct driver_library *library, const char *symbol);   // in a loaded driver, NULL if there is none
HIDDEN void *real_function(const struct driver_library *, struct entry_point *, enum route);
HIDDEN bool is_in_library(const struct driver_library *library, const void *function);
HIDDEN void *answer_for(const struct driver_library *, struct entry_point *, void *found);  // our function for one that a look-up found

// --- guard.c ------------------------------------------------------------------------------------------------------------------

HIDDEN void guard_block(const struct block_record *block, const char *path);  // under the mutex, before the block is used

// --- block.c ------------------------------------------------------------------------------------------------------------------

HIDDEN extern pthread_mutex_t filter_lock;
HIDDEN extern struct block_record *filter_block;  // NULL: not started, or passing through
HIDDEN extern uint32_t filter_epoch;              // increases whenever handles of kernels may have been freed

HIDDEN bool filter_is_on(void);   // starts the filter of this process if necessary
HIDDEN void filter_started(void); // decide.c, under the mutex: forgets everything that another process knew
HIDDEN void say(const char *text);             // one line on stderr
HIDDEN void report_problem(const char *text);  // one line on stderr and in the block, for the first problem only
HIDDEN void forget_handles(void);              // any kernel may have been freed: query and decide again

// --- rules.c ------------------------------------------------------------------------------------------------------------------

HIDDEN extern struct slot_record rules_now;  // a copy of the table in force; only under the mutex
HIDDEN void refresh_rules(struct block_record *block);
HIDDEN void forget_rules(void);
HIDDEN bool matches(const char *pattern, size_t pattern_bytes, const char *name);

// --- kernels.c: functions that free kernels call these before, with no lock held ---------------------------------------------------

HIDDEN void forget_module(uintptr_t module);    // its kernels, and those whose module the driver does not tell
HIDDEN void forget_library(uintptr_t library);  // its kernels, and all functions
HIDDEN void note_programs_carveout(uintptr_t kernel);  // the program set it, so we do not restore it

// --- decide.c -----------------------------------------------------------------------------------------------------------------

struct launch {
    uintptr_t kernel;
    uint32_t grid[3], block[3];
    uint32_t dynamic_shared_bytes;
    bool is_ex;
    bool is_cooperative;
    uint32_t ctas_per_cluster;
    const void *config;  // CUDA: the CUlaunchConfig, if there is one
};

enum actions {
    CAP = 1 << 0,
    PRIORITIZE = 1 << 1,
    HOLD = 1 << 2,
    NOTE_COLLECTIVE = 1 << 3,
    CAP_REFUSED = 1 << 4,
    PRIORITY_REFUSED = 1 << 5,
    HOLD_REFUSED = 1 << 6,
};

// What to change about launches of one kernel. The indices are those of rules in the table of `stamp`.
struct decision {
    uint64_t stamp;
    uint32_t actions;
    uint32_t cap_bytes;
    int32_t priority;
    uint64_t hold_ns;
    uint8_t cap_rule, priority_rule, hold_rule, collective_rule;
    struct function_record *record;  // NULL if the census is full
    struct kernel_entry *entry;
};

// What the driver tells of a kernel. The driver owns the name, which is valid as long as the kernel.
struct kernel_facts {
    const char *name;
    uint32_t static_shared_bytes, registers_per_thread;
    uintptr_t owner;  // the module or library that frees it when unloaded; 0: the driver does not tell
};

// What a cap changed on a kernel, to be restored when the cap ends. The limit of shared memory is not restored. A raised limit makes no
// launch fail. A lowered one would, if the program raised it too, or read that it need not.
struct cap_state {
    bool is_set;
    bool is_programs;  // the program has set the carveout since
    int carveout;      // as we set it
    int carveout_before;
};

struct refused {
    enum refusal code;  // 0: not refused
    uint32_t value;
};

// A driver as decide.c needs it. Every call is made in the context of the launch and without the mutex. One thread at a time sets caps,
// removes them and prepares head starts.
struct driver_calls {
    enum driver_kind kind;
    bool (*describe)(uintptr_t kernel, struct kernel_facts *facts);
    struct refused (*set_cap)(const struct launch *, const struct rule_record *, struct cap_state *, int *residency);
    void (*undo_cap)(uintptr_t kernel, struct cap_state *);
    struct refused (*check_priority)(int priority);
    struct refused (*prepare_hold)(void);
    void (*enter)(void);  // before a decision, `leave` after it; finds the driver's functions
    void (*leave)(void);
};

// Counts a launch, and returns what to change about it. False: nothing; launch it unchanged.
HIDDEN bool decide(const struct driver_calls *, const struct launch *, struct decision *);
HIDDEN struct counter_record *counters_of(const struct decision *, unsigned rule);
HIDDEN void count_refusal(const struct decision *, unsigned rule, struct refused);
HIDDEN bool is_proven(const struct decision *);      // whether the driver has accepted a changed launch of this kernel
HIDDEN bool is_given_up(const struct decision *);    // whether it has refused one
HIDDEN void set_proven(const struct decision *);
HIDDEN void give_up(const struct decision *);
HIDDEN struct refused set_cap_again(const struct driver_calls *, const struct launch *, const struct decision *);

#endif
