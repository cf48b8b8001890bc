// Which kernel gets which controls: decided once for each kernel and table, remembered without a lock, counted in the block.
//
// A kernel is a handle. The table below maps handles to decisions by open addressing; entries are never taken out, so a look-up
// needs no lock. A decision carries a stamp, (generation of the rules, epoch of the handles); with any other stamp than the present
// one it is made again under the mutex. The words of a decision are read between two readings of its stamp, each an acquire load, and
// written between taking the stamp away and putting the new one there, each a release store: a reader that saw one new word sees
// that the stamp has gone, and goes the slow way.
//
// It knows nothing of CUDA or HIP beyond `struct driver_calls`.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

#include "filter.h"

#define CAPACITY 16384  // kernels of one process; a power of two
#define MAX_PROBES 64

struct kernel_entry {
    uintptr_t kernel;  // 0: free
    uint64_t stamp;    // 0: not decided
    uint64_t words[3];
    struct function_record *record;
    uint64_t proven_stamp, given_up_stamp;
};

// What only the mutex's holder reads.
struct kernel_notes {
    uint32_t epoch;  // of what follows
    char *name, *demangled;
    struct cap_state cap;
};

static struct kernel_entry entries[CAPACITY];
static struct kernel_notes notes[CAPACITY];
static uint32_t num_entries;
static __thread bool is_deciding;  // a profiler's callback may launch from inside a driver call that we make

HIDDEN void filter_started(void) {
    for (size_t i = 0; i < CAPACITY; i++) {
        free(notes[i].name);
        free(notes[i].demangled);
    }
    memset(entries, 0, sizeof entries);
    memset(notes, 0, sizeof notes);
    forget_rules();
    num_entries = 0;
    is_deciding = false;
}

static bool rule_names(const struct rule_record *rule, const struct kernel_notes *kernel) {
    const char *pattern = rules_now.pool + rule->pattern_offset;
    return matches(pattern, rule->pattern_bytes, kernel->name) ||
           (kernel->demangled && matches(pattern, rule->pattern_bytes, kernel->demangled));
}

// --- kernels ----------------------------------------------------------------------------------------------------------------------

static uint32_t place_of(uintptr_t kernel) { return (uint32_t)((uint64_t)kernel * 0x9E3779B97F4A7C15ULL >> 50); }

static struct kernel_entry *find(uintptr_t kernel) {
    uint32_t place = place_of(kernel);
    for (int probe = 0; probe < MAX_PROBES; probe++, place = (place + 1) % CAPACITY) {
        const uintptr_t found = LOAD(&entries[place].kernel);
        if (found == kernel) return &entries[place];
        if (!found) return NULL;
    }
    return NULL;
}

static struct kernel_entry *insert(uintptr_t kernel) {
    uint32_t place = place_of(kernel);
    for (int probe = 0; probe < MAX_PROBES; probe++, place = (place + 1) % CAPACITY)
        if (!entries[place].kernel) {
            STORE(&entries[place].kernel, kernel);
            return &entries[place];
        }
    report_problem("more kernels than the launch filter keeps; the others are left as they are.");
    return NULL;
}

// The C++ name, where the process has a demangler loaded: profilers show it, and so plans hold it.
static char *demangle(const char *name) {
    typedef char *demangle_function(const char *, char *, size_t *, int *);
    if (strncmp(name, "_Z", 2)) return NULL;
    void *library = dlopen("libstdc++.so.6", RTLD_LAZY | RTLD_NOLOAD);
    if (!library) return NULL;
    demangle_function *demangler = (demangle_function *)dlsym(library, "__cxa_demangle");
    int status = -1;
    char *text = demangler ? demangler(name, NULL, NULL, &status) : NULL;
    dlclose(library);
    return text;
}

// The census entry of a kernel: one for each name, registers and static shared memory.
static struct function_record *record_of(struct block_record *block, const struct kernel_facts *facts) {
    const size_t size = strlen(facts->name), kept = size < MAX_NAME_BYTES ? size : MAX_NAME_BYTES;
    const uint32_t num_known = LOAD_RELAXED(&block->num_functions);
    for (uint32_t i = 0; i < num_known; i++) {
        struct function_record *known = &block->functions[i];
        if (known->name_bytes == kept && known->static_shared_bytes == facts->static_shared_bytes &&
            known->registers_per_thread == facts->registers_per_thread && !memcmp(known->name, facts->name, kept))
            return known;
    }
    if (num_known == MAX_FUNCTIONS) return NULL;
    struct function_record *record = &block->functions[num_known];
    memcpy(record->name, facts->name, kept);
    record->name_bytes = (uint32_t)kept;
    record->static_shared_bytes = facts->static_shared_bytes;
    record->registers_per_thread = facts->registers_per_thread;
    record->residency_found = -1;
    record->traits = kept < size ? TRAIT_TRUNCATED : 0;
    STORE(&block->num_functions, num_known + 1);
    return record;
}

