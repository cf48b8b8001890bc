// What the controls need of the CUDA driver: a kernel's name and footprint, a cap with its carveout, the range of priorities, the head
// start. Nothing here launches for the user, and nothing here can make one of the user's launches fail.
//
// A cap raises MAX_DYNAMIC_SHARED_SIZE_BYTES and the carveout of the function. Without the first, the driver refuses more shared memory;
// without the second, no other kernel can use the freed room (measured: NCCL becomes co-resident only with the carveout raised). The
// limit is never lowered. The carveout makes no launch fail, so it is restored. A head start is a kernel of one thread that waits; it is
// launched in the stream of a kernel that would race a collective.
#define _GNU_SOURCE
#include <string.h>

#include "cuda.h"

#define MAX_CONTEXTS 64  // a power of two

// The PTX of the head start kernel; the driver requires the zero byte at its end.
__asm__(".pushsection .rodata\n.balign 16\nhold_image:\n.incbin \"" HOLD_PTX "\"\n.byte 0\n.popsection\n");
extern const char hold_image[] HIDDEN;

#define DRIVER_FUNCTIONS(FUNCTION)                                                                 \
    FUNCTION(cuFuncGetName, const char **, CUfunction)                                             \
    FUNCTION(cuKernelGetName, const char **, CUkernel)                                             \
    FUNCTION(cuKernelGetFunction, CUfunction *, CUkernel)                                          \
    FUNCTION(cuFuncGetAttribute, int *, int, CUfunction)                                           \
    FUNCTION(cuFuncSetAttribute, CUfunction, int, int)                                             \
    FUNCTION(cuOccupancyMaxActiveBlocksPerMultiprocessor, int *, CUfunction, int, size_t)          \
    FUNCTION(cuOccupancyMaxActiveClusters, int *, CUfunction, const CUlaunchConfig *)              \
    FUNCTION(cuCtxGetCurrent, CUcontext *)                                                         \
    FUNCTION(cuCtxGetStreamPriorityRange, int *, int *)                                            \
    FUNCTION(cuStreamIsCapturing, CUstream, int *)                                                 \
    FUNCTION(cuStreamIsCapturing_ptsz, CUstream, int *)                                            \
    FUNCTION(cuThreadExchangeStreamCaptureMode, int *)                                             \
    FUNCTION(cuModuleLoadData, CUmodule *, const void *)                                           \
    FUNCTION(cuModuleGetFunction, CUfunction *, CUmodule, const char *)                            \
    FUNCTION(cuCtxGetDevice, CUdevice *)                                                           \
    FUNCTION(cuDeviceGetAttribute, int *, int, CUdevice)                                           \
    FUNCTION(cuFuncLoad, CUfunction)                                                               \
    FUNCTION(cuFuncGetModule, CUmodule *, CUfunction)                                              \
    FUNCTION(cuKernelGetLibrary, CUlibrary *, CUkernel)

#define DECLARE(name, ...) CUresult (*name)(__VA_ARGS__);
static struct driver_functions {
    DRIVER_FUNCTIONS(DECLARE)
    cuLaunchKernelEx_function *launch_ex[2];  // by per-thread default stream
    cuLaunchKernel_function *launch[2];
} cu;
static bool is_cu_complete;

// What head starts need of one context: the last collective, whether a kernel was held for it, and the kernel that holds.
static struct context_notes {
    CUcontext context;
    uint64_t num_collectives, num_answered;
    uintptr_t collective_stream;
    CUfunction hold;
    uint32_t hold_epoch;  // epoch of the contexts when it was loaded
} contexts[MAX_CONTEXTS];
static uint32_t context_epoch = 1;

