// HIP's entry points and controls, from the same table of rules. EXPERIMENTAL, and built on request only: it has never run on AMD
// hardware and is tested against a double.
//
// What differs from CUDA:
// - A kernel is the address of its host stub, or a function of a module.
// - More dynamic shared memory needs no attribute, up to 64 KiB for a workgroup.
// - A launch has no priority. A stream gets one when it is created, and ROCm ignores that unless DEBUG_HIP_IGNORE_STREAM_PRIORITY=0. So
//   priorities are refused with this reason.
// - Head starts are refused, because a kernel that waits would have to be compiled for each GPU.
#define _GNU_SOURCE
#include <string.h>

#include "filter.h"
#include "hip_abi.h"

static struct entry_point entry_points[];

#define HIP_FUNCTIONS(FUNCTION)                                                                                       \
    FUNCTION(const char *, hipKernelNameRef, hipFunction_t)                                                           \
    FUNCTION(const char *, hipKernelNameRefByPtr, const void *, hipStream_t)                                          \
    FUNCTION(hipError_t, hipGetFuncBySymbol, hipFunction_t *, const void *)                                           \
    FUNCTION(hipError_t, hipFuncGetAttribute, int *, int, hipFunction_t)                                              \
    FUNCTION(hipError_t, hipModuleOccupancyMaxActiveBlocksPerMultiprocessor, int *, hipFunction_t, int, size_t)       \
    FUNCTION(hipError_t, hipOccupancyMaxActiveBlocksPerMultiprocessor, int *, const void *, int, size_t)              \
    FUNCTION(hipError_t, hipStreamIsCapturing, hipStream_t, int *)

#define DECLARE(result, name, ...) result (*name)(__VA_ARGS__);
static struct hip_functions {
    HIP_FUNCTIONS(DECLARE)
} hip;
static bool is_hip_complete;

#define FIND(result, name, ...) found.name = (result(*)(__VA_ARGS__))driver_symbol(&hip_library, #name);
static void enter(void) {  // the dynamic loader is called with no lock held
    if (LOAD(&is_hip_complete)) return;
    struct hip_functions found;
    HIP_FUNCTIONS(FIND)
    pthread_mutex_lock(&filter_lock);
    const bool is_first = !is_hip_complete;
    if (is_first) hip = found;
    STORE(&is_hip_complete, true);
    pthread_mutex_unlock(&filter_lock);
    if (is_first) say("the launch filter for AMD GPUs is experimental: it has never run on AMD hardware.");
}

static void leave(void) {}

// --- controls -----------------------------------------------------------------------------------------------------------------------

static void read_footprint(hipFunction_t function, struct kernel_facts *facts) {
    int value = 0;
    if (!hip.hipFuncGetAttribute) return;
    if (!hip.hipFuncGetAttribute(&value, HIP_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, function))
        facts->static_shared_bytes = (uint32_t)value;
    if (!hip.hipFuncGetAttribute(&value, HIP_FUNC_ATTRIBUTE_NUM_REGS, function)) facts->registers_per_thread = (uint32_t)value;
}

static bool describe_function(uintptr_t kernel, struct kernel_facts *facts) {
    facts->name = hip.hipKernelNameRef ? hip.hipKernelNameRef((hipFunction_t)kernel) : NULL;
    if (facts->name) read_footprint((hipFunction_t)kernel, facts);
    return facts->name != NULL;
}

static bool describe_stub(uintptr_t kernel, struct kernel_facts *facts) {
    hipFunction_t function;
    facts->name = hip.hipKernelNameRefByPtr ? hip.hipKernelNameRefByPtr((const void *)kernel, NULL) : NULL;
    if (facts->name && hip.hipGetFuncBySymbol && !hip.hipGetFuncBySymbol(&function, (const void *)kernel))
        read_footprint(function, facts);
    return facts->name != NULL;
}

static struct refused judge_cap(hipError_t error, int residency) {
    if (error) return (struct refused){REFUSED_OCCUPANCY_UNKNOWN, (uint32_t)error};
    return residency < 1 ? (struct refused){REFUSED_NO_CTA_FITS, 0} : (struct refused){0};
}

