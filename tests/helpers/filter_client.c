// A program that launches as it is told: commands from stdin, one answer line or more on stdout, then "ok".
//
//   find ROUTE                     how launches are found from now on (see find_by)
//   make NAME STATIC REGISTERS [kernel]
//   launch NAME SHARED STREAM [ex] [cooperative] [cluster=N] [priority=P] [block=N] [attributes=N]
//   cooperative NAME SHARED STREAM cuLaunchCooperativeKernel
//   unload NAME                    cuModuleUnload; the next `make` takes the handle
//   unload_library NAME            cuLibraryUnload
//   destroy [NAME]                 cuCtxDestroy, of the context that NAME is in; the next `make` takes the handle
//   refuse NAME SHARED_ERROR SHARED_LIMIT PRIORITY_ERROR
//   limit NAME BYTES               the program itself sets MAX_DYNAMIC_SHARED_SIZE_BYTES
//   limit_kernel NAME BYTES        the same by cuKernelSetAttribute
//   carveout NAME PERCENT          the program itself sets the carveout
//   limit_beside NAME BYTES MICROSECONDS   a thread sets the limit while this one launches with 0 bytes; then a launch with BYTES
//   attributes NAME                prints it and the carveout
//   capture STREAM 0|1             broken STREAM       context N        refuse_modules ERROR
//   fork NAME                      a child launches once; its pid
//   stress THREADS LAUNCHES        every thread launches every kernel in turn
//   bench LAUNCHES                 nanoseconds per launch of the first kernel, the quickest of 15 rounds
//   stress THREADS LAUNCHES PATTERN SWAPS   the same while tables are swapped, where the filter is linked in
//   many KERNELS                   makes so many, and launches each once
//   again ROUNDS                   launches each of those again; how many failed, calls that the filter made, nanoseconds per launch
//   asked                          calls that the filter made to decide anew
//   handle_bus                     the program installs a handler of SIGBUS that prints a line and ends it with status 5
//   reraise_bus                    it installs one that puts the handler before it back and raises the signal again
//   plant bus                      SIGBUS by memory of the program's own
//   plant race|overflow            an error for sanitizers to find
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "cuda_launch.h"
#include "libcuda_double.h"

enum { MAX_KERNELS = 64, MAX_MANY = 32000, MAX_ATTRIBUTES = 40 };

typedef int launch_function(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **);
typedef int launch_ex_function(const Config *, void *, void **, void **);
typedef int cooperative_function(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **);
typedef int unload_function(void *);
typedef int proc_function(const char *, void **, int, uint64_t);
typedef int proc2_function(const char *, void **, int, uint64_t, int *);

launch_function cuLaunchKernel;
launch_ex_function cuLaunchKernelEx;
cooperative_function cuLaunchCooperativeKernel;
unload_function cuModuleUnload, cuLibraryUnload, cuCtxDestroy_v2;
int cuFuncSetAttribute(void *, int, int), cuKernelSetAttribute(int, int, void *, int);

static launch_function *launch_kernel;
static launch_ex_function *launch_ex;
static cooperative_function *launch_cooperative;
static unload_function *unload_module, *destroy_context;
static struct {
    char name[2048];
    void *handle;
} kernels[MAX_KERNELS];
static int num_kernels;

static void *kernel_named(const char *name) {
    for (int i = num_kernels - 1; i >= 0; i--)
        if (!strcmp(kernels[i].name, name)) return kernels[i].handle;
    return NULL;
}

// --- ways to find launches ----------------------------------------------------------------------------------------------------------

