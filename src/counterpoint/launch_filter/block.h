// The layout of the control block. `layout.py` has the same; a test compiles this file and compares every offset.
//
// The block of a process is a file that its launch filter and Python both map. Python writes `generation` and the slots. The filter
// writes the counters of the slots and everything else. All of it is plain memory: `filter.h` says how the filter reads it.
#ifndef COUNTERPOINT_BLOCK_H
#define COUNTERPOINT_BLOCK_H

#include <stdint.h>

#define BLOCK_MAGIC 0x544E494F5043464CULL
#define LAYOUT_VERSION 2
#define NUM_SLOTS 4
#define MAX_RULES 256
#define PATTERN_POOL_BYTES 65536
#define MAX_FUNCTIONS 4096
#define MAX_NAME_BYTES 512
#define MAX_PROBLEM_BYTES 160

enum rule_sets {
    HAS_CAP = 1 << 0,
    HAS_CTAS = 1 << 1,
    HAS_CARVEOUT = 1 << 2,
    HAS_PRIORITY = 1 << 3,
    HAS_HOLD = 1 << 4,
    IS_COLLECTIVE = 1 << 5,
    NOT_COLLECTIVE = 1 << 6,
    ONLY_COLLECTIVE = 1 << 7,
};

enum function_traits { TRAIT_COOPERATIVE = 1 << 0, TRAIT_COLLECTIVE = 1 << 1, TRAIT_TRUNCATED = 1 << 2 };

// The first reason why a rule's control was not applied, and a figure that belongs to it. `control_block.py` has the words.
enum refusal {
    REFUSED_COOPERATIVE = 1,
    REFUSED_USES_MORE = 2,         // dynamic shared memory of the launch
    REFUSED_ATTRIBUTE = 3,         // the driver's error
    REFUSED_NO_CTA_FITS = 4,
    REFUSED_NO_CLUSTER_FITS = 5,
    REFUSED_BY_DRIVER = 6,         // the driver's error
    REFUSED_NO_LAUNCH_EX = 7,
    REFUSED_ATTRIBUTES_FULL = 8,   // attributes of the launch
    REFUSED_CAPTURED = 9,
    REFUSED_HOLD_NOT_LOADED = 10,  // the driver's error
    REFUSED_HOLD_LAUNCH = 11,      // the driver's error
    REFUSED_OVERRIDDEN = 12,
    REFUSED_PRIORITY_RANGE = 13,   // the greatest priority, without its sign
    REFUSED_NO_PRIORITY_IN_HIP = 14,
    REFUSED_OCCUPANCY_UNKNOWN = 15,  // the driver's error
    REFUSED_WORKGROUP_LIMIT = 16,  // static and dynamic bytes with the cap
    REFUSED_NO_HOLD_IN_HIP = 17,
    REFUSED_NO_CARVEOUT_IN_HIP = 18,
};

struct rule_record {
    uint32_t pattern_offset;
    uint32_t pattern_bytes;
    uint32_t sets;
    uint32_t dynamic_shared_bytes;
    int32_t ctas_per_sm;
    int32_t carveout_percent;
    int32_t priority;
    uint32_t reserved;
    double hold_us;
};

struct counter_record {
    uint64_t num_matched;
    uint64_t num_capped;
    uint64_t num_prioritized;
    uint64_t num_held;
    uint64_t num_refused;
    uint64_t num_retried;
    int64_t residency_found;
    uint64_t refusal;
};

struct slot_record {
    uint64_t generation;
    uint32_t checksum;
    uint32_t num_rules;
    uint32_t pool_bytes;
    uint32_t reserved;
    struct rule_record rules[MAX_RULES];
    struct counter_record counters[MAX_RULES];
    char pool[PATTERN_POOL_BYTES];
};

struct function_record {
    uint64_t num_launches;
    uint64_t num_launches_ex;
    uint64_t num_changed;
    uint64_t grid_xy;
    uint64_t grid_z_block_x;
    uint64_t block_yz;
    uint64_t dynamic_shared_bytes;
    uint32_t static_shared_bytes;
    uint32_t registers_per_thread;
    uint32_t ctas_per_cluster;
    uint32_t traits;
    int32_t residency_found;
    uint32_t name_bytes;
    char name[MAX_NAME_BYTES];
};

struct block_record {
    uint64_t magic;
    uint32_t layout_version;
    uint32_t block_bytes;
    uint64_t generation;
    int32_t pid;
    int32_t rank;
    uint32_t driver;
    uint32_t num_functions;
    uint64_t num_untracked;
    uint32_t problem_bytes;
    uint32_t reserved;
    char problem[MAX_PROBLEM_BYTES];
    struct slot_record slots[NUM_SLOTS];
    struct function_record functions[MAX_FUNCTIONS];
};

enum driver_kind { DRIVER_NONE = 0, DRIVER_CUDA = 1, DRIVER_HIP = 2 };

#endif
