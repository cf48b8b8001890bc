// A program that launches at random before the double of libcuda, and knows which of its launches must succeed.
//
//   filter_campaign SEED THREADS LAUNCHES FORKS PLUGIN
//
// Each thread has kernels of its own and knows their limits of shared memory: what it set, or read. All threads share some more, whose
// limits only rise. A launch within the limit would succeed without the launch filter, so one that fails is counted. In between,
// limits are set, read and lowered, modules unloaded and loaded again (on the handles that were freed), a library whose constructor
// launches is opened and closed, and processes are forked. Compiled with PLUGIN it is that library.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "../tests/helpers/cuda_launch.h"
#include "../tests/helpers/libcuda_double.h"

int cuLaunchKernel(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **);
int cuLaunchKernelEx(const Config *, void *, void **, void **);
int cuLaunchCooperativeKernel(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **);
int cuModuleUnload(void *), cuLibraryUnload(void *);
int cuFuncSetAttribute(void *, int, int);

#ifdef PLUGIN
static void *kernel;
int num_failed_in_plugin;

__attribute__((constructor)) static void launch_first(void) {
    kernel = double_make("_Z14capped_in_initv", 0, 32, 0);
    num_failed_in_plugin = cuLaunchKernel(kernel, 1, 1, 1, 32, 1, 1, 40000, NULL, NULL, NULL) != 0;
}
__attribute__((destructor)) static void unload_last(void) { cuModuleUnload(kernel); }
#else

enum { OWNED = 12, SHARED = 4, MAX_THREADS = 16, LIMIT = 8, CARVEOUT = 9, FREE_BYTES = 49152, MOST = 232448 };
static const char *const names[] = {"capped_a", "capped_b", "gemm", "ncclDevKernel_AllReduce", "_Z3addIfEvPT_i", "elementwise",
                                    "_Z6kernelv", "attention"};
static const int round_bytes[] = {20000, 60000, 80000, 100000, 200000};  // as the tables' caps

struct kernel {
    void *handle;
    const char *name;
    int fixed, limit;
};
struct counts {
    long launches, beyond, failed, sets, reads, unloads, opened, forks;
};
struct worker {
    uint64_t random;
    long num_launches, num_forks;
    struct kernel kernels[OWNED];
    struct counts counts;
};

static struct kernel shared[SHARED];
static pthread_mutex_t setting = PTHREAD_MUTEX_INITIALIZER, loading = PTHREAD_MUTEX_INITIALIZER;
static const char *plugin;

static unsigned draw(struct worker *worker, unsigned below) {
    worker->random ^= worker->random << 13;
    worker->random ^= worker->random >> 7;
    worker->random ^= worker->random << 17;
    return (unsigned)(worker->random >> 33) % below;
}

static void load(struct worker *worker, struct kernel *kernel) {
    if (!kernel->name || draw(worker, 2)) kernel->name = names[draw(worker, sizeof names / sizeof *names)];
    kernel->fixed = draw(worker, 3) ? 0 : 1024;
    kernel->limit = FREE_BYTES - kernel->fixed;
    kernel->handle = double_make(kernel->name, kernel->fixed, 32, 0);
}

static int launch(struct worker *worker, void *kernel, unsigned bytes) {
    void *stream = (void *)(intptr_t)(1 + draw(worker, 5));
    Attribute attributes[2] = {{.id = 4, .value.cluster = {1 + draw(worker, 4), 1, 1}}, {.id = 8, .value.number = -(int)draw(worker, 4)}};
    const Config config = {{8, 1, 1}, {64, 1, 1}, bytes, stream, attributes, draw(worker, 3)};
    const unsigned how = draw(worker, 20);
    if (!how) return cuLaunchCooperativeKernel(kernel, 8, 1, 1, 64, 1, 1, bytes, stream, NULL);
    if (how < 8) return cuLaunchKernelEx(&config, kernel, NULL, NULL);
    return cuLaunchKernel(kernel, 8, 1, 1, 64, 1, 1, bytes, stream, NULL, NULL);
}

static void launch_within(struct worker *worker, const struct kernel *kernel) {
    const int limit = __atomic_load_n(&kernel->limit, __ATOMIC_ACQUIRE);
    const int bytes = draw(worker, 4) ? (int)draw(worker, (unsigned)limit + 1) : limit;
    worker->counts.failed += launch(worker, kernel->handle, (unsigned)bytes) != 0;
    worker->counts.launches++;
}

static int some_bytes(struct worker *worker, int fixed) {
    const int chosen = draw(worker, 2) ? round_bytes[draw(worker, 5)] : (int)draw(worker, MOST);
    return chosen + fixed > MOST ? MOST - fixed : chosen;
}

static void set_own(struct worker *worker, struct kernel *kernel) {
    const int bytes = some_bytes(worker, kernel->fixed);
    worker->counts.sets++;
    if (!cuFuncSetAttribute(kernel->handle, LIMIT, bytes)) kernel->limit = bytes;
    if (!draw(worker, 4)) cuFuncSetAttribute(kernel->handle, CARVEOUT, draw(worker, 2) ? 100 : -1);
}

