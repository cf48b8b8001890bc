// Kernels by handle: their names and their modules.
//
// The table is a hash table with open addressing. A slot that was taken is never emptied, so a look-up needs no lock. If its kernel was
// freed, another handle may reuse the slot. An index holds the kernels of each module, so an unload invalidates only its own kernels.
// Kernels whose module the driver does not tell are queried again after any unload.
//
// The census is the list of kernels in the control block that Python reads. The filter only writes to it. What the filter must know of
// its entries is in a hash table of its own, so a damaged block cannot mislead it.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

#include "kernels.h"

#define MAX_USED 20480       // slots ever taken: below two thirds of all, which keeps searches short
#define NUM_OWNERS 4096      // lists of kernels by owner; a power of two
#define CENSUS_PLACES 16384  // a power of two, four times MAX_FUNCTIONS
#define NOTHING UINT32_MAX

struct kernel_notes {
    uint32_t epoch;  // of the fields below; 0: nothing is known, as after the handle was freed
    uint32_t lives;
    bool is_freed;     // another handle may take the slot
    bool is_doubtful;  // the handle may have been freed
    bool is_listed;
    uint32_t next;     // in the list of the same owner
    uintptr_t owner;   // module or library; 0: the driver does not tell
    char *name, *demangled;
    struct cap_state cap;
};

HIDDEN struct kernel_entry kernel_entries[KERNEL_PLACES];
HIDDEN bool is_kernel_table_full;
static struct kernel_notes notes[KERNEL_PLACES];
static uint32_t used_places[MAX_USED], num_used;
static uint32_t first_of_owner[NUM_OWNERS];  // slot + 1; 0: none

static struct {
    uint64_t key;
    uint32_t number;  // of the record, + 1; 0: free
} census[CENSUS_PLACES];
static uint32_t num_records;

HIDDEN void forget_kernels(void) {  // leaks the texts: a forked child must not free what another thread was changing
    memset(kernel_entries, 0, sizeof kernel_entries);
    memset(notes, 0, sizeof notes);
    memset(first_of_owner, 0, sizeof first_of_owner);
    memset(census, 0, sizeof census);
    num_used = num_records = 0;
    STORE(&is_kernel_table_full, false);
}

static struct kernel_notes *notes_of(const struct kernel_entry *entry) { return &notes[entry - kernel_entries]; }

HIDDEN struct cap_state *cap_of(const struct kernel_entry *entry) { return &notes_of(entry)->cap; }

HIDDEN void note_programs_carveout(uintptr_t kernel) {
    const struct kernel_entry *entry = kernel && LOAD(&filter_block) ? find_kernel(kernel) : NULL;
    if (entry) STORE_RELAXED(&cap_of(entry)->is_programs, true);
}

HIDDEN uint32_t lives_of(const struct kernel_entry *entry) { return notes_of(entry)->lives; }

// --- the kernels of an owner ----------------------------------------------------------------------------------------------------

static uint32_t *list_of(uintptr_t owner) {
    return &first_of_owner[(uint64_t)owner * 0x9E3779B97F4A7C15ULL >> 52];
}

static void unlist(uint32_t place) {
    if (!notes[place].is_listed) return;
    uint32_t *link = list_of(notes[place].owner);
    while (*link != place + 1) link = &notes[*link - 1].next;
    *link = notes[place].next;
    notes[place].is_listed = false;
}

static void list(uint32_t place, uintptr_t owner) {
    unlist(place);
    uint32_t *first = list_of(owner);
    notes[place].owner = owner;
    notes[place].next = *first;
    notes[place].is_listed = true;
    *first = place + 1;
}

static void free_place(uint32_t place) {
    unlist(place);
    notes[place].epoch = 0;
    notes[place].lives++;
    notes[place].is_freed = true;
    STORE(&kernel_entries[place].stamp, 0);
    STORE(&is_kernel_table_full, false);
}

static void doubt(uint32_t place) {
    notes[place].is_doubtful = true;
    notes[place].lives++;
    STORE(&kernel_entries[place].stamp, 0);
}

// Marks the kernels of an owner as freed, and those without a known owner as doubtful.
static void forget_list(uintptr_t owner, bool is_freed) {
    for (uint32_t link = *list_of(owner); link;) {
        const uint32_t place = link - 1;
        link = notes[place].next;
        if (notes[place].owner != owner) continue;
        if (is_freed) {
            free_place(place);
        } else {
            doubt(place);
        }
    }
}

HIDDEN void forget_module(uintptr_t module) {
    if (!module || !LOAD(&filter_block)) return;
    pthread_mutex_lock(&filter_lock);
    forget_list(module, true);
    forget_list(0, false);
    pthread_mutex_unlock(&filter_lock);
}

// In each context, a library's kernels have functions whose module is not the library. So all functions become doubtful.
HIDDEN void forget_library(uintptr_t library) {
    if (!library || !LOAD(&filter_block)) return;
    pthread_mutex_lock(&filter_lock);
    forget_list(library, true);
    for (uint32_t i = 0; i < num_used; i++)
        if (!notes[used_places[i]].is_freed) doubt(used_places[i]);
    pthread_mutex_unlock(&filter_lock);
}

// --- slots --------------------------------------------------------------------------------------------------------------------------