static void *by_handle(void *library, const char *name) { return dlsym(library, name); }
static void *by_version(void *library, const char *name) {
    return dlvsym(library, name, "libcuda.so.1");  // the version that the linker gave the double
}
static void *by_proc(void *library, const char *name) {
    proc_function *ask = (proc_function *)dlsym(library, "cuGetProcAddress");
    void *found = NULL;
    return ask && !ask(name, &found, 13000, 1) ? found : NULL;
}
static void *by_proc2(void *library, const char *name) {
    proc2_function *ask = (proc2_function *)dlsym(library, "cuGetProcAddress_v2");
    void *found = NULL;
    int status = -1;
    return ask && !ask(name, &found, 13000, 0, &status) && status == 0 ? found : NULL;
}
static void *by_proc_of_proc(void *library, const char *name) {  // as libcudart does: the look-up is looked up
    proc_function *ask = (proc_function *)dlsym(library, "cuGetProcAddress");
    void *newer = NULL, *found = NULL;
    int status = -1;
    if (!ask || ask("cuGetProcAddress", &newer, 12000, 0)) return NULL;
    return !((proc2_function *)newer)(name, &found, 13000, 0, &status) && status == 0 ? found : NULL;
}
static void *by_old_proc_of_proc(void *library, const char *name) {
    proc_function *ask = (proc_function *)dlsym(library, "cuGetProcAddress");
    void *older = NULL, *found = NULL;
    if (!ask || ask("cuGetProcAddress", &older, 11030, 0)) return NULL;
    return ((proc_function *)older)(name, &found, 11080, 0) ? NULL : found;
}
static void *by_proc_per_thread(void *library, const char *name) {
    proc2_function *ask = (proc2_function *)dlsym(library, "cuGetProcAddress_v2");
    void *found = NULL;
    int status = -1;
    return ask && !ask(name, &found, 13000, 2, &status) && status == 0 ? found : NULL;
}
static void *by_default(void *library, const char *name) {
    (void)library;
    return dlsym(RTLD_DEFAULT, name);
}
static void *by_next(void *library, const char *name) {
    (void)library;
    return dlsym(RTLD_NEXT, name);
}
static void *by_program(void *library, const char *name) {
    (void)library;
    void *program = dlopen(NULL, RTLD_LAZY), *found = dlsym(program, name);
    dlclose(program);
    return found;
}
static void *by_twin(void *library, const char *name) {
    char twin[128];
    snprintf(twin, sizeof twin, "%s_ptsz", name);
    return dlsym(library, twin);
}

static bool find_by(const char *route) {
    static const struct {
        const char *name;
        void *(*find)(void *, const char *);
    } routes[] = {
        {"dlsym", by_handle},           {"dlvsym", by_version},           {"proc", by_proc},
        {"proc_v2", by_proc2},          {"proc_of_proc", by_proc_of_proc}, {"old_proc_of_proc", by_old_proc_of_proc},
        {"proc_per_thread", by_proc_per_thread}, {"default", by_default}, {"next", by_next},
        {"program", by_program},        {"twin", by_twin},
    };
    void *library = dlopen("libcuda.so.1", RTLD_LAZY);
    if (!library) return false;
    unload_module = (unload_function *)dlsym(library, "cuModuleUnload");
    destroy_context = (unload_function *)dlsym(library, "cuCtxDestroy_v2");
    launch_kernel = cuLaunchKernel;
    launch_ex = cuLaunchKernelEx;
    launch_cooperative = cuLaunchCooperativeKernel;
    if (!strcmp(route, "linked")) return true;
    for (size_t i = 0; i < sizeof routes / sizeof *routes; i++) {
        if (strcmp(route, routes[i].name)) continue;
        launch_kernel = (launch_function *)routes[i].find(library, "cuLaunchKernel");
        launch_ex = (launch_ex_function *)routes[i].find(library, "cuLaunchKernelEx");
        launch_cooperative = (cooperative_function *)routes[i].find(library, "cuLaunchCooperativeKernel");
        return launch_kernel && launch_ex && launch_cooperative;
    }
    return false;
}

// --- commands -----------------------------------------------------------------------------------------------------------------------

static void print_launches(void) {
    static struct double_launch launches[DOUBLE_LAUNCHES];
    const unsigned count = double_take_launches(launches, DOUBLE_LAUNCHES);
    for (unsigned i = 0; i < count; i++)
        printf("reached %s %s shared=%u stream=%d priority=%d attributes=%u hold_ns=%llu argument=%d grid=%u block=%u\n",
               launches[i].api, launches[i].name, launches[i].shared_bytes, launches[i].stream, launches[i].priority,
               launches[i].num_attributes, (unsigned long long)launches[i].hold_ns, launches[i].argument, launches[i].grid_x,
               launches[i].block_x);
}

