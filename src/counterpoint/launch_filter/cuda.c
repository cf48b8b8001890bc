// CUDA's entry points. Each has two functions: one is exported, for callers that the linker or the search order leads here; the other is
// for callers that looked up the driver's own function. Both count the launch, change it if the plan says so, and pass it on to the
// function that the caller meant.
//
// If the driver refuses a changed launch, the filter launches it unchanged, and no longer changes this kernel. So no launch fails that
// would have succeeded. A refused launch would invalidate a stream capture, so during a capture only changes are made that the driver
// has accepted before. cuLaunchCooperativeKernel is counted, never changed.
#define _GNU_SOURCE
#include <string.h>

#include "cuda.h"

#define MAX_ATTRIBUTES 32  // more than CUDA 13.0 knows

static struct entry_point entry_points[];

// One launch by a caller: the next functions to call, and the arguments that are passed on unchanged.
struct call {
    cuLaunchKernel_function *launch;
    cuLaunchKernelEx_function *launch_ex;
    CUfunction kernel;
    void **parameters, **extra;
    bool is_ex, is_per_thread;
};

static CUresult pass_on(const struct call *call, const CUlaunchConfig *config) {
    if (call->is_ex || config->num_attributes) return call->launch_ex(config, call->kernel, call->parameters, call->extra);
    return call->launch(call->kernel, config->grid[0], config->grid[1], config->grid[2], config->block[0], config->block[1],
                        config->block[2], config->dynamic_shared_bytes, config->stream, call->parameters, call->extra);
}

// A caller's launch with the plan's changes.
struct changed_launch {
    CUlaunchConfig config;
    CUlaunchAttribute attributes[MAX_ATTRIBUTES];
    bool is_capped, is_prioritized;
};

static bool refuse(const struct decision *decision, unsigned rule, enum refusal code, uint32_t value) {
    count_refusal(decision, rule, (struct refused){code, value});
    return false;
}

static bool raise_shared_memory(const struct decision *decision, const struct launch *launch, CUlaunchConfig *config) {
    if (!decision->cap_bytes) return true;  // the rule sets the carveout alone
    if (launch->dynamic_shared_bytes > decision->cap_bytes)
        return refuse(decision, decision->cap_rule, REFUSED_USES_MORE, launch->dynamic_shared_bytes);
    config->dynamic_shared_bytes = decision->cap_bytes;
    return true;
}

static bool add_priority(const struct call *call, const struct decision *decision, struct changed_launch *changed) {
    CUlaunchConfig *config = &changed->config;
    if (!call->launch_ex) return refuse(decision, decision->priority_rule, REFUSED_NO_LAUNCH_EX, 0);
    unsigned place = 0;
    while (place < config->num_attributes && config->attributes[place].id != CU_LAUNCH_ATTRIBUTE_PRIORITY) place++;
    const bool is_there = place < config->num_attributes;
    if (is_there && config->attributes[place].value.priority <= decision->priority) return true;  // a lower number is greater
    if (config->num_attributes + !is_there > MAX_ATTRIBUTES)
        return refuse(decision, decision->priority_rule, REFUSED_ATTRIBUTES_FULL, config->num_attributes);
    if (config->num_attributes) memcpy(changed->attributes, config->attributes, config->num_attributes * sizeof(CUlaunchAttribute));
    memset(&changed->attributes[place], 0, sizeof(CUlaunchAttribute));
    changed->attributes[place].id = CU_LAUNCH_ATTRIBUTE_PRIORITY;
    changed->attributes[place].value.priority = decision->priority;
    config->attributes = changed->attributes;
    config->num_attributes += !is_there;
    return true;
}

static void count_applied(const struct decision *decision, const struct changed_launch *changed) {
    if (changed->is_capped) ADD(&counters_of(decision, decision->cap_rule)->num_capped, 1);
    if (changed->is_prioritized) ADD(&counters_of(decision, decision->priority_rule)->num_prioritized, 1);
    if (decision->record) ADD(&decision->record->num_changed, 1);
    set_proven(decision);
}

