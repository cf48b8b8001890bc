// Decides which kernel gets which controls, once for each kernel and table. Launches read the decision without a lock, and the control
// block counts them.
//
// A seqlock guards each decision. Its sequence word is a stamp: the generation of the rules and the epoch of the handles. A decision
// with an old stamp is made again. A reader reads the words of a decision between two acquire loads of the stamp. A writer clears the
// stamp, writes the words, and stores the new stamp, all by release stores. So a reader that sees one new word also sees the cleared
// stamp, and takes the slow path.
//
// The slow path queries the driver, which may wait for other threads of the program. So the thread holds no lock meanwhile, only a
// turn: one thread queries at a time. A thread that gets no turn in `TURN_LIMIT` attempts launches unchanged, and tries again at its
// next launch. So no deadlock is possible with a thread that the driver or the loader needs.
//
// This file knows nothing of CUDA or HIP beyond `struct driver_calls`.
#define _GNU_SOURCE
#include <errno.h>
#include <sched.h>
#include <string.h>
#include <time.h>

#include "kernels.h"

#define TURN_LIMIT 2000  // attempts; each sleeps for 50 us or more
#define TURN_YIELDS 64   // attempts before those, without a sleep
#define MAX_DOUBTS 16

static bool is_turn_taken;
static __thread bool is_deciding;  // a profiler's callback may launch within a driver call of ours

HIDDEN void filter_started(void) {
    forget_kernels();
    forget_rules();
    STORE(&is_turn_taken, false);  // the thread that had it does not exist in a forked child
    is_deciding = false;
}

static bool take_turn(void) {
    static const struct timespec pause = {.tv_nsec = 50000};
    for (int attempt = 0; attempt < TURN_YIELDS + TURN_LIMIT; attempt++) {
        if (!__atomic_exchange_n(&is_turn_taken, true, __ATOMIC_ACQUIRE)) return true;
        if (attempt < TURN_YIELDS) {
            sched_yield();
        } else {
            nanosleep(&pause, NULL);
        }
    }
    return false;
}

static void end_turn(void) { STORE(&is_turn_taken, false); }

// --- decisions --------------------------------------------------------------------------------------------------------------------

