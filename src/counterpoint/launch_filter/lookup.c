// Answers callers that look up launch functions, and finds the real functions.
//
// Every library launches by libcuda, but finds its functions in its own way: by the linker, by dlsym or dlvsym on libcuda's handle, or
// by cuGetProcAddress (which dlsym finds). This file interposes on dlsym and dlvsym, and answers only for the entry points in the tables
// of cuda.c and hip.c. For every other name it passes the call on by a jump, so that the real dlsym sees the caller's return address:
// RTLD_NEXT and RTLD_DEFAULT depend on the caller.
//
// This code runs before anything else (the start of a sanitizer calls dlsym). So until a launch is looked up, it calls no function of
// the C library except these two. Because dlsym and dlvsym are ours here, it reads the real ones from the C library's symbol table.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <link.h>

#include "filter.h"

#ifndef __GLIBC__
#error "the launch filter is for the GNU C library"
#endif

typedef void *dlsym_function(void *handle, const char *name);
typedef void *dlvsym_function(void *handle, const char *name, const char *version);

// --- the C library's own symbol table (the ELF specification, and the GNU hash section as glibc reads it) -----------------------

static bool is_same(const char *one, const char *other) {
    while (*one && *one == *other) one++, other++;
    return *one == *other;
}

static const char *file_of(const char *path) {
    const char *file = path;
    for (; *path; path++)
        if (*path == '/') file = path + 1;
    return file;
}

struct tables {
    ElfW(Addr) base;
    const ElfW(Sym) * symbols;
    const char *strings;
    const uint32_t *hashes;
};

static uint32_t gnu_hash(const char *name) {
    uint32_t hash = 5381;
    for (const unsigned char *letter = (const unsigned char *)name; *letter; letter++) hash = hash * 33 + *letter;
    return hash;
}

static void *defined_symbol(const struct tables *tables, const char *name) {
    const uint32_t num_buckets = tables->hashes[0], first = tables->hashes[1], bloom_words = tables->hashes[2];
    const uint32_t *buckets = tables->hashes + 4 + bloom_words * (sizeof(ElfW(Addr)) / 4), *chain = buckets + num_buckets;
    const uint32_t hash = gnu_hash(name);
    uint32_t index = buckets[hash % num_buckets];
    if (index < first) return NULL;
    for (;; index++) {
        const uint32_t entry = chain[index - first];
        const ElfW(Sym) *symbol = &tables->symbols[index];
        if ((entry | 1) == (hash | 1) && symbol->st_shndx != SHN_UNDEF && is_same(tables->strings + symbol->st_name, name))
            return (void *)(tables->base + symbol->st_value);
        if (entry & 1) return NULL;
    }
}

static struct tables tables_of(const struct link_map *object) {
    struct tables tables = {.base = object->l_addr};
    for (const ElfW(Dyn) *dynamic = object->l_ld; dynamic->d_tag != DT_NULL; dynamic++) {  // glibc has made these absolute addresses
        if (dynamic->d_tag == DT_SYMTAB) tables.symbols = (const ElfW(Sym) *)dynamic->d_un.d_ptr;
        if (dynamic->d_tag == DT_STRTAB) tables.strings = (const char *)dynamic->d_un.d_ptr;
        if (dynamic->d_tag == DT_GNU_HASH) tables.hashes = (const uint32_t *)dynamic->d_un.d_ptr;
    }
    return tables;
}

// Returns a function of the C library. The dynamic linker's list is read without its lock: the entries before the C library exist since
// the program started, and stay.
static void *in_c_library(const char *name) {
    for (const struct link_map *object = _r_debug.r_map; object; object = object->l_next) {
        const char *file = file_of(object->l_name);
        if (!is_same(file, "libc.so.6") && !is_same(file, "libdl.so.2")) continue;  // before glibc 2.34 they were in libdl
        const struct tables tables = tables_of(object);
        void *found = tables.symbols && tables.strings && tables.hashes ? defined_symbol(&tables, name) : NULL;
        if (found) return found;
    }
    __builtin_trap();  // no program can run without them
}

// The C library's functions. Two threads may both look them up; they find the same.
static dlsym_function *libc_dlsym;
static dlvsym_function *libc_dlvsym;
// Returns what a caller's dlsym would reach without us: another preloaded library's, or the C library's.
static dlsym_function *next_dlsym;
static dlvsym_function *next_dlvsym;