static void count_left(const struct decision *decision, struct refused refused) {
    if (decision->actions & CAP) count_refusal(decision, decision->cap_rule, refused);
    if (decision->actions & PRIORITIZE) count_refusal(decision, decision->priority_rule, refused);
}

// Handles a changed launch that the driver refused. The program may have lowered the kernel's limit after the cap was set, so the limit
// is raised once more. If that does not help, the caller's own launch is made, and this kernel is no longer changed.
static CUresult retry(const struct call *call, const struct launch *launch, const struct decision *decision,
                      const struct changed_launch *changed, const CUlaunchConfig *config, CUresult error) {
    struct counter_record *counters = counters_of(decision, changed->is_capped ? decision->cap_rule : decision->priority_rule);
    if (changed->is_capped && !set_cap_again(&cuda_calls, launch, decision).code &&
        pass_on(call, &changed->config) == CUDA_SUCCESS) {
        ADD(&counters->num_retried, 1);
        count_applied(decision, changed);
        return CUDA_SUCCESS;
    }
    const CUresult result = pass_on(call, config);
    if (result == CUDA_SUCCESS) {  // so the change was at fault
        ADD(&counters->num_retried, 1);
        give_up(decision);
        count_left(decision, (struct refused){REFUSED_BY_DRIVER, (uint32_t)error});
    }
    return result;
}

// Returns why a launch of a kernel with a cap or a priority must stay unchanged.
static struct refused obstacle(const struct call *call, const struct launch *launch, const struct decision *decision) {
    if (launch->is_cooperative) return (struct refused){REFUSED_COOPERATIVE, 0};
    if (is_given_up(decision)) return (struct refused){REFUSED_BY_DRIVER, 0};
    const CUstream stream = ((const CUlaunchConfig *)launch->config)->stream;
    if (!is_capturing(stream, call->is_per_thread)) return (struct refused){0};
    const bool is_safe =
        is_proven(decision) && (!(decision->actions & CAP) || has_room_for_cap(call->kernel, decision->cap_bytes));
    return is_safe ? (struct refused){0} : (struct refused){REFUSED_CAPTURED, 0};
}

static CUresult launch_changed(const struct call *call, const struct launch *launch, const struct decision *decision,
                               const CUlaunchConfig *config) {
    const struct refused refused = obstacle(call, launch, decision);
    if (refused.code) {
        count_left(decision, refused);
        return pass_on(call, config);
    }
    struct changed_launch changed;
    changed.config = *config;
    changed.is_capped = decision->actions & CAP && raise_shared_memory(decision, launch, &changed.config);
    changed.is_prioritized = decision->actions & PRIORITIZE && add_priority(call, decision, &changed);
    if (!changed.is_capped && !changed.is_prioritized) return pass_on(call, config);
    const CUresult result = pass_on(call, &changed.config);
    if (result != CUDA_SUCCESS) return retry(call, launch, decision, &changed, config, result);
    count_applied(decision, &changed);
    return result;
}

static CUresult launch_decided(const struct call *call, const struct launch *launch, const struct decision *decision,
                               const CUlaunchConfig *config) {
    if (decision->actions & HOLD) hold_if_racing(decision, config->stream, call->is_per_thread);
    CUresult result;
    if (decision->actions & (CAP | PRIORITIZE)) {
        result = launch_changed(call, launch, decision, config);
    } else {
        result = pass_on(call, config);
    }
    if (decision->actions & NOTE_COLLECTIVE && result == CUDA_SUCCESS) note_collective(config->stream, call->is_per_thread);
    return result;
}

static void read_attributes(const CUlaunchConfig *config, struct launch *launch) {
    for (unsigned i = 0; i < config->num_attributes; i++) {
        const CUlaunchAttribute *attribute = &config->attributes[i];
        if (attribute->id == CU_LAUNCH_ATTRIBUTE_COOPERATIVE) launch->is_cooperative |= attribute->value.cooperative != 0;
        if (attribute->id == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION)
            launch->ctas_per_cluster = attribute->value.cluster.x * attribute->value.cluster.y * attribute->value.cluster.z;
    }
}