static struct refused set_cap_of(const struct launch *launch, const struct rule_record *rule, bool is_stub, int *residency) {
    if (!rule->dynamic_shared_bytes) return (struct refused){REFUSED_NO_CARVEOUT_IN_HIP, 0};
    const int threads = (int)(launch->block[0] * launch->block[1] * launch->block[2]);
    struct kernel_facts facts = {0};
    if (is_stub) {
        describe_stub(launch->kernel, &facts);
    } else {
        describe_function(launch->kernel, &facts);
    }
    const uint32_t bytes = rule->dynamic_shared_bytes, together = bytes + facts.static_shared_bytes;
    if (together > HIP_WORKGROUP_SHARED_BYTES) return (struct refused){REFUSED_WORKGROUP_LIMIT, together};
    hipError_t error = hipErrorNotFound;
    if (is_stub && hip.hipOccupancyMaxActiveBlocksPerMultiprocessor)
        error = hip.hipOccupancyMaxActiveBlocksPerMultiprocessor(residency, (const void *)launch->kernel, threads, bytes);
    if (!is_stub && hip.hipModuleOccupancyMaxActiveBlocksPerMultiprocessor)
        error = hip.hipModuleOccupancyMaxActiveBlocksPerMultiprocessor(residency, (hipFunction_t)launch->kernel, threads, bytes);
    return judge_cap(error, *residency);
}

static struct refused set_cap_of_function(const struct launch *launch, const struct rule_record *rule, struct cap_state *cap,
                                          int *residency) {
    (void)cap;  // nothing was set on the kernel, so there is nothing to restore
    return set_cap_of(launch, rule, false, residency);
}

static struct refused set_cap_of_stub(const struct launch *launch, const struct rule_record *rule, struct cap_state *cap,
                                      int *residency) {
    (void)cap;
    return set_cap_of(launch, rule, true, residency);
}

static void undo_cap(uintptr_t kernel, struct cap_state *cap) {
    (void)kernel;
    cap->is_set = false;
}

static struct refused check_priority(int priority) {
    (void)priority;
    return (struct refused){REFUSED_NO_PRIORITY_IN_HIP, 0};
}

static struct refused prepare_hold(void) { return (struct refused){REFUSED_NO_HOLD_IN_HIP, 0}; }

#define CALLS(kernel)                                                                                                     \
    {.kind = DRIVER_HIP, .describe = describe_##kernel, .set_cap = set_cap_of_##kernel, .undo_cap = undo_cap,             \
     .check_priority = check_priority, .prepare_hold = prepare_hold, .enter = enter, .leave = leave}
static const struct driver_calls function_calls = CALLS(function), stub_calls = CALLS(stub);

// --- launches -----------------------------------------------------------------------------------------------------------------------

// One launch by a caller: how to make it with a given number of bytes, and the arguments that are passed on unchanged.
struct hip_call {
    hipError_t (*go)(const struct hip_call *, size_t dynamic_shared_bytes);
    void *real;
    const struct launch *launch;
    hipStream_t stream;
    const void *config;
    void **parameters, **extra;
    hipEvent_t start, stop;
    int flags;
};

static bool is_capturing(hipStream_t stream) {
    int status = hipStreamCaptureStatusNone;
    return !hip.hipStreamIsCapturing || hip.hipStreamIsCapturing(stream, &status) || status != hipStreamCaptureStatusNone;
}

static struct refused obstacle(const struct hip_call *call, const struct decision *decision) {
    if (call->launch->is_cooperative) return (struct refused){REFUSED_COOPERATIVE, 0};
    if (is_given_up(decision)) return (struct refused){REFUSED_BY_DRIVER, 0};
    if (call->launch->dynamic_shared_bytes > decision->cap_bytes)
        return (struct refused){REFUSED_USES_MORE, call->launch->dynamic_shared_bytes};
    return !is_proven(decision) && is_capturing(call->stream) ? (struct refused){REFUSED_CAPTURED, 0} : (struct refused){0};
}

// Launches with the cap, unless something forbids it. If the driver refuses that, makes the caller's own launch, and no longer
// changes this kernel.
static hipError_t launch_capped(const struct hip_call *call, const struct decision *decision) {
    struct counter_record *counters = counters_of(decision, decision->cap_rule);
    const struct refused refused = obstacle(call, decision);
    if (refused.code) {
        count_refusal(decision, decision->cap_rule, refused);
        return call->go(call, call->launch->dynamic_shared_bytes);
    }
    const hipError_t error = call->go(call, decision->cap_bytes);
    if (error == hipSuccess) {
        ADD(&counters->num_capped, 1);
        if (decision->record) ADD(&decision->record->num_changed, 1);
        set_proven(decision);
        return hipSuccess;
    }
    const hipError_t result = call->go(call, call->launch->dynamic_shared_bytes);
    if (result == hipSuccess) {
        ADD(&counters->num_retried, 1);
        give_up(decision);
        count_refusal(decision, decision->cap_rule, (struct refused){REFUSED_BY_DRIVER, (uint32_t)error});
    }
    return result;
}

