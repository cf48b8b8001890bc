// A program that launches through every entry point of HIP: commands from stdin, one answer line or more on stdout, then "ok".
//
//   find linked|dlsym|proc         how launches are found from now on
//   make NAME STATIC stub|function
//   launch API NAME SHARED [cooperative]
//   refuse NAME BYTES              launches above so many bytes        capture 0|1        unload
#define _GNU_SOURCE
#include <dlfcn.h>
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
    Dim3 grid, block;
    size_t shared;
    void *stream;
    Attribute *attributes;
    unsigned num_attributes;
} Config;
typedef struct {
    unsigned grid[3], block[3], shared;
    void *stream;
    Attribute *attributes;
    unsigned num_attributes;
} DriverConfig;

void *double_make(const char *, int, int);
void double_refuse_above(void *, int);
void double_set_capturing(int);
int hipModuleUnload(void *);
int hipGetProcAddress(const char *, void **, int, uint64_t, int *);
int hipLaunchKernel(const void *, Dim3, Dim3, void **, size_t, void *);

static char route[16] = "linked";
static struct {
    char name[128];
    void *handle;
} kernels[64];
static int num_kernels;

static void *api(const char *name) {
    void *library = dlopen("libamdhip64.so.6", RTLD_LAZY), *found = NULL;
    if (!strcmp(route, "linked")) return !strcmp(name, "hipLaunchKernel") ? (void *)hipLaunchKernel : dlsym(RTLD_DEFAULT, name);
    if (!strcmp(route, "dlsym")) return dlsym(library, name);
    return hipGetProcAddress(name, &found, 604, 0, NULL) ? NULL : found;
}

static void *named(const char *name) {
    for (int i = 0; i < num_kernels; i++)
        if (!strcmp(kernels[i].name, name)) return kernels[i].handle;
    return NULL;
}

#define IS(other) (!strcmp(name, #other))
static int launch(const char *name, void *kernel, unsigned shared, int is_cooperative) {
    int argument = 42;
    void *arguments[] = {&argument}, *stream = (void *)7, *start = (void *)2, *stop = (void *)3;
    Attribute barrier = {.id = 2, .value.number = 1};
    const Dim3 grid = {12, 3, 1}, block = {64, 2, 1};
    void *function = api(name);
    if (!function) return -1;
    if (IS(hipLaunchKernel) || IS(hipLaunchKernel_spt))
        return ((int (*)(const void *, Dim3, Dim3, void **, size_t, void *))function)(kernel, grid, block, arguments, shared, stream);
    if (IS(hipExtLaunchKernel))
        return ((int (*)(const void *, Dim3, Dim3, void **, size_t, void *, void *, void *, int))function)(
            kernel, grid, block, arguments, shared, stream, start, stop, 1);
    if (IS(hipLaunchCooperativeKernel))
        return ((int (*)(const void *, Dim3, Dim3, void **, unsigned, void *))function)(kernel, grid, block, arguments, shared, stream);
    if (IS(hipLaunchKernelExC)) {
        Config config = {grid, block, shared, stream, &barrier, (unsigned)is_cooperative};
        return ((int (*)(const Config *, const void *, void **))function)(&config, kernel, arguments);
    }
    if (IS(hipModuleLaunchKernel))
        return ((int (*)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **))function)(
            kernel, 12, 3, 1, 64, 2, 1, shared, stream, arguments, NULL);
    if (IS(hipExtModuleLaunchKernel))
        return ((int (*)(void *, uint32_t, uint32_t, uint32_t, uint32_t, uint32_t, uint32_t, size_t, void *, void **, void **, void *,
                         void *, uint32_t))function)(kernel, 12 * 64, 3 * 2, 1, 64, 2, 1, shared, stream, arguments, NULL, start, stop, 1);
    if (IS(hipModuleLaunchCooperativeKernel))
        return ((int (*)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **))function)(
            kernel, 12, 3, 1, 64, 2, 1, shared, stream, arguments);
    DriverConfig config = {{12, 3, 1}, {64, 2, 1}, shared, stream, &barrier, (unsigned)is_cooperative};
    return ((int (*)(const DriverConfig *, void *, void **, void **))function)(&config, kernel, arguments, NULL);
}

int main(void) {
    char line[512], name[128], word[64];
    int number;
    while (fgets(line, sizeof line, stdin)) {
        word[0] = 0;
        sscanf(line, "find %15s", route);
        if (!strncmp(line, "find", 4)) puts("found");
        if (sscanf(line, "make %127s %d %63s", name, &number, word) == 3) {
            strcpy(kernels[num_kernels].name, name);
            kernels[num_kernels++].handle = double_make(name, number, !strcmp(word, "stub"));
            puts("made");
        }
        char which[64], how[16] = "";
        if (sscanf(line, "launch %63s %127s %d %15s", which, name, &number, how) >= 3)
            printf("result %d\n", launch(which, named(name), (unsigned)number, !strcmp(how, "cooperative")));
        if (sscanf(line, "refuse %127s %d", name, &number) == 2) double_refuse_above(named(name), number);
        if (sscanf(line, "capture %d", &number) == 1) double_set_capturing(number);
        if (!strncmp(line, "unload", 6)) printf("result %d\n", hipModuleUnload((void *)1));
        puts("ok");
        fflush(stdout);
    }
    return 0;
}