static void find_real_dlsym(void) {
    if (LIKELY(LOAD(&next_dlvsym) != NULL)) return;
    STORE(&libc_dlsym, (dlsym_function *)in_c_library("dlsym"));
    STORE(&libc_dlvsym, (dlvsym_function *)in_c_library("dlvsym"));
    STORE(&next_dlsym, (dlsym_function *)libc_dlsym(RTLD_NEXT, "dlsym"));
    STORE(&next_dlvsym, (dlvsym_function *)libc_dlsym(RTLD_NEXT, "dlvsym"));
}

// --- the functions that the filter replaces ---------------------------------------------------------------------------------------

static const struct driver_library *const libraries[] = {
    &cuda_library,
#ifdef WITH_HIP
    &hip_library,
#endif
};

static struct entry_point *find_entry_point(const char *name, const struct driver_library **library) {
    if ((name[0] != 'c' || name[1] != 'u') && (name[0] != 'h' || name[1] != 'i')) return NULL;
    for (size_t i = 0; i < sizeof libraries / sizeof *libraries; i++)
        for (size_t j = 0; j < libraries[i]->num_entry_points; j++)
            if (is_same(libraries[i]->entry_points[j].symbol, name)) {
                *library = libraries[i];
                return &libraries[i]->entry_points[j];
            }
    return NULL;
}

HIDDEN void *next_symbol(const char *symbol) {
    find_real_dlsym();
    void *found = libc_dlsym(RTLD_NEXT, symbol);
    __asm__ volatile("" : "+r"(found));  // prevents a tail call: dlsym must see this library as its caller
    return found;
}

HIDDEN void *driver_symbol(const struct driver_library *library, const char *symbol) {
    void *handle = NULL;
    for (const char *const *name = library->loaded_names; *name && !handle; name++) handle = dlopen(*name, RTLD_LAZY | RTLD_NOLOAD);
    if (!handle) return NULL;
    find_real_dlsym();
    void *found = libc_dlsym(handle, symbol);
    dlclose(handle);  // only undoes the reference of the dlopen above
    return found;
}

HIDDEN bool is_in_library(const struct driver_library *library, const void *function) {
    Dl_info info;
    if (!dladdr(function, &info) || !info.dli_fname) return true;  // code without a file, which no interposing library is
    const char *file = file_of(info.dli_fname), *prefix = library->file_prefix;
    while (*prefix && *prefix == *file) prefix++, file++;
    return !*prefix;
}

HIDDEN void *real_function(const struct driver_library *library, struct entry_point *point, enum route route) {
    void *real = LOAD(&point->real[route]);
    if (LIKELY(real != NULL)) return real;
    // A privately loaded object that is linked against the driver also reaches us; then there is no next function.
    real = route == ROUTE_NEXT ? next_symbol(point->symbol) : NULL;
    if (!real) real = driver_symbol(library, point->symbol);
    if (real) STORE(&point->real[route], real);
    return real;
}

