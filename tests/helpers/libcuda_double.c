// A test double of libcuda.so.1: it launches nothing, checks what a driver would check, and notes every launch that reaches it.
//
// Structures and numbers are written here a second time, after cuda.h, so that a slip in the filter's own declarations shows. What it
// imitates: limits of dynamic shared memory, the carveout, occupancy by shared memory on an SM of 228 KiB, handles of either kind,
// modules whose handles are used again, stream capture that an error ends, errors on request.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "libcuda_double.h"

#define EXPORT __attribute__((visibility("default")))
enum { SUCCESS = 0, INVALID_VALUE = 1, INVALID_CONTEXT = 201, INVALID_HANDLE = 400, NOT_FOUND = 500, CAPTURE_UNSUPPORTED = 900 };
enum { OPTIN_BYTES = 232448 };
enum { MAX_HANDLES = 32768, FREE = 0, FUNCTION = 1, KERNEL = 2 };

struct handle {
    int kind;
    char name[2048];
    int static_bytes, registers, max_dynamic, carveout;
    int refuse_shared_above, refuse_priority;  // errors; 0 refuses nothing
    int shared_limit;
    bool is_unloaded;         // code that is loaded when it is first used
    struct handle *function;  // of a kernel
};

static struct handle handles[MAX_HANDLES];
static int first_free;  // no handle before it is free
static bool streams_capturing[DOUBLE_STREAMS], streams_broken[DOUBLE_STREAMS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct double_launch noted[DOUBLE_LAUNCHES];
static unsigned num_noted, num_asked;
static int is_quiet, refuse_module;
static __thread int set_delay_us;
static __thread int capture_mode;
static __thread uintptr_t current_context = 0xC0;

static bool is_handle(const void *pointer, int kind) {
    const struct handle *handle = pointer;
    return handle >= handles && handle < handles + MAX_HANDLES && handle->kind == kind;
}

static struct handle *function_of(void *pointer) {
    if (is_handle(pointer, KERNEL)) return ((struct handle *)pointer)->function;
    return is_handle(pointer, FUNCTION) ? pointer : NULL;
}

static int stream_index(const void *stream) { return (int)((uintptr_t)stream % DOUBLE_STREAMS); }

static int any_capturing(void) {
    for (int i = 0; i < DOUBLE_STREAMS; i++)
        if (streams_capturing[i]) return i;
    return -1;
}

static void lock_before_fork(void) { pthread_mutex_lock(&lock); }
static void unlock_after_fork(void) { pthread_mutex_unlock(&lock); }
__attribute__((constructor)) static void watch_forks(void) {
    pthread_atfork(lock_before_fork, unlock_after_fork, unlock_after_fork);
}

// --- what tests set up and read -------------------------------------------------------------------------------------------------

EXPORT void *double_make(const char *name, int static_bytes, int registers, int is_kernel) {
    pthread_mutex_lock(&lock);
    struct handle *made[2] = {NULL, NULL};
    for (int n = 0; first_free < MAX_HANDLES && n < 1 + is_kernel; first_free++)
        if (handles[first_free].kind == FREE) made[n++] = &handles[first_free];
    if (!made[is_kernel]) abort();  // a test makes too many
    for (int i = 0; i <= is_kernel; i++) {
        *made[i] = (struct handle){.kind = FUNCTION, .static_bytes = static_bytes, .registers = registers,
                                   .max_dynamic = 49152 - static_bytes, .carveout = -1};
        snprintf(made[i]->name, sizeof made[i]->name, "%s", name);
    }
    if (is_kernel) {
        made[1]->kind = KERNEL;
        made[1]->function = made[0];
    }
    pthread_mutex_unlock(&lock);
    return made[is_kernel];
}

EXPORT void double_refuse(void *function, int shared_error, int shared_limit, int priority_error) {
    struct handle *handle = function_of(function);
    handle->refuse_shared_above = shared_error;
    handle->shared_limit = shared_limit;
    handle->refuse_priority = priority_error;
}

EXPORT void double_refuse_modules(int error) { refuse_module = error; }
EXPORT void double_set_capturing(int stream, int is_capturing) {
    streams_capturing[stream] = is_capturing;
    streams_broken[stream] = false;
}
EXPORT int double_is_broken(int stream) { return streams_broken[stream]; }
EXPORT void double_set_context(int number) { current_context = 0xC0 + (uintptr_t)number; }
EXPORT unsigned double_num_asked(void) { return __atomic_load_n(&num_asked, __ATOMIC_RELAXED); }
EXPORT void double_delay_sets(int microseconds) { set_delay_us = microseconds; }
EXPORT void double_set_quiet(int quiet) { is_quiet = quiet; }
EXPORT int double_attribute(void *function, int attribute) {
    const struct handle *handle = function_of(function);
    return attribute == 8 ? handle->max_dynamic : handle->carveout;
}

EXPORT unsigned double_take_launches(struct double_launch *to, unsigned most) {
    pthread_mutex_lock(&lock);
    const unsigned count = num_noted < most ? num_noted : most;
    memcpy(to, noted, count * sizeof *to);
    num_noted = 0;
    pthread_mutex_unlock(&lock);
    return count;
}

// --- launches -------------------------------------------------------------------------------------------------------------------

typedef struct {
    int id;
    int pad;
    union {
        char pad[64];
        int cooperative, priority;
        unsigned clusterDim[3];
    } value;
} Attribute;

typedef struct {
    unsigned gridDimX, gridDimY, gridDimZ, blockDimX, blockDimY, blockDimZ, sharedMemBytes;
    void *hStream;
    Attribute *attrs;
    unsigned numAttrs;
} Config;

static int fail(int stream, int error) {
    if (streams_capturing[stream]) streams_broken[stream] = true;
    return error;
}

static int run(const char *api, void *handle, const Config *config, void **parameters) {
    struct handle *function = function_of(handle);
    const int stream = stream_index(config->hStream);
    struct double_launch launch = {.api = api, .shared_bytes = config->sharedMemBytes, .stream = (int)(intptr_t)config->hStream,
                                   .num_attributes = config->numAttrs, .priority = 1};
    if (!function || function->is_unloaded) return fail(stream, INVALID_HANDLE);  // a driver would load it now, and might wait
    for (unsigned i = 0; i < config->numAttrs; i++)
        if (config->attrs[i].id == 8) launch.priority = config->attrs[i].value.priority;
    if ((int)config->sharedMemBytes > __atomic_load_n(&function->max_dynamic, __ATOMIC_ACQUIRE)) return fail(stream, INVALID_VALUE);
    if (function->refuse_shared_above && (int)config->sharedMemBytes > function->shared_limit)
        return fail(stream, function->refuse_shared_above);
    if (function->refuse_priority && launch.priority <= 0) return fail(stream, function->refuse_priority);
    if (is_quiet) return SUCCESS;
    launch.grid_x = config->gridDimX;
    launch.block_x = config->blockDimX;
    if (!strcmp(function->name, "counterpoint_hold")) memcpy(&launch.hold_ns, parameters[0], sizeof launch.hold_ns);
    else if (parameters) launch.argument = *(int *)parameters[0];
    snprintf(launch.name, sizeof launch.name, "%.95s", function->name);
    pthread_mutex_lock(&lock);
    if (num_noted < DOUBLE_LAUNCHES) noted[num_noted++] = launch;
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}

#define SHAPE unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, void *stream
#define CONFIG &(Config){gx, gy, gz, bx, by, bz, shared, stream, NULL, 0}

EXPORT int cuLaunchKernel(void *f, SHAPE, void **parameters, void **extra) {
    (void)extra;
    return run("cuLaunchKernel", f, CONFIG, parameters);
}
EXPORT int cuLaunchKernel_ptsz(void *f, SHAPE, void **parameters, void **extra) {
    (void)extra;
    return run("cuLaunchKernel_ptsz", f, CONFIG, parameters);
}
EXPORT int cuLaunchKernelEx(const Config *config, void *f, void **parameters, void **extra) {
    (void)extra;
    return config ? run("cuLaunchKernelEx", f, config, parameters) : INVALID_VALUE;
}
EXPORT int cuLaunchKernelEx_ptsz(const Config *config, void *f, void **parameters, void **extra) {
    (void)extra;
    return config ? run("cuLaunchKernelEx_ptsz", f, config, parameters) : INVALID_VALUE;
}
EXPORT int cuLaunchCooperativeKernel(void *f, SHAPE, void **parameters) {
    return run("cuLaunchCooperativeKernel", f, CONFIG, parameters);
}
EXPORT int cuLaunchCooperativeKernel_ptsz(void *f, SHAPE, void **parameters) {
    return run("cuLaunchCooperativeKernel_ptsz", f, CONFIG, parameters);
}

// --- kernels and modules --------------------------------------------------------------------------------------------------------

EXPORT int cuFuncGetName(const char **name, void *f) {
    __atomic_fetch_add(&num_asked, 1, __ATOMIC_RELAXED);
    if (!is_handle(f, FUNCTION)) return INVALID_HANDLE;
    *name = ((struct handle *)f)->name;
    return SUCCESS;
}
EXPORT int cuKernelGetName(const char **name, void *k) {
    if (!is_handle(k, KERNEL)) return INVALID_HANDLE;
    *name = ((struct handle *)k)->name;
    return SUCCESS;
}
EXPORT int cuKernelGetFunction(void **f, void *k) {
    if (!is_handle(k, KERNEL)) return INVALID_HANDLE;
    *f = ((struct handle *)k)->function;
    return SUCCESS;
}
EXPORT int cuFuncGetAttribute(int *value, int attribute, void *f) {
    if (!is_handle(f, FUNCTION)) return INVALID_HANDLE;
    struct handle *handle = f;
    switch (attribute) {
        case 1: *value = handle->static_bytes; return SUCCESS;
        case 4: *value = handle->registers; return SUCCESS;
        case 8: *value = __atomic_load_n(&handle->max_dynamic, __ATOMIC_ACQUIRE); return SUCCESS;
        case 9: *value = __atomic_load_n(&handle->carveout, __ATOMIC_ACQUIRE); return SUCCESS;
        default: return INVALID_VALUE;
    }
}
EXPORT int cuFuncSetAttribute(void *f, int attribute, int value) {
    if (!is_handle(f, FUNCTION)) return INVALID_HANDLE;
    struct handle *handle = f;
    if (set_delay_us) usleep((useconds_t)set_delay_us);
    if (attribute == 8 && value + handle->static_bytes > OPTIN_BYTES) return INVALID_VALUE;
    if (attribute == 8) __atomic_store_n(&handle->max_dynamic, value, __ATOMIC_RELEASE);
    if (attribute == 9) __atomic_store_n(&handle->carveout, value, __ATOMIC_RELEASE);
    return attribute == 8 || attribute == 9 ? SUCCESS : INVALID_VALUE;
}
EXPORT int cuKernelSetAttribute(int attribute, int value, void *k, int device) {
    if (!is_handle(k, KERNEL) || device) return INVALID_HANDLE;
    return cuFuncSetAttribute(((struct handle *)k)->function, attribute, value);
}
EXPORT int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *count, void *f, int threads, size_t shared) {
    const struct handle *handle = function_of(f);
    if (!handle) return INVALID_HANDLE;
    const int by_shared = (int)(233472 / ((shared + (size_t)handle->static_bytes + 1024 + 127) / 128 * 128));
    const int by_threads = 2048 / threads;
    *count = by_shared < by_threads ? by_shared : by_threads;
    return SUCCESS;
}
EXPORT int cuOccupancyMaxActiveClusters(int *count, void *f, const Config *config) {
    const struct handle *handle = function_of(f);
    if (!handle || !config->numAttrs) return INVALID_VALUE;
    *count = config->sharedMemBytes > DOUBLE_CLUSTER_LIMIT ? 0 : 16;
    return SUCCESS;
}
EXPORT int cuModuleLoadData(void **module, const void *image) {
    const int capturing = any_capturing();
    if (capturing >= 0 && capture_mode != 2) return fail(capturing, CAPTURE_UNSUPPORTED);
    if (refuse_module) return refuse_module;
    dlclose(dlopen(NULL, RTLD_LAZY));  // as a driver that loads its PTX compiler
    if (!strstr(image, ".visible .entry counterpoint_hold")) return INVALID_VALUE;
    *module = (void *)"module of the head start";
    return SUCCESS;
}
EXPORT int cuModuleGetFunction(void **f, void *module, const char *name) {
    if (!module || strcmp(name, "counterpoint_hold")) return NOT_FOUND;
    *f = double_make(name, 0, 16, 0);
    ((struct handle *)*f)->is_unloaded = true;
    return SUCCESS;
}
EXPORT int cuFuncLoad(void *f) {
    if (!is_handle(f, FUNCTION)) return INVALID_HANDLE;
    ((struct handle *)f)->is_unloaded = false;
    return SUCCESS;
}
// In this double a module holds one function, and its handle is the module's; what is made next takes its place.
EXPORT int cuModuleUnload(void *module) {
    if (!is_handle(module, FUNCTION) && !is_handle(module, KERNEL)) return INVALID_HANDLE;
    pthread_mutex_lock(&lock);
    struct handle *freed[] = {module, ((struct handle *)module)->function};  // a kernel's function goes with it
    for (int i = 0; i < 2 && freed[i]; i++) {
        const int place = (int)(freed[i] - handles);
        handles[place].kind = FREE;
        if (place < first_free) first_free = place;
    }
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}
EXPORT int cuFuncGetModule(void **module, void *f) {
    if (!is_handle(f, FUNCTION)) return INVALID_HANDLE;
    *module = f;
    return SUCCESS;
}
EXPORT int cuKernelGetLibrary(void **library, void *k) {
    if (!is_handle(k, KERNEL)) return INVALID_HANDLE;
    *library = k;
    return SUCCESS;
}
EXPORT int cuLibraryUnload(void *library) { return cuModuleUnload(library); }
// A context that a module is in has the module's handle, and takes it along.
EXPORT int cuCtxDestroy_v2(void *context) {
    if (is_handle(context, FUNCTION) || is_handle(context, KERNEL)) return cuModuleUnload(context);
    return context ? SUCCESS : INVALID_CONTEXT;
}
EXPORT int cuDevicePrimaryCtxReset_v2(int device) { return device ? INVALID_VALUE : SUCCESS; }
EXPORT int cuDevicePrimaryCtxRelease_v2(int device) { return device ? INVALID_VALUE : SUCCESS; }