#define GO(name) static hipError_t go_##name(const struct hip_call *call, size_t bytes)
#define GRID ((dim3){call->launch->grid[0], call->launch->grid[1], call->launch->grid[2]})
#define BLOCK ((dim3){call->launch->block[0], call->launch->block[1], call->launch->block[2]})
#define STUB ((const void *)call->launch->kernel)
#define FUNCTION_AND_SHAPE                                                                                      \
    (hipFunction_t)call->launch->kernel, call->launch->grid[0], call->launch->grid[1], call->launch->grid[2],   \
        call->launch->block[0], call->launch->block[1], call->launch->block[2]

GO(hipLaunchKernel) {
    return ((hipLaunchKernel_function *)call->real)(STUB, GRID, BLOCK, call->parameters, bytes, call->stream);
}
GO(hipExtLaunchKernel) {
    return ((hipExtLaunchKernel_function *)call->real)(STUB, GRID, BLOCK, call->parameters, bytes, call->stream, call->start,
                                                       call->stop, call->flags);
}
GO(hipLaunchCooperativeKernel) {
    return ((hipLaunchCooperativeKernel_function *)call->real)(STUB, GRID, BLOCK, call->parameters, (unsigned)bytes, call->stream);
}
GO(hipLaunchKernelExC) {
    hipLaunchConfig_t config = *(const hipLaunchConfig_t *)call->config;
    config.dynamic_shared_bytes = bytes;
    return ((hipLaunchKernelExC_function *)call->real)(&config, STUB, call->parameters);
}
GO(hipModuleLaunchKernel) {
    return ((hipModuleLaunchKernel_function *)call->real)(FUNCTION_AND_SHAPE, (unsigned)bytes, call->stream, call->parameters,
                                                          call->extra);
}
GO(hipExtModuleLaunchKernel) {  // its grid counts work items
    const uint32_t *block = call->launch->block, *items = call->config;
    return ((hipExtModuleLaunchKernel_function *)call->real)((hipFunction_t)call->launch->kernel, items[0], items[1], items[2],
                                                             block[0], block[1], block[2], bytes, call->stream, call->parameters,
                                                             call->extra, call->start, call->stop, (uint32_t)call->flags);
}
GO(hipModuleLaunchCooperativeKernel) {
    return ((hipModuleLaunchCooperativeKernel_function *)call->real)(FUNCTION_AND_SHAPE, (unsigned)bytes, call->stream,
                                                                     call->parameters);
}
GO(hipDrvLaunchKernelEx) {
    HIP_LAUNCH_CONFIG config = *(const HIP_LAUNCH_CONFIG *)call->config;
    config.dynamic_shared_bytes = (unsigned)bytes;
    return ((hipDrvLaunchKernelEx_function *)call->real)(&config, (hipFunction_t)call->launch->kernel, call->parameters, call->extra);
}

static bool asks_for_barrier(const hipLaunchAttribute *attributes, unsigned count) {
    for (unsigned i = 0; i < count; i++)
        if (attributes[i].id == hipLaunchAttributeCooperative && attributes[i].value.cooperative) return true;
    return false;
}

// --- the entry points, each for both routes, as in cuda.c ------------------------------------------------------------------------------

enum {
    LAUNCH_KERNEL, LAUNCH_KERNEL_SPT, EXT_LAUNCH_KERNEL, LAUNCH_COOPERATIVE, LAUNCH_EXC, MODULE_LAUNCH, EXT_MODULE_LAUNCH,
    MODULE_COOPERATIVE, DRV_LAUNCH_EX, GET_PROC_ADDRESS, MODULE_UNLOAD,
};

static void *real(unsigned place, enum route route) { return real_function(&hip_library, &entry_points[place], route); }

#define LAUNCH(handle, g0, g1, g2, b0, b1, b2, bytes, cooperative, ex)                                                     \
    .launch = &(const struct launch){.kernel = (uintptr_t)(handle), .grid = {g0, g1, g2}, .block = {b0, b1, b2},           \
                                     .dynamic_shared_bytes = (uint32_t)(bytes), .is_cooperative = cooperative, .is_ex = ex}