static void launch(char *words) {
    char *rest = words, *name = strtok_r(rest, " ", &rest), *word;
    const unsigned shared = (unsigned)atoi(strtok_r(rest, " ", &rest));
    Attribute attributes[MAX_ATTRIBUTES] = {0};
    Config config = {.grid = {132, 1, 1}, .block = {128, 1, 1}, .shared = shared, .attributes = attributes};
    config.stream = (void *)(intptr_t)atoi(strtok_r(rest, " ", &rest));
    bool is_ex = false;
    int number, argument = 42;
    void *parameters[] = {&argument};
    while ((word = strtok_r(rest, " ", &rest))) {
        if (!strcmp(word, "ex")) is_ex = true;
        if (sscanf(word, "block=%d", &number) == 1) config.block[0] = (unsigned)number;
        if (!strcmp(word, "cooperative")) attributes[config.num_attributes++] = (Attribute){.id = 2, .value.number = 1};
        if (sscanf(word, "cluster=%d", &number) == 1)
            attributes[config.num_attributes++] = (Attribute){.id = 4, .value.cluster = {(unsigned)number, 1, 1}};
        if (sscanf(word, "priority=%d", &number) == 1)
            attributes[config.num_attributes++] = (Attribute){.id = 8, .value.number = number};
        if (sscanf(word, "attributes=%d", &number) == 1)
            while (config.num_attributes < (unsigned)number) attributes[config.num_attributes++] = (Attribute){.id = 9};
    }
    is_ex |= config.num_attributes > 0;
    void *kernel = kernel_named(name);
    const int result = is_ex ? launch_ex(&config, kernel, parameters, NULL)
                             : launch_kernel(kernel, 132, 1, 1, config.block[0], 1, 1, shared, config.stream, parameters, NULL);
    printf("result %d\n", result);
    print_launches();
}

static void cooperative(char *words) {
    char name[512];
    unsigned shared, stream;
    int argument = 42;
    void *parameters[] = {&argument};
    if (sscanf(words, "%511s %u %u", name, &shared, &stream) != 3) return;
    printf("result %d\n", launch_cooperative(kernel_named(name), 132, 1, 1, 128, 1, 1, shared, (void *)(intptr_t)stream, parameters));
    print_launches();
}

static void fork_and_launch(const char *name) {
    int argument = 42, status = 0;
    void *parameters[] = {&argument};
    fflush(stdout);
    const pid_t child = fork();
    if (!child) _exit(launch_kernel(kernel_named(name), 1, 1, 1, 32, 1, 1, 0, NULL, parameters, NULL));
    waitpid(child, &status, 0);
    printf("child %d %d\n", (int)child, status);
}

struct stress {
    int number, num_launches, num_failed;
};

static void *stress_thread(void *argument) {
    struct stress *stress = argument;
    int value = 7;
    void *parameters[] = {&value};
    for (int i = 0; i < stress->num_launches; i++) {
        void *kernel = kernels[(i + stress->number) % num_kernels].handle, *stream = (void *)(intptr_t)(stress->number + 1);
        Config config = {.grid = {8, 1, 1}, .block = {64, 1, 1}, .stream = stream};
        const int error = i % 2 ? launch_ex(&config, kernel, parameters, NULL)
                                : launch_kernel(kernel, 8, 1, 1, 64, 1, 1, 0, stream, parameters, NULL);
        stress->num_failed += error != 0;
        if (i % 1000 == 999) cuLibraryUnload(&value);  // fails, and leaves every kernel in doubt
    }
    return NULL;
}