// --- contexts and streams -------------------------------------------------------------------------------------------------------

EXPORT int cuCtxGetCurrent(void **context) {
    *context = (void *)current_context;
    return SUCCESS;
}
EXPORT int cuCtxGetDevice(int *device) {
    *device = 0;
    return SUCCESS;
}
EXPORT int cuDeviceGetAttribute(int *value, int attribute, int device) {
    *value = OPTIN_BYTES;
    return attribute == 97 && !device ? SUCCESS : INVALID_VALUE;
}
EXPORT int cuCtxGetStreamPriorityRange(int *least, int *greatest) {
    *least = 0;
    *greatest = -5;
    return SUCCESS;
}
EXPORT int cuStreamIsCapturing(void *stream, int *status) {
    *status = streams_capturing[stream_index(stream)];
    return SUCCESS;
}
EXPORT int cuStreamIsCapturing_ptsz(void *stream, int *status) { return cuStreamIsCapturing(stream, status); }
EXPORT int cuThreadExchangeStreamCaptureMode(int *mode) {
    __atomic_fetch_add(&num_asked, 1, __ATOMIC_RELAXED);
    const int before = capture_mode;
    capture_mode = *mode;
    *mode = before;
    return SUCCESS;
}

// --- look-ups by name and version -------------------------------------------------------------------------------------------------