static hipError_t launch_by(const struct driver_calls *calls, enum route route, unsigned place, const struct hip_call *asked) {
    struct hip_call call = *asked;
    struct decision decision;
    call.real = real(place, route);
    if (UNLIKELY(!call.real)) return hipErrorNotFound;
    if (LIKELY(!decide(calls, call.launch, &decision) || !(decision.actions & CAP)))
        return call.go(&call, call.launch->dynamic_shared_bytes);
    return launch_capped(&call, &decision);
}

static hipError_t launch_exc(enum route route, const hipLaunchConfig_t *config, const void *stub, void **parameters) {
    hipLaunchKernelExC_function *next = (hipLaunchKernelExC_function *)real(LAUNCH_EXC, route);
    if (!config) return next ? next(config, stub, parameters) : hipErrorNotFound;  // the driver's error
    const dim3 grid = config->grid, block = config->block;
    const bool is_cooperative = asks_for_barrier(config->attributes, config->num_attributes);
    return launch_by(&stub_calls, route, LAUNCH_EXC,
                     &(struct hip_call){.go = go_hipLaunchKernelExC, .stream = config->stream, .config = config,
                                        .parameters = parameters,
                                        LAUNCH(stub, grid.x, grid.y, grid.z, block.x, block.y, block.z,
                                               config->dynamic_shared_bytes, is_cooperative, true)});
}

static hipError_t launch_drv_ex(enum route route, const HIP_LAUNCH_CONFIG *config, hipFunction_t function, void **parameters,
                                void **extra) {
    hipDrvLaunchKernelEx_function *next = (hipDrvLaunchKernelEx_function *)real(DRV_LAUNCH_EX, route);
    if (!config) return next ? next(config, function, parameters, extra) : hipErrorNotFound;
    const dim3 grid = config->grid, block = config->block;
    const bool is_cooperative = asks_for_barrier(config->attributes, config->num_attributes);
    return launch_by(&function_calls, route, DRV_LAUNCH_EX,
                     &(struct hip_call){.go = go_hipDrvLaunchKernelEx, .stream = config->stream, .config = config,
                                        .parameters = parameters, .extra = extra,
                                        LAUNCH(function, grid.x, grid.y, grid.z, block.x, block.y, block.z,
                                               config->dynamic_shared_bytes, is_cooperative, true)});
}

static hipError_t get_proc_address(enum route route, const char *symbol, void **address, int version, uint64_t flags, int *status) {
    hipGetProcAddress_function *next = (hipGetProcAddress_function *)real(GET_PROC_ADDRESS, route);
    if (!next) return hipErrorNotFound;
    const hipError_t result = next(symbol, address, version, flags, status);
    if (result != hipSuccess || !symbol || !address || !*address) return result;
    for (size_t i = 0; i < hip_library.num_entry_points; i++)  // by address: a flag may have selected the per-thread version
        if (*address == driver_symbol(&hip_library, entry_points[i].symbol))
            *address = answer_for(&hip_library, &entry_points[i], *address);
    return result;
}

static hipError_t unload(enum route route, hipModule_t module) {
    hipError_t (*next)(hipModule_t) = (hipError_t(*)(hipModule_t))real(MODULE_UNLOAD, route);
    if (!next) return hipErrorNotFound;
    const hipError_t result = next(module);
    forget_handles();
    return result;
}