#ifdef FILTER_LINKED_IN
#include "filter.h"
static uint32_t crc_of(uint32_t crc, const unsigned char *bytes, size_t size) {
    crc = ~crc;
    for (; size--; bytes++) {
        crc ^= *bytes;
        for (int bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (crc & 1 ? 0xEDB88320U : 0);
    }
    return ~crc;
}

static void store_words(void *to, const void *from, size_t size) {
    for (size_t i = 0; i < (size + 7) / 8; i++) STORE((uint64_t *)to + i, ((const uint64_t *)from)[i]);
}

// What ControlBlock.swap does, with one rule that changes every time.
static void swap_tables(const char *pattern, int num_swaps) {
    struct block_record *block = LOAD(&filter_block);
    for (int i = 0; block && i < num_swaps; i++) {
        static struct slot_record slot;
        const uint64_t generation = LOAD(&block->generation) + 1;
        memset(&slot, 0, sizeof slot);
        strcpy(slot.pool, pattern);
        slot.num_rules = 1;
        slot.pool_bytes = (uint32_t)strlen(pattern);
        slot.rules[0] = (struct rule_record){.pattern_bytes = slot.pool_bytes, .sets = HAS_CAP | HAS_CARVEOUT | HAS_PRIORITY | HAS_HOLD,
                                             .dynamic_shared_bytes = 30000 + 128 * (unsigned)i, .carveout_percent = 100,
                                             .priority = -1 - i % 5, .hold_us = 5};
        if (i % 3 == 2) slot.num_rules = 0;
        slot.checksum = crc_of(crc_of(0, (unsigned char *)slot.rules, slot.num_rules * sizeof *slot.rules),
                               (unsigned char *)slot.pool, slot.pool_bytes);
        slot.generation = generation;
        store_words(&block->slots[generation % NUM_SLOTS], &slot, sizeof slot);
        STORE(&block->generation, generation);
        usleep(300);  // lets launches in between; nothing depends on it
    }
}
#else
static void swap_tables(const char *pattern, int num_swaps) { (void)pattern, (void)num_swaps; }
#endif

static void stress(int num_threads, int num_launches, const char *pattern, int num_swaps) {
    pthread_t threads[32];
    struct stress work[32];
    int num_failed = 0;
    double_set_quiet(1);
    for (int i = 0; i < num_threads; i++) {
        work[i] = (struct stress){.number = i, .num_launches = num_launches};
        pthread_create(&threads[i], NULL, stress_thread, &work[i]);
    }
    if (num_swaps) swap_tables(pattern, num_swaps);
    for (int i = 0; i < num_threads; i++) {
        pthread_join(threads[i], NULL);
        num_failed += work[i].num_failed;
    }
    double_set_quiet(0);
    printf("failed %d\n", num_failed);
}

static void bench(int num_launches) {
    double best = 1e9;
    void *kernel = kernels[0].handle;
    double_set_quiet(1);
    for (int round = 0; round < 15; round++) {
        struct timespec start, end;
        clock_gettime(CLOCK_MONOTONIC, &start);
        for (int i = 0; i < num_launches; i++) launch_kernel(kernel, 132, 1, 1, 128, 1, 1, 0, NULL, NULL, NULL);
        clock_gettime(CLOCK_MONOTONIC, &end);
        const double ns = ((double)(end.tv_sec - start.tv_sec) * 1e9 + (double)(end.tv_nsec - start.tv_nsec)) / num_launches;
        best = ns < best ? ns : best;
    }
    double_set_quiet(0);
    printf("nanoseconds %.2f\n", best);
}

static void *many[MAX_MANY];
static int num_many;

static double nanoseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e9 + (double)now.tv_nsec;
}

static void launch_many(int num_rounds) {
    int num_failed = 0;
    const unsigned before = double_num_asked();
    double_set_quiet(1);
    const double start = nanoseconds();
    for (int round = 0; round < num_rounds; round++)
        for (int i = 0; i < num_many; i++)
            num_failed += launch_kernel(many[(i * 7919L) % num_many], 1, 1, 1, 32, 1, 1, 0, NULL, NULL, NULL) != 0;
    const double each = (nanoseconds() - start) / num_rounds / num_many;
    double_set_quiet(0);
    printf("failed %d asked %u nanoseconds %.1f\n", num_failed, double_num_asked() - before, each);
}

static void make_many(int count) {
    char name[64];
    for (num_many = 0; num_many < count && num_many < MAX_MANY; num_many++) {
        snprintf(name, sizeof name, "kernel_number_%d_of_many", num_many);
        many[num_many] = double_make(name, 0, 32, 0);
    }
    launch_many(1);
}

// Errors that a sanitizer must report.
static int planted[4];

static void *write_planted(void *place) {
    planted[*(volatile int *)place] += 1;
    return NULL;
}

static struct sigaction bus_before;

static void end_at_bus(int signal) {
    (void)signal;
    _exit(write(STDOUT_FILENO, "bus\n", 4) == 4 ? 5 : 6);
}

static void raise_bus_again(int signal) {
    sigaction(SIGBUS, &bus_before, NULL);
    raise(signal);
}

static void handle_bus(void (*handler)(int)) {
    const struct sigaction ours = {.sa_handler = handler, .sa_flags = SA_NODEFER};
    sigaction(SIGBUS, &ours, &bus_before);
}

static void plant_bus(void) {
    FILE *file = tmpfile();
    char *page = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fileno(file), 0);
    *(volatile char *)page = 1;
}

static void plant(const char *what) {
    if (!strcmp(what, "bus")) plant_bus();
    pthread_t threads[2];
    int place = !strcmp(what, "overflow") ? 5 : 1;
    for (int i = 0; i < 2; i++) pthread_create(&threads[i], NULL, write_planted, &place);
    for (int i = 0; i < 2; i++) pthread_join(threads[i], NULL);
}

struct limit {
    void *kernel;
    int bytes, after_us;
};

static void *set_limit(void *argument) {
    const struct limit *limit = argument;
    usleep((useconds_t)limit->after_us);
    cuFuncSetAttribute(limit->kernel, 8, limit->bytes);
    return NULL;
}