static void raise_shared(struct worker *worker) {
    struct kernel *kernel = &shared[draw(worker, SHARED)];
    const int bytes = some_bytes(worker, kernel->fixed);
    pthread_mutex_lock(&setting);
    if (bytes > kernel->limit && !cuFuncSetAttribute(kernel->handle, LIMIT, bytes)) {
        __atomic_store_n(&kernel->limit, bytes, __ATOMIC_RELEASE);
        worker->counts.sets++;
    }
    pthread_mutex_unlock(&setting);
}

static void read_own(struct worker *worker, struct kernel *kernel) {  // and rely on it
    kernel->limit = double_attribute(kernel->handle, LIMIT);
    worker->counts.reads++;
}

static void reload(struct worker *worker, struct kernel *kernel) {
    cuModuleUnload(kernel->handle);
    load(worker, kernel);
    worker->counts.unloads++;
}

static void open_and_close(struct worker *worker) {
    pthread_mutex_lock(&loading);
    void *library = dlopen(plugin, RTLD_NOW | RTLD_LOCAL);
    const int *failed = library ? (const int *)dlsym(library, "num_failed_in_plugin") : NULL;
    worker->counts.failed += failed ? *failed : 1;
    worker->counts.launches++;
    if (library) dlclose(library);
    pthread_mutex_unlock(&loading);
    worker->counts.opened++;
}

static void fork_and_launch(struct worker *worker) {
    int status = 0;
    fflush(stdout);
    pthread_mutex_lock(&loading);  // a fork amid another thread's dlopen leaves the child no loader to rely on
    const pid_t child = fork();
    if (!child) {
        alarm(60);
        worker->counts.failed = 0;
        for (int i = 0; i < 200; i++) launch_within(worker, &worker->kernels[draw(worker, OWNED)]);
        _exit(worker->counts.failed ? 1 : 0);
    }
    pthread_mutex_unlock(&loading);
    waitpid(child, &status, 0);
    worker->counts.failed += status != 0;
    worker->counts.launches += 200;
    worker->counts.forks++;
}

static void *work(void *argument) {
    struct worker *worker = argument;
    const long between = worker->num_forks ? worker->num_launches / (worker->num_forks + 1) : worker->num_launches;
    for (int i = 0; i < OWNED; i++) load(worker, &worker->kernels[i]);
    while (worker->counts.launches < worker->num_launches) {
        struct kernel *kernel = &worker->kernels[draw(worker, OWNED)];
        const unsigned what = draw(worker, 10000);
        if (what < 200) set_own(worker, kernel);
        else if (what < 300) read_own(worker, kernel);
        else if (what < 320) raise_shared(worker);
        else if (what < 340) reload(worker, kernel);
        else if (what < 342) cuLibraryUnload(&kernel);  // fails, and leaves every kernel in doubt
        else if (what < 343) open_and_close(worker);
        else if (what < 443) worker->counts.beyond += launch(worker, kernel->handle, MOST + 1) != 0;
        else if (what < 2000) launch_within(worker, &shared[draw(worker, SHARED)]);
        else launch_within(worker, kernel);
        if (worker->counts.forks < worker->num_forks && worker->counts.launches > between * (worker->counts.forks + 1))
            fork_and_launch(worker);
    }
    return NULL;
}

int main(int count, char **words) {
    static struct worker workers[MAX_THREADS];
    pthread_t threads[MAX_THREADS];
    struct counts all = {0};
    if (count != 6) return 2;
    const int num_threads = atoi(words[2]);
    plugin = words[5];
    double_set_quiet(1);
    for (int i = 0; i < SHARED; i++)
        shared[i] = (struct kernel){.handle = double_make(names[i], 0, 32, 0), .name = names[i], .limit = FREE_BYTES};
    for (int i = 0; i < num_threads; i++) {
        workers[i] = (struct worker){.random = (strtoull(words[1], NULL, 10) * MAX_THREADS + (unsigned)i + 1) * 0x9E3779B97F4A7C15ULL,
                                     .num_launches = atol(words[3]) / num_threads, .num_forks = i ? 0 : atol(words[4])};
        pthread_create(&threads[i], NULL, work, &workers[i]);
    }
    for (int i = 0; i < num_threads; i++) {
        pthread_join(threads[i], NULL);
        const long *part = (const long *)&workers[i].counts;
        for (size_t j = 0; j < sizeof all / sizeof(long); j++) ((long *)&all)[j] += part[j];
    }
    printf("{\"launches\": %ld, \"launches_beyond_limits\": %ld, \"failed\": %ld, \"limits_set\": %ld, \"limits_read\": %ld, "
           "\"unloads\": %ld, \"libraries_opened\": %ld, \"forks\": %ld}\n",
           all.launches, all.beyond, all.failed, all.sets, all.reads, all.unloads, all.opened, all.forks);
    return 0;
}
#endif