// Calls the dynamic loader with no lock held. Two threads may both call it; they find the same functions.
#define FIND(name, ...) found.name = (CUresult(*)(__VA_ARGS__))driver_symbol(&cuda_library, #name);
static void find_driver_functions(void) {
    if (LOAD(&is_cu_complete)) return;
    struct driver_functions found;
    DRIVER_FUNCTIONS(FIND)
    found.launch[0] = (cuLaunchKernel_function *)driver_symbol(&cuda_library, "cuLaunchKernel");
    found.launch[1] = (cuLaunchKernel_function *)driver_symbol(&cuda_library, "cuLaunchKernel_ptsz");
    found.launch_ex[0] = (cuLaunchKernelEx_function *)driver_symbol(&cuda_library, "cuLaunchKernelEx");
    found.launch_ex[1] = (cuLaunchKernelEx_function *)driver_symbol(&cuda_library, "cuLaunchKernelEx_ptsz");
    pthread_mutex_lock(&filter_lock);
    if (!is_cu_complete) cu = found;
    STORE(&is_cu_complete, true);
    pthread_mutex_unlock(&filter_lock);
    if (!found.cuFuncGetName) report_problem("this CUDA driver is older than 12.3 and does not tell kernels' names; update it.");
}

HIDDEN cuLaunchKernelEx_function *launch_ex_of_driver(bool is_per_thread) { return cu.launch_ex[is_per_thread]; }

// --- kernels ----------------------------------------------------------------------------------------------------------------------

// Returns the function of a handle in the current context. The handle may be a CUkernel, which cuFuncGetName refuses.
static CUfunction function_of(CUfunction handle, const char **name) {
    CUfunction function = handle;
    *name = NULL;
    if (!cu.cuFuncGetName) return NULL;
    if (cu.cuFuncGetName(name, handle) == CUDA_SUCCESS) return handle;
    CUkernel kernel = (CUkernel)handle;
    if (!cu.cuKernelGetName || cu.cuKernelGetName(name, kernel) != CUDA_SUCCESS) return NULL;
    if (!cu.cuKernelGetFunction || cu.cuKernelGetFunction(&function, kernel) != CUDA_SUCCESS) return NULL;
    return function;
}

// Returns a kernel's module or library; `forget_module` and `forget_library` get the same value when it is unloaded.
static uintptr_t owner_of(CUfunction handle, CUfunction function) {
    CUlibrary library = NULL;
    CUmodule module = NULL;
    if (function != handle)
        return cu.cuKernelGetLibrary && !cu.cuKernelGetLibrary(&library, (CUkernel)handle) ? (uintptr_t)library : 0;
    return cu.cuFuncGetModule && !cu.cuFuncGetModule(&module, function) ? (uintptr_t)module : 0;
}

static bool describe(uintptr_t kernel, struct kernel_facts *facts) {
    int value = 0;
    const CUfunction handle = (CUfunction)kernel, function = function_of(handle, &facts->name);
    if (!function || !cu.cuFuncGetAttribute) return facts->name != NULL;
    if (!cu.cuFuncGetAttribute(&value, CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, function))
        facts->static_shared_bytes = (uint32_t)value;
    if (!cu.cuFuncGetAttribute(&value, CU_FUNC_ATTRIBUTE_NUM_REGS, function)) facts->registers_per_thread = (uint32_t)value;
    facts->owner = owner_of(handle, function);
    return true;
}

// --- caps -------------------------------------------------------------------------------------------------------------------------

static void undo_cap(uintptr_t kernel, struct cap_state *cap) {
    const char *name;
    const CUfunction function = function_of((CUfunction)kernel, &name);
    int now;
    if (function && !LOAD_RELAXED(&cap->is_programs) &&
        !cu.cuFuncGetAttribute(&now, CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, function) && now == cap->carveout)
        cu.cuFuncSetAttribute(function, CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, cap->carveout_before);
    cap->is_set = false;
}