EXPORT int cuGetProcAddress_v2(const char *symbol, void **address, int version, uint64_t flags, int *status);

EXPORT int cuGetProcAddress(const char *symbol, void **address, int version, uint64_t flags) {
    const bool is_per_thread = flags & 2;
    *address = NULL;
#define ANSWER(name, since) \
    if (!strcmp(symbol, #name) && version >= since) *address = is_per_thread ? (void *)name##_ptsz : (void *)name
    ANSWER(cuLaunchKernel, 4000);
    ANSWER(cuLaunchKernelEx, 11060);
    ANSWER(cuLaunchCooperativeKernel, 9000);
    if (!strcmp(symbol, "cuGetProcAddress")) *address = version >= 12000 ? (void *)cuGetProcAddress_v2 : (void *)cuGetProcAddress;
    if (!strcmp(symbol, "cuModuleUnload")) *address = (void *)cuModuleUnload;
    if (!strcmp(symbol, "cuFuncSetAttribute")) *address = (void *)cuFuncSetAttribute;
    if (!strcmp(symbol, "cuKernelSetAttribute")) *address = (void *)cuKernelSetAttribute;
    return *address ? SUCCESS : NOT_FOUND;
}
EXPORT int cuGetProcAddress_v2(const char *symbol, void **address, int version, uint64_t flags, int *status) {
    const int result = cuGetProcAddress(symbol, address, version, flags);
    if (status) *status = result == SUCCESS ? 0 : 1;
    return result;
}