HIDDEN void *answer_for(const struct driver_library *library, struct entry_point *point, void *found) {
    if (!found || found == point->own[ROUTE_NEXT] || found == point->own[ROUTE_DRIVER] || !filter_is_on()) return found;
    if (is_in_library(library, found)) {
        void *nothing = NULL;  // the driver may return different addresses for one function; any of them works
        __atomic_compare_exchange_n(&point->real[ROUTE_DRIVER], &nothing, found, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
        return point->own[ROUTE_DRIVER];
    }
    // Another library's function is replaced only if it comes right after ours. Otherwise it is returned as it is, and may call us.
    return found == real_function(library, point, ROUTE_NEXT) ? point->own[ROUTE_NEXT] : found;
}

static void *answer_by_name(const struct driver_library *library, struct entry_point *point, void *handle, const char *version) {
    void *found = version ? next_dlvsym(handle, point->symbol, version) : next_dlsym(handle, point->symbol);
    __asm__ volatile("" : "+r"(found));  // no tail call, as above
    if (found == point->own[ROUTE_NEXT]) found = real_function(library, point, ROUTE_NEXT);  // the search found ours first
    return answer_for(library, point, found);
}

static void *answer_dlsym(void *handle, const char *name) {
    const struct driver_library *library;
    struct entry_point *point = find_entry_point(name, &library);
    return answer_by_name(library, point, handle, NULL);
}

static void *answer_dlvsym(void *handle, const char *name, const char *version) {
    const struct driver_library *library;
    struct entry_point *point = find_entry_point(name, &library);
    return answer_by_name(library, point, handle, version);
}

// --- the interposed functions: each selects the function for the call, and jumps to it with the caller's arguments ---------------

// With RTLD_NEXT the C library's answer is right: a library before us finds our exported function, one after us the driver's.
HIDDEN __attribute__((used)) dlsym_function *counterpoint_choose_dlsym(void *handle, const char *name) {
    const struct driver_library *library;
    find_real_dlsym();
    if (LIKELY(!name || !find_entry_point(name, &library))) return next_dlsym;
    return handle == RTLD_NEXT ? libc_dlsym : answer_dlsym;
}

HIDDEN __attribute__((used)) dlvsym_function *counterpoint_choose_dlvsym(void *handle, const char *name) {
    const struct driver_library *library;
    find_real_dlsym();
    if (LIKELY(!name || !find_entry_point(name, &library))) return next_dlvsym;
    return handle == RTLD_NEXT ? libc_dlvsym : answer_dlvsym;
}

// They have the C library's symbol versions, which a version script names. Other preloaded libraries look up the next dlsym by version,
// and must find this one if it is the next.
#if defined(__x86_64__)
#define VERSIONS(name)                                                          \
    ".symver pass_on_" #name ", " #name "@@GLIBC_2.34\n"                         \
    ".globl pass_on_old_" #name "\n.set pass_on_old_" #name ", pass_on_" #name "\n" \
    ".symver pass_on_old_" #name ", " #name "@GLIBC_2.2.5\n"
#define PASS_ON(name)                                                                              \
    __asm__(".text\n.globl pass_on_" #name "\n.type pass_on_" #name ", @function\n"               \
            "pass_on_" #name ":\n.cfi_startproc\n"                                                 \
            "endbr64\npush %rdi\n.cfi_adjust_cfa_offset 8\npush %rsi\n.cfi_adjust_cfa_offset 8\n"  \
            "push %rdx\n.cfi_adjust_cfa_offset 8\n"                                                \
            "call counterpoint_choose_" #name "\n"                                                 \
            "pop %rdx\n.cfi_adjust_cfa_offset -8\npop %rsi\n.cfi_adjust_cfa_offset -8\n"           \
            "pop %rdi\n.cfi_adjust_cfa_offset -8\njmp *%rax\n"                                     \
            ".cfi_endproc\n.size pass_on_" #name ", .-pass_on_" #name "\n" VERSIONS(name))
#elif defined(__aarch64__)
#define VERSIONS(name)                                                          \
    ".symver pass_on_" #name ", " #name "@@GLIBC_2.34\n"                         \
    ".globl pass_on_old_" #name "\n.set pass_on_old_" #name ", pass_on_" #name "\n" \
    ".symver pass_on_old_" #name ", " #name "@GLIBC_2.17\n"
#define PASS_ON(name)                                                                              \
    __asm__(".text\n.globl pass_on_" #name "\n.type pass_on_" #name ", @function\n"               \
            "pass_on_" #name ":\n.cfi_startproc\n"                                                 \
            "hint #34\nstp x29, x30, [sp, #-48]!\n.cfi_adjust_cfa_offset 48\n.cfi_offset x30, -40\n" \
            "stp x0, x1, [sp, #16]\nstr x2, [sp, #32]\nbl counterpoint_choose_" #name "\nmov x16, x0\n" \
            "ldr x2, [sp, #32]\nldp x0, x1, [sp, #16]\nldp x29, x30, [sp], #48\n"                  \
            ".cfi_adjust_cfa_offset -48\n.cfi_restore x30\nbr x16\n"                              \
            ".cfi_endproc\n.size pass_on_" #name ", .-pass_on_" #name "\n" VERSIONS(name))
#else
#error "the launch filter is for x86-64 and AArch64"
#endif
PASS_ON(dlsym);
PASS_ON(dlvsym);