static struct refused ask_driver(CUfunction function, const struct launch *launch, uint32_t bytes, int *residency) {
    const int threads = (int)(launch->block[0] * launch->block[1] * launch->block[2]);
    if (!cu.cuOccupancyMaxActiveBlocksPerMultiprocessor) return (struct refused){REFUSED_OCCUPANCY_UNKNOWN, CUDA_ERROR_NOT_FOUND};
    CUresult error = cu.cuOccupancyMaxActiveBlocksPerMultiprocessor(residency, function, threads, bytes);
    if (error) return (struct refused){REFUSED_OCCUPANCY_UNKNOWN, (uint32_t)error};
    if (*residency < 1) return (struct refused){REFUSED_NO_CTA_FITS, 0};
    if (launch->ctas_per_cluster <= 1) return (struct refused){0};
    int num_clusters = 0;
    CUlaunchConfig config = *(const CUlaunchConfig *)launch->config;
    config.dynamic_shared_bytes = bytes;
    if (!cu.cuOccupancyMaxActiveClusters) return (struct refused){REFUSED_OCCUPANCY_UNKNOWN, CUDA_ERROR_NOT_FOUND};
    error = cu.cuOccupancyMaxActiveClusters(&num_clusters, function, &config);
    if (error) return (struct refused){REFUSED_OCCUPANCY_UNKNOWN, (uint32_t)error};
    return num_clusters < 1 ? (struct refused){REFUSED_NO_CLUSTER_FITS, 0} : (struct refused){0};
}

// How often the program itself has set a limit of shared memory, on any kernel.
static uint64_t num_limits_begun, num_limits_done;

HIDDEN void begin_programs_limit(void) { __atomic_fetch_add(&num_limits_begun, 1, __ATOMIC_SEQ_CST); }
HIDDEN void end_programs_limit(void) { __atomic_fetch_add(&num_limits_done, 1, __ATOMIC_SEQ_CST); }

// Returns the highest limit of dynamic shared memory for the function on this device; 0 if the driver does not tell.
static int most_bytes(CUfunction function) {
    CUdevice device;
    int all = 0, fixed = 0;
    if (!cu.cuCtxGetDevice || !cu.cuDeviceGetAttribute || cu.cuCtxGetDevice(&device)) return 0;
    if (cu.cuDeviceGetAttribute(&all, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, device)) return 0;
    if (cu.cuFuncGetAttribute(&fixed, CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, function)) return 0;
    return all - fixed;
}

// The program may set this limit between our query and our call, which would overwrite it. If the program set any limit meanwhile,
// this one becomes the highest possible: no launch needs more.
static CUresult raise_limit(CUfunction function, int wanted) {
    int bytes = 0;
    const uint64_t done = __atomic_load_n(&num_limits_done, __ATOMIC_SEQ_CST);
    const uint64_t begun = __atomic_load_n(&num_limits_begun, __ATOMIC_SEQ_CST);
    CUresult error = cu.cuFuncGetAttribute(&bytes, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, function);
    if (error || bytes >= wanted) return error;
    error = cu.cuFuncSetAttribute(function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, wanted);
    if (done == begun && begun == __atomic_load_n(&num_limits_begun, __ATOMIC_SEQ_CST)) return error;
    const int most = most_bytes(function);
    if (!error && most > wanted)
        cu.cuFuncSetAttribute(function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, most);
    return error;
}

static CUresult raise(CUfunction function, const struct rule_record *rule, struct cap_state *cap) {
    int carveout = -1;
    CUresult error = raise_limit(function, (int)rule->dynamic_shared_bytes);
    if (!error) error = cu.cuFuncGetAttribute(&carveout, CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, function);
    if (error) return error;
    // Otherwise the program has set it, or a context has ended with the kernel, and a new one of its name has the handle.
    const bool is_ours = cap->is_set && !LOAD_RELAXED(&cap->is_programs) && carveout == cap->carveout;
    if (!is_ours) cap->carveout_before = carveout;
    cap->is_set = true;
    STORE_RELAXED(&cap->is_programs, false);
    cap->carveout = rule->sets & HAS_CARVEOUT ? rule->carveout_percent : cap->carveout_before;
    if (cap->carveout == carveout) return CUDA_SUCCESS;
    return cu.cuFuncSetAttribute(function, CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, cap->carveout);
}