// Ask the driver about a kernel whose handle is new, or may stand for another kernel by now.
static bool learn(const struct driver_calls *driver, struct kernel_entry *entry, uint32_t epoch) {
    struct kernel_notes *known = &notes[entry - entries];
    struct kernel_facts facts = {0};
    if (known->epoch == epoch) return known->name != NULL;
    const bool is_named = driver->describe(entry->kernel, &facts) && facts.name;
    if (!is_named || !known->name || strcmp(known->name, facts.name)) {
        free(known->name);
        free(known->demangled);
        *known = (struct kernel_notes){0};  // another kernel, so no cap of ours is on it
        if (is_named) known->name = strdup(facts.name);
        if (known->name) known->demangled = demangle(known->name);
    }
    known->epoch = epoch;
    STORE(&entry->record, known->name ? record_of(filter_block, &facts) : NULL);
    return known->name != NULL;
}

// --- decisions --------------------------------------------------------------------------------------------------------------------

HIDDEN struct counter_record *counters_of(const struct decision *decision, unsigned rule) {
    struct block_record *block = LOAD(&filter_block);
    static struct counter_record nowhere;  // of a thread that goes on while a forked child starts anew
    return block ? &block->slots[(decision->stamp >> 32) % NUM_SLOTS].counters[rule] : &nowhere;
}