// The positions of the launches in `entry_points`. The version for the per-thread default stream follows each.
enum { LAUNCH_KERNEL = 0, LAUNCH_KERNEL_EX = 2, LAUNCH_COOPERATIVE = 4 };

static void *real(unsigned place, enum route route) {
    void *found = LOAD(&entry_points[place].real[route]);
    return LIKELY(found != NULL) ? found : real_function(&cuda_library, &entry_points[place], route);
}

// Returns the function for a launch with a priority: that of the caller's library, or the driver's own.
static cuLaunchKernelEx_function *real_launch_ex(bool is_per_thread, enum route route) {
    cuLaunchKernelEx_function *found = (cuLaunchKernelEx_function *)real(LAUNCH_KERNEL_EX + is_per_thread, route);
    return found ? found : launch_ex_of_driver(is_per_thread);
}

static inline CUresult launch_kernel(enum route route, bool is_per_thread, CUfunction kernel, const CUlaunchConfig *config,
                                     void **parameters, void **extra) {
    cuLaunchKernel_function *next = (cuLaunchKernel_function *)real(LAUNCH_KERNEL + is_per_thread, route);
    if (UNLIKELY(!next)) return CUDA_ERROR_SHARED_OBJECT_SYMBOL_NOT_FOUND;
    const struct launch launch = {.kernel = (uintptr_t)kernel,
                                  .grid = {config->grid[0], config->grid[1], config->grid[2]},
                                  .block = {config->block[0], config->block[1], config->block[2]},
                                  .dynamic_shared_bytes = config->dynamic_shared_bytes,
                                  .config = config};
    struct decision decision;
    if (LIKELY(!decide(&cuda_calls, &launch, &decision)))
        return next(kernel, config->grid[0], config->grid[1], config->grid[2], config->block[0], config->block[1],
                    config->block[2], config->dynamic_shared_bytes, config->stream, parameters, extra);
    const struct call call = {.launch = next,
                              .launch_ex = real_launch_ex(is_per_thread, route),
                              .kernel = kernel,
                              .parameters = parameters,
                              .extra = extra,
                              .is_per_thread = is_per_thread};
    return launch_decided(&call, &launch, &decision, config);
}

static inline CUresult launch_kernel_ex(enum route route, bool is_per_thread, const CUlaunchConfig *config, CUfunction kernel,
                                        void **parameters, void **extra) {
    cuLaunchKernelEx_function *next = (cuLaunchKernelEx_function *)real(LAUNCH_KERNEL_EX + is_per_thread, route);
    if (UNLIKELY(!next)) return CUDA_ERROR_SHARED_OBJECT_SYMBOL_NOT_FOUND;
    if (UNLIKELY(!config)) return next(config, kernel, parameters, extra);  // the driver's error
    struct launch launch = {.kernel = (uintptr_t)kernel,
                            .grid = {config->grid[0], config->grid[1], config->grid[2]},
                            .block = {config->block[0], config->block[1], config->block[2]},
                            .dynamic_shared_bytes = config->dynamic_shared_bytes,
                            .is_ex = true,
                            .config = config};
    if (config->num_attributes) read_attributes(config, &launch);
    struct decision decision;
    if (LIKELY(!decide(&cuda_calls, &launch, &decision))) return next(config, kernel, parameters, extra);
    const struct call call = {.launch_ex = next,
                              .kernel = kernel,
                              .parameters = parameters,
                              .extra = extra,
                              .is_ex = true,
                              .is_per_thread = is_per_thread};
    return launch_decided(&call, &launch, &decision, config);
}