static struct refused set_cap(const struct launch *launch, const struct rule_record *rule, struct cap_state *cap, int *residency) {
    const char *name;
    const CUfunction function = function_of((CUfunction)launch->kernel, &name);
    if (!function || !cu.cuFuncGetAttribute || !cu.cuFuncSetAttribute)
        return (struct refused){REFUSED_ATTRIBUTE, CUDA_ERROR_NOT_FOUND};
    const CUresult error = raise(function, rule, cap);
    struct refused refused = {error ? REFUSED_ATTRIBUTE : 0, (uint32_t)error};
    const uint32_t bytes = rule->dynamic_shared_bytes ? rule->dynamic_shared_bytes : launch->dynamic_shared_bytes;
    if (!error) refused = ask_driver(function, launch, bytes, residency);
    if (refused.code && cap->is_set) undo_cap(launch->kernel, cap);
    return refused;
}

HIDDEN bool has_room_for_cap(CUfunction kernel, uint32_t bytes) {
    const char *name;
    const CUfunction function = function_of(kernel, &name);
    int now = 0;
    return function && !cu.cuFuncGetAttribute(&now, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, function) &&
           now >= (int)bytes;
}

// --- priority ---------------------------------------------------------------------------------------------------------------------

static struct refused check_priority(int priority) {
    int least = 0, greatest = 0;
    if (!cu.launch_ex[0]) return (struct refused){REFUSED_NO_LAUNCH_EX, 0};
    if (cu.cuCtxGetStreamPriorityRange && !cu.cuCtxGetStreamPriorityRange(&least, &greatest) && priority < greatest)
        return (struct refused){REFUSED_PRIORITY_RANGE, (uint32_t)-greatest};
    return (struct refused){0};
}

// --- head starts ------------------------------------------------------------------------------------------------------------------

HIDDEN bool is_capturing(CUstream stream, bool is_per_thread) {
    int status = CU_STREAM_CAPTURE_STATUS_NONE;
    CUresult (*ask)(CUstream, int *) = is_per_thread ? cu.cuStreamIsCapturing_ptsz : cu.cuStreamIsCapturing;
    return !ask || ask(stream, &status) != CUDA_SUCCESS || status != CU_STREAM_CAPTURE_STATUS_NONE;
}

// Lets this thread load code while another thread captures.
static __thread int capture_mode;

static void enter(void) {
    find_driver_functions();
    capture_mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    if (cu.cuThreadExchangeStreamCaptureMode && cu.cuThreadExchangeStreamCaptureMode(&capture_mode) != CUDA_SUCCESS)
        capture_mode = -1;
}

static void leave(void) {
    if (cu.cuThreadExchangeStreamCaptureMode && capture_mode >= 0) cu.cuThreadExchangeStreamCaptureMode(&capture_mode);
}

