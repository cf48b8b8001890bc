// Another preloaded library that takes launches, as tools do: it counts them and passes them on. `OTHER_DLSYM` makes it answer dlsym too.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

typedef int launch_function(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **);
static int num_launches;
static launch_function *next;

int cuLaunchKernel(void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
                   void *stream, void **parameters, void **extra) {
    num_launches++;
    if (!next) next = (launch_function *)dlsym(RTLD_NEXT, "cuLaunchKernel");
    return next(f, gx, gy, gz, bx, by, bz, shared, stream, parameters, extra);
}

#ifdef OTHER_DLSYM
typedef void *dlsym_function(void *, const char *);
void *dlsym(void *handle, const char *name) {
    dlsym_function *real = (dlsym_function *)dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.34");
    if (!real) real = (dlsym_function *)dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.17");
    if (!real) real = (dlsym_function *)dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.2.5");
    if (handle != RTLD_NEXT && !strcmp(name, "cuLaunchKernel")) {
        if (!next) next = (launch_function *)real(handle == RTLD_DEFAULT ? RTLD_NEXT : handle, name);
        return (void *)cuLaunchKernel;
    }
    void *found = real(handle, name);
    __asm__ volatile("" : "+r"(found));  // no tail call: the real dlsym goes by who asks
    return found;
}
#endif

__attribute__((destructor)) static void print_count(void) { fprintf(stderr, "other saw %d\n", num_launches); }