static inline CUresult launch_cooperative(enum route route, bool is_per_thread, CUfunction kernel, const CUlaunchConfig *config,
                                          void **parameters) {
    cuLaunchCooperativeKernel_function *next =
        (cuLaunchCooperativeKernel_function *)real(LAUNCH_COOPERATIVE + is_per_thread, route);
    if (UNLIKELY(!next)) return CUDA_ERROR_SHARED_OBJECT_SYMBOL_NOT_FOUND;
    const struct launch launch = {.kernel = (uintptr_t)kernel,
                                  .grid = {config->grid[0], config->grid[1], config->grid[2]},
                                  .block = {config->block[0], config->block[1], config->block[2]},
                                  .dynamic_shared_bytes = config->dynamic_shared_bytes,
                                  .is_cooperative = true,
                                  .config = config};
    struct decision decision;
    if (decide(&cuda_calls, &launch, &decision)) count_left(&decision, (struct refused){REFUSED_COOPERATIVE, 0});
    return next(kernel, config->grid[0], config->grid[1], config->grid[2], config->block[0], config->block[1], config->block[2],
                config->dynamic_shared_bytes, config->stream, parameters);
}

// --- look-ups by cuGetProcAddress ---------------------------------------------------------------------------------------------------

// Returns which of our entry points cuGetProcAddress means by a name: the newest that the requested version has.
static struct entry_point *point_by_base(const char *base, int version, uint64_t flags) {
    struct entry_point *chosen = NULL;
    for (size_t i = 0; i < cuda_library.num_entry_points; i++) {
        struct entry_point *point = &entry_points[i];
        const bool is_wanted = !point->is_launch ||
                               point->is_per_thread == !!(flags & CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM);
        if (is_wanted && point->since <= version && !strcmp(point->base, base) && (!chosen || point->since > chosen->since))
            chosen = point;
        if (strcmp(point->base, point->symbol) && !strcmp(point->symbol, base)) return point;  // asked for with its suffix
    }
    return chosen;
}

static void replace_address(const char *symbol, void **address, int version, uint64_t flags) {
    struct entry_point *point = symbol && address && *address ? point_by_base(symbol, version, flags) : NULL;
    if (point) *address = answer_for(&cuda_library, point, *address);
}

enum {
    GET_PROC_ADDRESS = 6, GET_PROC_ADDRESS_V2, FUNC_SET_ATTRIBUTE, KERNEL_SET_ATTRIBUTE, MODULE_UNLOAD, LIBRARY_UNLOAD,
    FIRST_OF_CONTEXTS,
};

static CUresult get_proc_address(enum route route, const char *symbol, void **address, int version, uint64_t flags) {
    cuGetProcAddress_function *next = (cuGetProcAddress_function *)real(GET_PROC_ADDRESS, route);
    if (!next) return CUDA_ERROR_SHARED_OBJECT_SYMBOL_NOT_FOUND;
    const CUresult result = next(symbol, address, version, flags);
    if (result == CUDA_SUCCESS) replace_address(symbol, address, version, flags);
    return result;
}

static CUresult get_proc_address_v2(enum route route, const char *symbol, void **address, int version, uint64_t flags, int *status) {
    cuGetProcAddress_v2_function *next = (cuGetProcAddress_v2_function *)real(GET_PROC_ADDRESS_V2, route);
    if (!next) return CUDA_ERROR_SHARED_OBJECT_SYMBOL_NOT_FOUND;
    const CUresult result = next(symbol, address, version, flags, status);
    if (result == CUDA_SUCCESS) replace_address(symbol, address, version, flags);
    return result;
}

// --- attributes that the program sets on kernels --------------------------------------------------------------------------------------

static void begin_programs_attribute(uintptr_t kernel, int attribute) {
    if (attribute == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) begin_programs_limit();
    if (attribute == CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT) note_programs_carveout(kernel);
}

static void end_programs_attribute(int attribute) {
    if (attribute == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) end_programs_limit();
}

static CUresult set_of_function(enum route route, CUfunction function, int attribute, int value) {
    cuFuncSetAttribute_function *next = (cuFuncSetAttribute_function *)real(FUNC_SET_ATTRIBUTE, route);
    if (!next) return CUDA_ERROR_SHARED_OBJECT_SYMBOL_NOT_FOUND;
    begin_programs_attribute((uintptr_t)function, attribute);
    const CUresult result = next(function, attribute, value);
    end_programs_attribute(attribute);
    return result;
}