static void note_refusal(struct counter_record *counters, struct refused refused) {
    uint64_t none = 0;
    const uint64_t first = (uint64_t)refused.code << 32 | refused.value;
    __atomic_compare_exchange_n(&counters->refusal, &none, first, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
}

HIDDEN void count_refusal(const struct decision *decision, unsigned rule, struct refused refused) {
    struct counter_record *counters = counters_of(decision, rule);
    ADD(&counters->num_refused, 1);
    note_refusal(counters, refused);
}

HIDDEN bool is_proven(const struct decision *decision) {
    return LOAD_RELAXED(&decision->entry->proven_stamp) == decision->stamp;
}

HIDDEN bool is_given_up(const struct decision *decision) {
    return LOAD_RELAXED(&decision->entry->given_up_stamp) == decision->stamp;
}

HIDDEN void set_proven(const struct decision *decision) {
    if (!is_proven(decision)) STORE_RELAXED(&decision->entry->proven_stamp, decision->stamp);
}

HIDDEN void give_up(const struct decision *decision) { STORE_RELAXED(&decision->entry->given_up_stamp, decision->stamp); }

// The rule that sets a control: the last one that names the kernel. Rules before it that set the same are told so.
static int choose_rule(const struct decision *decision, const bool *named, uint32_t sets) {
    int chosen = -1;
    for (int rule = (int)rules_now.num_rules - 1; rule >= 0; rule--) {
        if (!named[rule] || !(rules_now.rules[rule].sets & sets)) continue;
        if (chosen < 0) {
            chosen = rule;
        } else if (!(sets & IS_COLLECTIVE)) {
            note_refusal(counters_of(decision, (unsigned)rule), (struct refused){REFUSED_OVERRIDDEN, 0});
        }
    }
    return chosen;
}

static void name_rules(const struct kernel_notes *kernel, bool *named) {
    bool is_collective = false;
    for (uint32_t i = 0; i < rules_now.num_rules; i++) {
        named[i] = rule_names(&rules_now.rules[i], kernel);
        is_collective |= named[i] && rules_now.rules[i].sets & IS_COLLECTIVE;
    }
    for (uint32_t i = 0; i < rules_now.num_rules; i++)
        named[i] &= !(rules_now.rules[i].sets & (is_collective ? NOT_COLLECTIVE : ONLY_COLLECTIVE));
}

static bool has_holds(void) {
    for (uint32_t i = 0; i < rules_now.num_rules; i++)
        if (rules_now.rules[i].sets & HAS_HOLD) return true;
    return false;
}

static void decide_cap(const struct driver_calls *driver, const struct launch *launch, struct decision *out, int rule) {
    struct kernel_notes *kernel = &notes[out->entry - entries];
    int residency = -1;
    const bool is_wanted = rule >= 0 && !launch->is_cooperative;
    if (kernel->cap.is_set && !is_wanted) driver->undo_cap(launch->kernel, &kernel->cap);
    if (rule < 0) return;
    struct refused refused = {REFUSED_COOPERATIVE, 0};
    if (is_wanted) refused = driver->set_cap(launch, &rules_now.rules[rule], &kernel->cap, &residency);
    out->cap_rule = (uint8_t)rule;
    out->cap_bytes = rules_now.rules[rule].dynamic_shared_bytes;
    out->actions |= refused.code ? CAP_REFUSED : CAP;
    struct counter_record *counters = counters_of(out, (unsigned)rule);
    if (refused.code) note_refusal(counters, refused);
    if (residency < 0) return;
    if (residency > LOAD_RELAXED(&counters->residency_found)) STORE_RELAXED(&counters->residency_found, residency);
    if (out->record) STORE_RELAXED(&out->record->residency_found, residency);
}

static void decide_priority(const struct driver_calls *driver, struct decision *out, int rule) {
    if (rule < 0) return;
    const struct refused refused = driver->check_priority(rules_now.rules[rule].priority);
    out->priority_rule = (uint8_t)rule;
    out->priority = rules_now.rules[rule].priority;
    out->actions |= refused.code ? PRIORITY_REFUSED : PRIORITIZE;
    if (refused.code) note_refusal(counters_of(out, (unsigned)rule), refused);
}

static void decide_hold(const struct driver_calls *driver, struct decision *out, int rule) {
    if (rule < 0) return;
    const struct refused refused = driver->prepare_hold();
    out->hold_rule = (uint8_t)rule;
    out->hold_ns = (uint64_t)(rules_now.rules[rule].hold_us * 1000.0 + 0.5);
    out->actions |= refused.code ? HOLD_REFUSED : HOLD;
    if (refused.code) note_refusal(counters_of(out, (unsigned)rule), refused);
}

static void make_decision(const struct driver_calls *driver, const struct launch *launch, struct decision *out) {
    bool named[MAX_RULES];
    name_rules(&notes[out->entry - entries], named);
    decide_cap(driver, launch, out, choose_rule(out, named, HAS_CAP));
    decide_priority(driver, out, choose_rule(out, named, HAS_PRIORITY));
    decide_hold(driver, out, choose_rule(out, named, HAS_HOLD));
    const int collective = choose_rule(out, named, IS_COLLECTIVE);
    if (collective >= 0 && has_holds()) out->actions |= NOTE_COLLECTIVE;
    out->collective_rule = collective >= 0 ? (uint8_t)collective : 0;
    if (out->record) {
        const uint32_t traits = LOAD_RELAXED(&out->record->traits) & ~(uint32_t)TRAIT_COLLECTIVE;
        STORE_RELAXED(&out->record->traits, traits | (collective >= 0 ? TRAIT_COLLECTIVE : 0) |
                                                (launch->is_cooperative ? TRAIT_COOPERATIVE : 0));
    }
}

static void remember(const struct decision *decision) {
    struct kernel_entry *entry = decision->entry;
    const uint64_t rules = (uint64_t)decision->cap_rule | (uint64_t)decision->priority_rule << 8 |
                           (uint64_t)decision->hold_rule << 16 | (uint64_t)decision->collective_rule << 24;
    STORE(&entry->stamp, 0);
    STORE(&entry->words[0], decision->actions | (uint64_t)decision->cap_bytes << 32);
    STORE(&entry->words[1], (uint64_t)(uint32_t)decision->priority | rules << 32);
    STORE(&entry->words[2], decision->hold_ns);
    STORE(&entry->stamp, decision->stamp);
}

static bool recall(struct kernel_entry *entry, uint64_t stamp, struct decision *out) {
    if (LOAD(&entry->stamp) != stamp) return false;
    const uint64_t first = LOAD(&entry->words[0]);
    *out = (struct decision){.stamp = stamp, .actions = (uint32_t)first, .entry = entry, .record = LOAD(&entry->record)};
    if (LIKELY(!out->actions)) return LOAD(&entry->stamp) == stamp;
    const uint64_t second = LOAD(&entry->words[1]);
    out->cap_bytes = (uint32_t)(first >> 32);
    out->priority = (int32_t)(uint32_t)second;
    out->cap_rule = (uint8_t)(second >> 32);
    out->priority_rule = (uint8_t)(second >> 40);
    out->hold_rule = (uint8_t)(second >> 48);
    out->collective_rule = (uint8_t)(second >> 56);
    out->hold_ns = LOAD(&entry->words[2]);
    return LOAD(&entry->stamp) == stamp;
}

static uint64_t present_stamp(const struct block_record *block) {
    return LOAD(&block->generation) << 32 | LOAD(&filter_epoch);
}

// Decide anew, under the mutex. False where the kernel cannot be told or kept.
static bool decide_slowly(const struct driver_calls *driver, const struct launch *launch, struct decision *out) {
    if (is_deciding || !launch->kernel) return false;
    is_deciding = true;
    pthread_mutex_lock(&filter_lock);
    struct block_record *block = filter_block;
    bool is_decided = false;
    if (block) {
        STORE_RELAXED(&block->driver, (uint32_t)driver->kind);
        refresh_rules(block);
        const uint32_t epoch = LOAD(&filter_epoch);
        const uint64_t stamp = rules_now.generation << 32 | epoch;
        struct kernel_entry *entry = find(launch->kernel);
        if (!entry) entry = insert(launch->kernel);
        driver->enter();
        if (entry && recall(entry, stamp, out)) {
            is_decided = true;  // another thread was faster
        } else if (entry && learn(driver, entry, epoch)) {
            *out = (struct decision){.stamp = stamp, .entry = entry, .record = entry->record};
            make_decision(driver, launch, out);
            remember(out);
            is_decided = true;
        }
        driver->leave();
    }
    pthread_mutex_unlock(&filter_lock);
    is_deciding = false;
    return is_decided;
}

static void count_launch(const struct launch *launch, struct function_record *record) {
    ADD(&record->num_launches, 1);
    if (launch->is_ex) ADD(&record->num_launches_ex, 1);
    STORE_RELAXED(&record->grid_xy, launch->grid[0] | (uint64_t)launch->grid[1] << 32);
    STORE_RELAXED(&record->grid_z_block_x, launch->grid[2] | (uint64_t)launch->block[0] << 32);
    STORE_RELAXED(&record->block_yz, launch->block[1] | (uint64_t)launch->block[2] << 32);
    STORE_RELAXED(&record->dynamic_shared_bytes, launch->dynamic_shared_bytes);
    STORE_RELAXED(&record->ctas_per_cluster, launch->ctas_per_cluster ? launch->ctas_per_cluster : 1);
}

// One launch counts once for each rule that has a say in it.
static void count_matches(const struct decision *decision) {
    const struct { uint32_t actions; uint8_t rule; } parts[] = {
        {CAP | CAP_REFUSED, decision->cap_rule},
        {PRIORITIZE | PRIORITY_REFUSED, decision->priority_rule},
        {HOLD | HOLD_REFUSED, decision->hold_rule},
        {NOTE_COLLECTIVE, decision->collective_rule},
    };
    for (int i = 0; i < 4; i++) {
        bool is_counted = !(decision->actions & parts[i].actions);
        for (int j = 0; j < i; j++) is_counted |= decision->actions & parts[j].actions && parts[j].rule == parts[i].rule;
        if (!is_counted) ADD(&counters_of(decision, parts[i].rule)->num_matched, 1);
    }
    if (decision->actions & CAP_REFUSED) ADD(&counters_of(decision, decision->cap_rule)->num_refused, 1);
    if (decision->actions & PRIORITY_REFUSED) ADD(&counters_of(decision, decision->priority_rule)->num_refused, 1);
    if (decision->actions & HOLD_REFUSED) ADD(&counters_of(decision, decision->hold_rule)->num_refused, 1);
}

HIDDEN bool decide(const struct driver_calls *driver, const struct launch *launch, struct decision *out) {
    struct block_record *block = LOAD(&filter_block);
    if (UNLIKELY(!block)) {
        if (!filter_is_on()) return false;
        block = LOAD(&filter_block);
    }
    struct kernel_entry *entry = launch->kernel ? find(launch->kernel) : NULL;
    if (UNLIKELY(!entry || !recall(entry, present_stamp(block), out)) && !decide_slowly(driver, launch, out)) {
        ADD(&block->num_untracked, 1);
        return false;
    }
    if (LIKELY(out->record != NULL)) {
        count_launch(launch, out->record);
    } else {
        ADD(&block->num_untracked, 1);
    }
    if (LIKELY(!out->actions)) return false;
    count_matches(out);
    return true;
}

HIDDEN struct refused set_cap_again(const struct driver_calls *driver, const struct launch *launch, const struct decision *decision) {
    struct refused refused = {REFUSED_ATTRIBUTE, 0};
    int residency;
    if (is_deciding) return refused;
    is_deciding = true;
    pthread_mutex_lock(&filter_lock);
    if (rules_now.generation == decision->stamp >> 32) {
        const struct rule_record *rule = &rules_now.rules[decision->cap_rule];
        refused = driver->set_cap(launch, rule, &notes[decision->entry - entries].cap, &residency);
    }
    pthread_mutex_unlock(&filter_lock);
    is_deciding = false;
    return refused;
}