HIDDEN struct counter_record *counters_of(const struct decision *decision, unsigned rule) {
    struct block_record *block = LOAD(&filter_block);
    static struct counter_record nowhere;  // for a thread that continues while a forked child starts over
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

// The rules that set each control of a kernel. They are copies, because the table may change meanwhile. An index below 0 means none.
struct choice {
    int index;
    struct rule_record rule;
};
struct choices {
    struct choice cap, priority, hold, collective;
    bool has_holds;
    uint32_t lives;
};

// Returns the rule that sets a control: the last one that matches the kernel. Earlier rules for the same control record that they lost.
static struct choice choose_rule(const struct decision *decision, const bool *named, uint32_t sets) {
    struct choice chosen = {.index = -1};
    for (int rule = (int)rules_now.num_rules - 1; rule >= 0; rule--) {
        if (!named[rule] || !(rules_now.rules[rule].sets & sets)) continue;
        if (chosen.index < 0) {
            chosen = (struct choice){rule, rules_now.rules[rule]};
        } else if (!(sets & IS_COLLECTIVE)) {
            note_refusal(counters_of(decision, (unsigned)rule), (struct refused){REFUSED_OVERRIDDEN, 0});
        }
    }
    return chosen;
}

static void name_rules(const struct kernel_entry *entry, bool *named) {
    bool is_collective = false;
    for (uint32_t i = 0; i < rules_now.num_rules; i++) {
        named[i] = rule_names_kernel(&rules_now.rules[i], entry);
        is_collective |= named[i] && rules_now.rules[i].sets & IS_COLLECTIVE;
    }
    for (uint32_t i = 0; i < rules_now.num_rules; i++)
        named[i] &= !(rules_now.rules[i].sets & (is_collective ? NOT_COLLECTIVE : ONLY_COLLECTIVE));
}

static void choose(const struct decision *decision, struct choices *choices) {
    bool named[MAX_RULES];
    name_rules(decision->entry, named);
    choices->cap = choose_rule(decision, named, HAS_CAP);
    choices->priority = choose_rule(decision, named, HAS_PRIORITY);
    choices->hold = choose_rule(decision, named, HAS_HOLD);
    choices->collective = choose_rule(decision, named, IS_COLLECTIVE);
    choices->has_holds = false;
    for (uint32_t i = 0; i < rules_now.num_rules; i++) choices->has_holds |= rules_now.rules[i].sets & HAS_HOLD;
    choices->lives = lives_of(decision->entry);
}

static void decide_cap(const struct driver_calls *driver, const struct launch *launch, const struct choice *chosen,
                       struct decision *out) {
    struct cap_state *cap = cap_of(out->entry);
    int residency = -1;
    const bool is_wanted = chosen->index >= 0 && !launch->is_cooperative;
    if (cap->is_set && !is_wanted) driver->undo_cap(launch->kernel, cap);
    if (chosen->index < 0) return;
    struct refused refused = {REFUSED_COOPERATIVE, 0};
    if (is_wanted) refused = driver->set_cap(launch, &chosen->rule, cap, &residency);
    out->cap_rule = (uint8_t)chosen->index;
    out->cap_bytes = chosen->rule.dynamic_shared_bytes;
    out->actions |= refused.code ? CAP_REFUSED : CAP;
    struct counter_record *counters = counters_of(out, out->cap_rule);
    if (refused.code) note_refusal(counters, refused);
    if (residency < 0) return;
    if (residency > LOAD_RELAXED(&counters->residency_found)) STORE_RELAXED(&counters->residency_found, residency);
    if (out->record) STORE_RELAXED(&out->record->residency_found, residency);
}

static void decide_priority(const struct driver_calls *driver, const struct choice *chosen, struct decision *out) {
    if (chosen->index < 0) return;
    const struct refused refused = driver->check_priority(chosen->rule.priority);
    out->priority_rule = (uint8_t)chosen->index;
    out->priority = chosen->rule.priority;
    out->actions |= refused.code ? PRIORITY_REFUSED : PRIORITIZE;
    if (refused.code) note_refusal(counters_of(out, out->priority_rule), refused);
}

static void decide_hold(const struct driver_calls *driver, const struct choice *chosen, struct decision *out) {
    if (chosen->index < 0) return;
    const struct refused refused = driver->prepare_hold();
    out->hold_rule = (uint8_t)chosen->index;
    out->hold_ns = (uint64_t)(chosen->rule.hold_us * 1000.0 + 0.5);
    out->actions |= refused.code ? HOLD_REFUSED : HOLD;
    if (refused.code) note_refusal(counters_of(out, out->hold_rule), refused);
}

static void note_traits(const struct launch *launch, bool is_collective, struct function_record *record) {
    const uint32_t traits = LOAD_RELAXED(&record->traits) & ~(uint32_t)TRAIT_COLLECTIVE;
    STORE_RELAXED(&record->traits,
                  traits | (is_collective ? TRAIT_COLLECTIVE : 0) | (launch->is_cooperative ? TRAIT_COOPERATIVE : 0));
}

// Queries the driver for what the rules need. The caller holds the turn and no lock.
static void make_decision(const struct driver_calls *driver, const struct launch *launch, const struct choices *choices,
                          struct decision *out) {
    decide_cap(driver, launch, &choices->cap, out);
    decide_priority(driver, &choices->priority, out);
    decide_hold(driver, &choices->hold, out);
    const bool is_collective = choices->collective.index >= 0;
    if (is_collective && choices->has_holds) out->actions |= NOTE_COLLECTIVE;
    out->collective_rule = is_collective ? (uint8_t)choices->collective.index : 0;
    if (out->record) note_traits(launch, is_collective, out->record);
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

// --- the slow path ------------------------------------------------------------------------------------------------------------------

enum found { NOT_KEPT, UNKNOWN, UNDECIDED, DECIDED };

static struct decision begin(struct kernel_entry *entry) {
    const uint64_t stamp = rules_now.generation << 32 | LOAD(&filter_epoch);
    return (struct decision){.stamp = stamp, .entry = entry, .record = LOAD(&entry->record)};
}

static enum found look_again(struct decision *out) {
    refresh_rules(filter_block);
    struct kernel_entry *entry = out->entry;
    if (!is_kernel_known(entry)) return UNKNOWN;
    *out = begin(entry);
    return recall(entry, out->stamp, out) ? DECIDED : UNDECIDED;
}

// Under the mutex: returns what is known of the launch's kernel.
static enum found look_up(const struct driver_calls *driver, const struct launch *launch, struct decision *out) {
    enum found found = NOT_KEPT;
    pthread_mutex_lock(&filter_lock);
    if (filter_block) {
        STORE_RELAXED(&filter_block->driver, (uint32_t)driver->kind);
        out->entry = keep_kernel(launch->kernel);
        if (out->entry) found = look_again(out);
    }
    const bool is_full = filter_block && !out->entry;
    pthread_mutex_unlock(&filter_lock);
    if (is_full) report_problem("more kernels than the launch filter keeps; the others are left as they are.");
    return found;
}

// Under the mutex and with the turn: selects the kernel's rules, unless another thread already did.
static enum found choose_again(struct identity *identity, struct decision *out, struct choices *choices) {
    pthread_mutex_lock(&filter_lock);
    enum found found = filter_block ? look_again(out) : NOT_KEPT;
    if (found == UNKNOWN && identity) {
        learn_kernel(out->entry, identity);
        *out = begin(out->entry);
        found = UNDECIDED;
    }
    if (found == UNDECIDED) choose(out, choices);
    pthread_mutex_unlock(&filter_lock);
    return found;
}

static void settle(const struct decision *decision, const struct choices *choices) {
    pthread_mutex_lock(&filter_lock);
    if (filter_block && lives_of(decision->entry) == choices->lives) remember(decision);
    pthread_mutex_unlock(&filter_lock);
}

static enum found decide_in_turn(const struct driver_calls *driver, const struct launch *launch, struct identity *identity,
                                 struct decision *out) {
    struct choices choices;
    if (!take_turn()) return NOT_KEPT;
    const enum found found = choose_again(identity, out, &choices);
    if (found == UNDECIDED) {
        make_decision(driver, launch, &choices, out);
        settle(out, &choices);
    }
    end_turn();
    return found == UNDECIDED ? DECIDED : found;
}

// Decides again. Returns false if the table of kernels is full, or if another thread keeps the turn for too long.
static bool decide_slowly(const struct driver_calls *driver, const struct launch *launch, struct decision *out) {
    if (is_deciding || !launch->kernel) return false;
    const int error = errno;
    is_deciding = true;
    driver->enter();
    enum found found = UNKNOWN;
    for (int attempt = 0; attempt < MAX_DOUBTS && found == UNKNOWN; attempt++) {  // an unload may invalidate the answer meanwhile
        struct identity identity = {0};
        found = look_up(driver, launch, out);
        if (found == UNKNOWN) identify(driver, launch->kernel, &identity);
        if (found == UNKNOWN || found == UNDECIDED)
            found = decide_in_turn(driver, launch, found == UNKNOWN ? &identity : NULL, out);
        free_identity(&identity);
    }
    driver->leave();
    is_deciding = false;
    errno = error;
    return found == DECIDED;
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

// Counts a launch once for each rule that applies to it.
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
    struct kernel_entry *entry = launch->kernel ? find_kernel(launch->kernel) : NULL;
    const bool is_left = UNLIKELY(!entry) && (!launch->kernel || LOAD(&is_kernel_table_full));
    if (UNLIKELY(is_left || ((!entry || !recall(entry, present_stamp(block), out)) && !decide_slowly(driver, launch, out)))) {
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
    if (is_deciding || !take_turn()) return refused;
    is_deciding = true;
    pthread_mutex_lock(&filter_lock);
    const bool is_present = rules_now.generation == decision->stamp >> 32;
    const struct rule_record rule = rules_now.rules[decision->cap_rule];
    pthread_mutex_unlock(&filter_lock);
    if (is_present) refused = driver->set_cap(launch, &rule, cap_of(decision->entry), &residency);
    end_turn();
    is_deciding = false;
    return refused;
}