static CUresult set_of_kernel(enum route route, int attribute, int value, CUkernel kernel, CUdevice device) {
    cuKernelSetAttribute_function *next = (cuKernelSetAttribute_function *)real(KERNEL_SET_ATTRIBUTE, route);
    if (!next) return CUDA_ERROR_SHARED_OBJECT_SYMBOL_NOT_FOUND;
    begin_programs_attribute((uintptr_t)kernel, attribute);
    const CUresult result = next(attribute, value, kernel, device);
    end_programs_attribute(attribute);
    return result;
}

// --- functions that free kernels, whose handles may be reused -------------------------------------------------------------------------

// The filter forgets the kernels first, because another thread may get the same handles as soon as the driver has freed them. No
// program launches a kernel while it unloads it.
static CUresult unload(unsigned place, enum route route, void *handle) {
    CUresult (*next)(void *) = (CUresult(*)(void *))real(place, route);
    if (!next) return CUDA_ERROR_SHARED_OBJECT_SYMBOL_NOT_FOUND;
    if (place == LIBRARY_UNLOAD) {
        forget_library((uintptr_t)handle);
    } else {
        forget_module((uintptr_t)handle);
    }
    return next(handle);
}

static CUresult end_context(unsigned place, enum route route, void *context) {
    CUresult (*next)(void *) = (CUresult(*)(void *))real(place, route);
    if (!next) return CUDA_ERROR_SHARED_OBJECT_SYMBOL_NOT_FOUND;
    const CUresult result = next(context);
    forget_contexts();
    return result;
}

static CUresult end_device_context(unsigned place, enum route route, CUdevice device) {
    CUresult (*next)(CUdevice) = (CUresult(*)(CUdevice))real(place, route);
    if (!next) return CUDA_ERROR_SHARED_OBJECT_SYMBOL_NOT_FOUND;
    const CUresult result = next(device);
    forget_contexts();
    return result;
}

// --- the entry points, each for both routes -------------------------------------------------------------------------------------------