#define BOTH_ROUTES(name, declared, call)                                                            \
    static hipError_t next_##name declared { const enum route route = ROUTE_NEXT; return call; }     \
    static hipError_t driver_##name declared { const enum route route = ROUTE_DRIVER; return call; } \
    EXPORTED hipError_t name declared __attribute__((alias("next_" #name)));

#define STUB_SHAPE const void *stub, dim3 grid, dim3 block, void **parameters
#define BY_STUB(name, place, cooperative, ...)                                                                               \
    launch_by(&stub_calls, route, place,                                                                                     \
              &(struct hip_call){.go = go_##name, .stream = stream, .parameters = parameters,                                \
                                 LAUNCH(stub, grid.x, grid.y, grid.z, block.x, block.y, block.z, bytes, cooperative, false), \
                                 __VA_ARGS__})
#define FUNCTION_SHAPE \
    hipFunction_t function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz
#define BY_FUNCTION(name, place, g0, g1, g2, cooperative, ...)                                \
    launch_by(&function_calls, route, place,                                                  \
              &(struct hip_call){.go = go_##name, .stream = stream, .parameters = parameters, \
                                 LAUNCH(function, g0, g1, g2, bx, by, bz, bytes, cooperative, false), __VA_ARGS__})
#define GROUPS(items, size) ((size) ? ((items) + (size)-1) / (size) : 0)

BOTH_ROUTES(hipLaunchKernel, (STUB_SHAPE, size_t bytes, hipStream_t stream), BY_STUB(hipLaunchKernel, LAUNCH_KERNEL, false, .flags = 0))
BOTH_ROUTES(hipLaunchKernel_spt, (STUB_SHAPE, size_t bytes, hipStream_t stream),
            BY_STUB(hipLaunchKernel, LAUNCH_KERNEL_SPT, false, .flags = 0))
BOTH_ROUTES(hipExtLaunchKernel, (STUB_SHAPE, size_t bytes, hipStream_t stream, hipEvent_t start_event, hipEvent_t stop_event, int how),
            BY_STUB(hipExtLaunchKernel, EXT_LAUNCH_KERNEL, false, .start = start_event, .stop = stop_event, .flags = how))
BOTH_ROUTES(hipLaunchCooperativeKernel, (STUB_SHAPE, unsigned bytes, hipStream_t stream),
            BY_STUB(hipLaunchCooperativeKernel, LAUNCH_COOPERATIVE, true, .flags = 0))
BOTH_ROUTES(hipLaunchKernelExC, (const hipLaunchConfig_t *config, const void *stub, void **parameters),
            launch_exc(route, config, stub, parameters))
BOTH_ROUTES(hipModuleLaunchKernel, (FUNCTION_SHAPE, unsigned bytes, hipStream_t stream, void **parameters, void **more),
            BY_FUNCTION(hipModuleLaunchKernel, MODULE_LAUNCH, gx, gy, gz, false, .extra = more))
BOTH_ROUTES(hipExtModuleLaunchKernel,
            (FUNCTION_SHAPE, size_t bytes, hipStream_t stream, void **parameters, void **more, hipEvent_t start_event,
             hipEvent_t stop_event, uint32_t how),
            BY_FUNCTION(hipExtModuleLaunchKernel, EXT_MODULE_LAUNCH, GROUPS(gx, bx), GROUPS(gy, by), GROUPS(gz, bz), false,
                        .config = (const uint32_t[]){gx, gy, gz}, .extra = more, .start = start_event, .stop = stop_event,
                        .flags = (int)how))
BOTH_ROUTES(hipModuleLaunchCooperativeKernel, (FUNCTION_SHAPE, unsigned bytes, hipStream_t stream, void **parameters),
            BY_FUNCTION(hipModuleLaunchCooperativeKernel, MODULE_COOPERATIVE, gx, gy, gz, true, .flags = 0))
BOTH_ROUTES(hipDrvLaunchKernelEx, (const HIP_LAUNCH_CONFIG *config, hipFunction_t function, void **parameters, void **extra),
            launch_drv_ex(route, config, function, parameters, extra))
BOTH_ROUTES(hipGetProcAddress, (const char *symbol, void **address, int version, uint64_t flags, int *status),
            get_proc_address(route, symbol, address, version, flags, status))
BOTH_ROUTES(hipModuleUnload, (hipModule_t module), unload(route, module))

#define POINT(name) {.symbol = #name, .base = #name, .own = {(void *)next_##name, (void *)driver_##name}}

static struct entry_point entry_points[] = {  // in the order of the enum above
    POINT(hipLaunchKernel),
    POINT(hipLaunchKernel_spt),
    POINT(hipExtLaunchKernel),
    POINT(hipLaunchCooperativeKernel),
    POINT(hipLaunchKernelExC),
    POINT(hipModuleLaunchKernel),
    POINT(hipExtModuleLaunchKernel),
    POINT(hipModuleLaunchCooperativeKernel),
    POINT(hipDrvLaunchKernelEx),
    POINT(hipGetProcAddress),
    POINT(hipModuleUnload),
};

HIDDEN const struct driver_library hip_library = {
    .loaded_names = {"libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so.5", "libamdhip64.so"},
    .file_prefix = "libamdhip64.so",
    .entry_points = entry_points,
    .num_entry_points = sizeof entry_points / sizeof *entry_points,
};