HIDDEN struct kernel_entry *keep_kernel(uintptr_t kernel) {
    uint32_t place = place_of(kernel), freed = NOTHING;
    for (; kernel_entries[place].kernel; place = (place + 1) % KERNEL_PLACES) {
        if (kernel_entries[place].kernel == kernel) {
            notes[place].is_freed = false;
            return &kernel_entries[place];
        }
        if (freed == NOTHING && notes[place].is_freed) freed = place;
    }
    if (freed != NOTHING) {
        place = freed;
        notes[place].is_freed = false;
    } else if (num_used < MAX_USED) {
        used_places[num_used++] = place;
    } else {
        STORE(&is_kernel_table_full, true);
        return NULL;
    }
    STORE(&kernel_entries[place].kernel, kernel);
    return &kernel_entries[place];
}

HIDDEN bool is_kernel_known(const struct kernel_entry *entry) {
    const struct kernel_notes *known = notes_of(entry);
    return known->epoch == LOAD(&filter_epoch) && !known->is_doubtful;
}

// --- names ------------------------------------------------------------------------------------------------------------------------

typedef char *demangle_function(const char *, char *, size_t *, int *);

// Returns the process's demangler, once the process has loaded one. It then stays loaded.
static demangle_function *find_demangler(void) {
    static demangle_function *found;
    demangle_function *known = LOAD(&found);
    if (known) return known;
    void *library = dlopen("libstdc++.so.6", RTLD_LAZY | RTLD_NOLOAD);
    if (!library) return NULL;
    known = (demangle_function *)dlsym(library, "__cxa_demangle");
    STORE(&found, known);
    return known;
}

// Returns the C++ name if the process has loaded a demangler. Profilers show that name, so plans contain it.
static char *demangle(const char *name) {
    demangle_function *demangler = strncmp(name, "_Z", 2) ? NULL : find_demangler();
    int status = -1;
    return demangler ? demangler(name, NULL, NULL, &status) : NULL;
}

HIDDEN void identify(const struct driver_calls *driver, uintptr_t kernel, struct identity *identity) {
    if (!driver->describe(kernel, &identity->facts) || !identity->facts.name) return;
    identity->name = strdup(identity->facts.name);
    identity->demangled = demangle(identity->facts.name);
}

HIDDEN void free_identity(struct identity *identity) {
    free(identity->name);
    free(identity->demangled);
}

HIDDEN bool rule_names_kernel(const struct rule_record *rule, const struct kernel_entry *entry) {
    const struct kernel_notes *kernel = notes_of(entry);
    const char *pattern = rules_now.pool + rule->pattern_offset;
    if (!kernel->name) return false;
    return matches(pattern, rule->pattern_bytes, kernel->name) ||
           (kernel->demangled && matches(pattern, rule->pattern_bytes, kernel->demangled));
}

// --- the census: one record for each name, registers and static shared memory -----------------------------------------------------

static uint64_t census_key(const char *name, size_t size, const struct kernel_facts *facts) {
    uint64_t key = 0xCBF29CE484222325ULL;  // FNV-1a
    for (size_t i = 0; i < size; i++) key = (key ^ (unsigned char)name[i]) * 0x100000001B3ULL;
    key = (key ^ facts->static_shared_bytes) * 0x100000001B3ULL;
    return (key ^ facts->registers_per_thread) * 0x100000001B3ULL;
}

static void write_record(struct function_record *record, const char *name, size_t kept, const struct kernel_facts *facts) {
    memcpy(record->name, name, kept);
    record->name_bytes = (uint32_t)kept;
    record->static_shared_bytes = facts->static_shared_bytes;
    record->registers_per_thread = facts->registers_per_thread;
    record->residency_found = -1;
    record->traits = name[kept] ? TRAIT_TRUNCATED : 0;
}

static struct function_record *record_of(const char *name, const struct kernel_facts *facts) {
    const size_t kept = strnlen(name, MAX_NAME_BYTES);
    const uint64_t key = census_key(name, kept, facts);
    uint32_t place = (uint32_t)(key >> 50);
    for (; census[place].number; place = (place + 1) % CENSUS_PLACES)
        if (census[place].key == key) return &filter_block->functions[census[place].number - 1];
    if (num_records == MAX_FUNCTIONS) return NULL;
    struct function_record *record = &filter_block->functions[num_records];
    write_record(record, name, kept, facts);
    census[place].key = key;
    census[place].number = ++num_records;
    STORE(&filter_block->num_functions, num_records);
    return record;
}

HIDDEN void learn_kernel(struct kernel_entry *entry, struct identity *identity) {
    struct kernel_notes *known = notes_of(entry);
    const bool is_same = known->epoch && known->owner == identity->facts.owner && known->name && identity->name &&
                         !strcmp(known->name, identity->name);
    if (!is_same) {  // another kernel: it has no cap of ours, and the driver has neither accepted nor refused a change of it
        const struct identity before = {.name = known->name, .demangled = known->demangled};
        known->name = identity->name;
        known->demangled = identity->demangled;
        identity->name = before.name;
        identity->demangled = before.demangled;
        known->cap = (struct cap_state){0};
        STORE_RELAXED(&entry->proven_stamp, 0);
        STORE_RELAXED(&entry->given_up_stamp, 0);
    }
    known->epoch = LOAD(&filter_epoch);
    known->is_doubtful = false;
    list((uint32_t)(entry - kernel_entries), identity->facts.owner);
    STORE(&entry->record, known->name ? record_of(known->name, &identity->facts) : NULL);
}