// An alias exports `next_...` under the driver's name. In this file that name could mean another preloaded library's function.
#define BOTH_ROUTES(name, declared, call)                                                          \
    static CUresult next_##name declared { const enum route route = ROUTE_NEXT; return call; }     \
    static CUresult driver_##name declared { const enum route route = ROUTE_DRIVER; return call; } \
    EXPORTED CUresult name declared __attribute__((alias("next_" #name)));

#define SHAPE unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned bytes, CUstream stream
#define CONFIG &(const CUlaunchConfig){.grid = {gx, gy, gz}, .block = {bx, by, bz}, .dynamic_shared_bytes = bytes, .stream = stream}

BOTH_ROUTES(cuLaunchKernel, (CUfunction kernel, SHAPE, void **parameters, void **extra),
            launch_kernel(route, false, kernel, CONFIG, parameters, extra))
BOTH_ROUTES(cuLaunchKernel_ptsz, (CUfunction kernel, SHAPE, void **parameters, void **extra),
            launch_kernel(route, true, kernel, CONFIG, parameters, extra))
BOTH_ROUTES(cuLaunchKernelEx, (const CUlaunchConfig *config, CUfunction kernel, void **parameters, void **extra),
            launch_kernel_ex(route, false, config, kernel, parameters, extra))
BOTH_ROUTES(cuLaunchKernelEx_ptsz, (const CUlaunchConfig *config, CUfunction kernel, void **parameters, void **extra),
            launch_kernel_ex(route, true, config, kernel, parameters, extra))
BOTH_ROUTES(cuLaunchCooperativeKernel, (CUfunction kernel, SHAPE, void **parameters),
            launch_cooperative(route, false, kernel, CONFIG, parameters))
BOTH_ROUTES(cuLaunchCooperativeKernel_ptsz, (CUfunction kernel, SHAPE, void **parameters),
            launch_cooperative(route, true, kernel, CONFIG, parameters))
BOTH_ROUTES(cuGetProcAddress, (const char *symbol, void **address, int version, uint64_t flags),
            get_proc_address(route, symbol, address, version, flags))
BOTH_ROUTES(cuGetProcAddress_v2, (const char *symbol, void **address, int version, uint64_t flags, int *status),
            get_proc_address_v2(route, symbol, address, version, flags, status))
BOTH_ROUTES(cuFuncSetAttribute, (CUfunction function, int attribute, int value), set_of_function(route, function, attribute, value))
BOTH_ROUTES(cuKernelSetAttribute, (int attribute, int value, CUkernel kernel, CUdevice device),
            set_of_kernel(route, attribute, value, kernel, device))
BOTH_ROUTES(cuModuleUnload, (CUmodule module), unload(MODULE_UNLOAD, route, module))
BOTH_ROUTES(cuLibraryUnload, (CUlibrary library), unload(LIBRARY_UNLOAD, route, library))
BOTH_ROUTES(cuCtxDestroy, (CUcontext context), end_context(FIRST_OF_CONTEXTS, route, context))
BOTH_ROUTES(cuCtxDestroy_v2, (CUcontext context), end_context(FIRST_OF_CONTEXTS + 1, route, context))
BOTH_ROUTES(cuDevicePrimaryCtxReset, (CUdevice device), end_device_context(FIRST_OF_CONTEXTS + 2, route, device))
BOTH_ROUTES(cuDevicePrimaryCtxReset_v2, (CUdevice device), end_device_context(FIRST_OF_CONTEXTS + 3, route, device))
BOTH_ROUTES(cuDevicePrimaryCtxRelease, (CUdevice device), end_device_context(FIRST_OF_CONTEXTS + 4, route, device))
BOTH_ROUTES(cuDevicePrimaryCtxRelease_v2, (CUdevice device), end_device_context(FIRST_OF_CONTEXTS + 5, route, device))

#define POINT(name, base_name, version, per_thread, launches)                                                             \
    {.symbol = #name, .base = #base_name, .since = version, .is_per_thread = per_thread, .is_launch = launches,           \
     .own = {(void *)next_##name, (void *)driver_##name}}

static struct entry_point entry_points[] = {  // in the order of the enums above
    POINT(cuLaunchKernel, cuLaunchKernel, 4000, false, true),
    POINT(cuLaunchKernel_ptsz, cuLaunchKernel, 7000, true, true),
    POINT(cuLaunchKernelEx, cuLaunchKernelEx, 11060, false, true),
    POINT(cuLaunchKernelEx_ptsz, cuLaunchKernelEx, 11060, true, true),
    POINT(cuLaunchCooperativeKernel, cuLaunchCooperativeKernel, 9000, false, true),
    POINT(cuLaunchCooperativeKernel_ptsz, cuLaunchCooperativeKernel, 9000, true, true),
    POINT(cuGetProcAddress, cuGetProcAddress, 11030, false, false),
    POINT(cuGetProcAddress_v2, cuGetProcAddress, 12000, false, false),
    POINT(cuFuncSetAttribute, cuFuncSetAttribute, 9000, false, false),
    POINT(cuKernelSetAttribute, cuKernelSetAttribute, 12000, false, false),
    POINT(cuModuleUnload, cuModuleUnload, 2000, false, false),
    POINT(cuLibraryUnload, cuLibraryUnload, 12000, false, false),
    POINT(cuCtxDestroy, cuCtxDestroy, 2000, false, false),
    POINT(cuCtxDestroy_v2, cuCtxDestroy, 4000, false, false),
    POINT(cuDevicePrimaryCtxReset, cuDevicePrimaryCtxReset, 7000, false, false),
    POINT(cuDevicePrimaryCtxReset_v2, cuDevicePrimaryCtxReset, 11000, false, false),
    POINT(cuDevicePrimaryCtxRelease, cuDevicePrimaryCtxRelease, 7000, false, false),
    POINT(cuDevicePrimaryCtxRelease_v2, cuDevicePrimaryCtxRelease, 11000, false, false),
};

HIDDEN const struct driver_library cuda_library = {
    .loaded_names = {"libcuda.so.1"},
    .file_prefix = "libcuda.so",
    .entry_points = entry_points,
    .num_entry_points = sizeof entry_points / sizeof *entry_points,
};