// This thread's sets take their time, so that the program's falls between the filter's question and its answer.
static void limit_beside(const char *name, int bytes, int after_us) {
    pthread_t thread;
    struct limit limit = {.kernel = kernel_named(name), .bytes = bytes, .after_us = after_us};
    double_delay_sets(20000);
    pthread_create(&thread, NULL, set_limit, &limit);
    const int first = launch_kernel(limit.kernel, 1, 1, 1, 32, 1, 1, 0, NULL, NULL, NULL);
    pthread_join(thread, NULL);
    double_delay_sets(0);
    const int second = launch_kernel(limit.kernel, 1, 1, 1, 32, 1, 1, (unsigned)bytes, NULL, NULL, NULL);
    printf("results %d %d\n", first, second);
    print_launches();
}

static void obey(char *line) {
    char name[2048] = "", word[64] = "";
    int a = 0, b = 0, c = 0;
    if (sscanf(line, "find %63s", word) == 1) printf("%s\n", find_by(word) ? "found" : "missing");
    if (sscanf(line, "make %2047s %d %d %63s", name, &a, &b, word) >= 3) {
        snprintf(kernels[num_kernels].name, sizeof kernels[0].name, "%s", name);
        kernels[num_kernels].handle = double_make(name, a, b, !strcmp(word, "kernel"));
        printf("handle %p\n", kernels[num_kernels++].handle);
    }
    if (!strncmp(line, "launch ", 7)) launch(line + 7);
    if (!strncmp(line, "cooperative ", 12)) cooperative(line + 12);
    if (sscanf(line, "unload %2047s", name) == 1) {
        printf("result %d\n", unload_module(kernel_named(name)));
        if (!strcmp(kernels[num_kernels - 1].name, name)) num_kernels--;
    }
    if (sscanf(line, "unload_library %2047s", name) == 1) printf("result %d\n", cuLibraryUnload(kernel_named(name)));
    if (!strcmp(line, "destroy")) printf("result %d\n", destroy_context((void *)1));
    if (sscanf(line, "destroy %2047s", name) == 1) printf("result %d\n", destroy_context(kernel_named(name)));
    if (sscanf(line, "refuse %2047s %d %d %d", name, &a, &b, &c) == 4) double_refuse(kernel_named(name), a, b, c);
    if (sscanf(line, "limit %2047s %d", name, &a) == 2) cuFuncSetAttribute(kernel_named(name), 8, a);
    if (sscanf(line, "limit_kernel %2047s %d", name, &a) == 2) cuKernelSetAttribute(8, a, kernel_named(name), 0);
    if (sscanf(line, "carveout %2047s %d", name, &a) == 2) cuFuncSetAttribute(kernel_named(name), 9, a);
    if (sscanf(line, "limit_beside %2047s %d %d", name, &a, &b) == 3) limit_beside(name, a, b);
    if (sscanf(line, "attributes %2047s", name) == 1)
        printf("attributes %d %d\n", double_attribute(kernel_named(name), 8), double_attribute(kernel_named(name), 9));
    if (sscanf(line, "capture %d %d", &a, &b) == 2) double_set_capturing(a, b);
    if (sscanf(line, "broken %d", &a) == 1) printf("broken %d\n", double_is_broken(a));
    if (sscanf(line, "context %d", &a) == 1) double_set_context(a);
    if (sscanf(line, "refuse_modules %d", &a) == 1) double_refuse_modules(a);
    if (sscanf(line, "fork %2047s", name) == 1) fork_and_launch(name);
    if (sscanf(line, "stress %d %d %2047s %d", &a, &b, name, &c) >= 2) stress(a, b, name, c);
    if (sscanf(line, "bench %d", &a) == 1) bench(a);
    if (sscanf(line, "many %d", &a) == 1) make_many(a);
    if (sscanf(line, "again %d", &a) == 1) launch_many(a);
    if (!strcmp(line, "asked")) printf("asked %u\n", double_num_asked());
    if (!strcmp(line, "handle_bus")) handle_bus(end_at_bus);
    if (!strcmp(line, "reraise_bus")) handle_bus(raise_bus_again);
    if (sscanf(line, "plant %63s", word) == 1) plant(word);
}

int main(void) {
    static char line[8192];
    while (fgets(line, sizeof line, stdin)) {
        line[strcspn(line, "\n")] = 0;
        obey(line);
        printf("ok\n");
        fflush(stdout);
    }
    return 0;
}