static struct context_notes *notes_of_context(void) {
    CUcontext context = NULL;
    if (!cu.cuCtxGetCurrent || cu.cuCtxGetCurrent(&context) != CUDA_SUCCESS || !context) return NULL;
    uint32_t place = (uint32_t)((uint64_t)(uintptr_t)context * 0x9E3779B97F4A7C15ULL >> 58);
    for (int probe = 0; probe < MAX_CONTEXTS; probe++, place = (place + 1) % MAX_CONTEXTS) {
        CUcontext found = LOAD(&contexts[place].context), nothing = NULL;
        if (!found && __atomic_compare_exchange_n(&contexts[place].context, &nothing, context, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
            found = context;
        if (found == context || nothing == context) return &contexts[place];
    }
    return NULL;  // further contexts get no head starts
}

static uintptr_t stream_number(CUstream stream, bool is_per_thread) {
    if (stream) return (uintptr_t)stream;
    return is_per_thread ? CU_STREAM_PER_THREAD : CU_STREAM_LEGACY;
}

HIDDEN void note_collective(CUstream stream, bool is_per_thread) {
    if (is_capturing(stream, is_per_thread)) return;  // a captured launch does not run now
    struct context_notes *notes = notes_of_context();
    if (!notes) return;
    STORE_RELAXED(&notes->collective_stream, stream_number(stream, is_per_thread));
    __atomic_fetch_add(&notes->num_collectives, 1, __ATOMIC_ACQ_REL);
}

static struct refused prepare_hold(void) {
    struct context_notes *notes = notes_of_context();
    const uint32_t epoch = LOAD(&context_epoch);
    CUmodule module = NULL;
    CUfunction hold = NULL;
    if (!notes || !cu.cuModuleLoadData || !cu.cuModuleGetFunction || !cu.launch[0])
        return (struct refused){REFUSED_HOLD_NOT_LOADED, CUDA_ERROR_NOT_FOUND};
    if (LOAD(&notes->hold_epoch) == epoch) return (struct refused){0};
    CUresult error = cu.cuModuleLoadData(&module, hold_image);  // stays loaded until the context ends
    if (!error) error = cu.cuModuleGetFunction(&hold, module, "counterpoint_hold");
    if (!error && cu.cuFuncLoad) error = cu.cuFuncLoad(hold);  // since CUDA 12.4; otherwise the first head start would load it
    if (error) return (struct refused){REFUSED_HOLD_NOT_LOADED, (uint32_t)error};
    STORE(&notes->hold, hold);
    STORE(&notes->hold_epoch, epoch);
    return (struct refused){0};
}

// Returns the kernel that holds a stream of this context; NULL if it was never loaded.
static CUfunction hold_of(const struct context_notes *notes) {
    return LOAD(&notes->hold_epoch) == LOAD(&context_epoch) ? LOAD(&notes->hold) : NULL;
}

HIDDEN void hold_if_racing(const struct decision *decision, CUstream stream, bool is_per_thread) {
    struct context_notes *notes = notes_of_context();
    if (!notes) return;
    const uint64_t collective = LOAD(&notes->num_collectives);
    uint64_t answered = LOAD(&notes->num_answered);
    if (collective == answered || LOAD_RELAXED(&notes->collective_stream) == stream_number(stream, is_per_thread)) return;
    if (is_capturing(stream, is_per_thread)) {
        count_refusal(decision, decision->hold_rule, (struct refused){REFUSED_CAPTURED, 0});
        return;
    }
    if (!__atomic_compare_exchange_n(&notes->num_answered, &answered, collective, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
        return;  // a kernel of another stream is already held for this collective
    const CUfunction hold = hold_of(notes);
    if (!hold) {
        count_refusal(decision, decision->hold_rule, (struct refused){REFUSED_HOLD_NOT_LOADED, CUDA_ERROR_NOT_FOUND});
        return;
    }
    uint64_t duration_ns = decision->hold_ns;
    void *parameters[] = {&duration_ns};
    cuLaunchKernel_function *launch = cu.launch[is_per_thread] ? cu.launch[is_per_thread] : cu.launch[0];
    const CUresult error = launch(hold, 1, 1, 1, 1, 1, 1, 0, stream, parameters, NULL);
    if (error) {
        count_refusal(decision, decision->hold_rule, (struct refused){REFUSED_HOLD_LAUNCH, (uint32_t)error});
    } else {
        ADD(&counters_of(decision, decision->hold_rule)->num_held, 1);
    }
}

HIDDEN void forget_contexts(void) {
    __atomic_fetch_add(&context_epoch, 1, __ATOMIC_ACQ_REL);
    forget_handles();
}

HIDDEN const struct driver_calls cuda_calls = {
    .kind = DRIVER_CUDA,
    .describe = describe,
    .set_cap = set_cap,
    .undo_cap = undo_cap,
    .check_priority = check_priority,
    .prepare_hold = prepare_hold,
    .enter = enter,
    .leave = leave,
};
