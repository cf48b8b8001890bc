// A test double of libamdhip64.so.6: launches nothing, prints every launch that reaches it. Declarations are written here a second time,
// after HIP's headers. It says nothing of how AMD hardware behaves.
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

typedef struct {
    uint32_t x, y, z;
} Dim3;
typedef struct {
    int id, pad;
    union {
        char bytes[64];
        int number;
    } value;
} Attribute;
typedef struct {
    Dim3 gridDim, blockDim;
    size_t dynamicSmemBytes;
    void *stream;
    Attribute *attrs;
    unsigned numAttrs;
} Config;
typedef struct {
    unsigned gridDimX, gridDimY, gridDimZ, blockDimX, blockDimY, blockDimZ, sharedMemBytes;
    void *hStream;
    Attribute *attrs;
    unsigned numAttrs;
} DriverConfig;
struct kernel {
    char name[128];
    int static_bytes, is_stub, refused_above;
};

static struct kernel kernels[64];
static int num_kernels, capturing;

void *double_make(const char *name, int static_bytes, int is_stub) {
    struct kernel *kernel = &kernels[num_kernels++];
    snprintf(kernel->name, sizeof kernel->name, "%s", name);
    kernel->static_bytes = static_bytes;
    kernel->is_stub = is_stub;
    return kernel;
}
void double_refuse_above(void *kernel, int bytes) { ((struct kernel *)kernel)->refused_above = bytes; }
void double_set_capturing(int is_capturing) { capturing = is_capturing; }

static int run(const char *api, const void *handle, int is_stub, Dim3 grid, Dim3 block, size_t bytes, void **arguments, long extra) {
    const struct kernel *kernel = handle;
    if (!kernel || kernel->is_stub != is_stub) return 98;  // hipErrorInvalidDeviceFunction
    if (bytes + (size_t)kernel->static_bytes > 65536) return 1;
    if (kernel->refused_above && bytes > (size_t)kernel->refused_above) return 701;  // hipErrorLaunchOutOfResources
    printf("reached %s %s shared=%zu grid=%u,%u,%u block=%u,%u,%u argument=%d extra=%ld\n", api, kernel->name, bytes, grid.x, grid.y,
           grid.z, block.x, block.y, block.z, *(int *)arguments[0], extra);
    return 0;
}

#define SHAPE unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz
#define GRID ((Dim3){gx, gy, gz})
#define BLOCK ((Dim3){bx, by, bz})

int hipLaunchKernel(const void *f, Dim3 grid, Dim3 block, void **args, size_t bytes, void *stream) {
    return run("hipLaunchKernel", f, 1, grid, block, bytes, args, (long)(intptr_t)stream);
}
int hipLaunchKernel_spt(const void *f, Dim3 grid, Dim3 block, void **args, size_t bytes, void *stream) {
    return run("hipLaunchKernel_spt", f, 1, grid, block, bytes, args, (long)(intptr_t)stream);
}
int hipExtLaunchKernel(const void *f, Dim3 grid, Dim3 block, void **args, size_t bytes, void *stream, void *start, void *stop, int flags) {
    return run("hipExtLaunchKernel", f, 1, grid, block, bytes, args, (long)(intptr_t)stream + (long)(intptr_t)start * 10 +
               (long)(intptr_t)stop * 100 + flags * 1000L);
}
int hipLaunchCooperativeKernel(const void *f, Dim3 grid, Dim3 block, void **args, unsigned bytes, void *stream) {
    return run("hipLaunchCooperativeKernel", f, 1, grid, block, bytes, args, (long)(intptr_t)stream);
}
int hipLaunchKernelExC(const Config *config, const void *f, void **args) {
    return run("hipLaunchKernelExC", f, 1, config->gridDim, config->blockDim, config->dynamicSmemBytes, args,
               (long)(intptr_t)config->stream + config->numAttrs * 10);
}
int hipModuleLaunchKernel(void *f, SHAPE, unsigned bytes, void *stream, void **args, void **extra) {
    return run("hipModuleLaunchKernel", f, 0, GRID, BLOCK, bytes, args, (long)(intptr_t)stream + (long)(intptr_t)extra * 10);
}
int hipExtModuleLaunchKernel(void *f, SHAPE, size_t bytes, void *stream, void **args, void **extra, void *start, void *stop,
                             uint32_t flags) {
    return run("hipExtModuleLaunchKernel", f, 0, GRID, BLOCK, bytes, args, (long)(intptr_t)stream + (long)(intptr_t)start * 10 +
               (long)(intptr_t)stop * 100 + flags * 1000L + (long)(intptr_t)extra * 10000);
}
int hipModuleLaunchCooperativeKernel(void *f, SHAPE, unsigned bytes, void *stream, void **args) {
    return run("hipModuleLaunchCooperativeKernel", f, 0, GRID, BLOCK, bytes, args, (long)(intptr_t)stream);
}
int hipDrvLaunchKernelEx(const DriverConfig *c, void *f, void **args, void **extra) {
    return run("hipDrvLaunchKernelEx", f, 0, (Dim3){c->gridDimX, c->gridDimY, c->gridDimZ}, (Dim3){c->blockDimX, c->blockDimY, c->blockDimZ},
               c->sharedMemBytes, args, (long)(intptr_t)c->hStream + c->numAttrs * 10 + (long)(intptr_t)extra * 100);
}

const char *hipKernelNameRef(const void *f) { return ((const struct kernel *)f)->name; }
const char *hipKernelNameRefByPtr(const void *f, void *stream) { return stream ? NULL : ((const struct kernel *)f)->name; }
int hipGetFuncBySymbol(void **function, const void *stub) {
    *function = (void *)(uintptr_t)stub;
    return 0;
}
int hipFuncGetAttribute(int *value, int attribute, void *f) {
    *value = attribute == 1 ? ((struct kernel *)f)->static_bytes : 64;
    return 0;
}
static int occupancy(int *count, const struct kernel *kernel, size_t bytes) {
    const size_t together = bytes + (size_t)kernel->static_bytes;
    *count = together ? (int)(65536 / together) : 16;
    return 0;
}
int hipModuleOccupancyMaxActiveBlocksPerMultiprocessor(int *count, void *f, int threads, size_t bytes) {
    return threads > 0 ? occupancy(count, f, bytes) : 1;
}
int hipOccupancyMaxActiveBlocksPerMultiprocessor(int *count, const void *f, int threads, size_t bytes) {
    return threads > 0 ? occupancy(count, f, bytes) : 1;
}
int hipStreamIsCapturing(void *stream, int *status) {
    *status = stream ? capturing : 0;
    return 0;
}
int hipModuleUnload(void *module) { return module ? 0 : 1; }
int hipGetProcAddress(const char *symbol, void **address, int version, uint64_t flags, int *status) {
    void *self = dlopen("libamdhip64.so.6", RTLD_LAZY | RTLD_NOLOAD);
    char name[128];
    snprintf(name, sizeof name, "%s%s", symbol, flags & 2 ? "_spt" : "");
    *address = self && version ? dlsym(self, name) : NULL;
    if (status) *status = *address ? 0 : 1;
    return *address ? 0 : 1;
}
