// Keeps a job alive if its control block is truncated: access to a mapped page beyond the end of the file raises SIGBUS.
//
// The handler maps empty private memory in the block's place. From then on no rule is in force, and launches are unchanged. Any other
// SIGBUS belongs to the program: it goes to the previous handler, or ends the process as it would have without us. A handler that the
// program installs later runs before this one. If it calls its predecessor or raises the signal again, as Python's faulthandler does,
// the job continues, too.
#define _GNU_SOURCE
#include <errno.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "filter.h"

static struct {
    uintptr_t start;
    bool is_replaced;
    char path[PATH_MAX];
} guarded;
static struct sigaction before;
static bool is_installed;

static bool is_in_block(const siginfo_t *info) {
    const uintptr_t address = (uintptr_t)info->si_addr, start = LOAD(&guarded.start);
    return info->si_code == BUS_ADRERR && start && address >= start && address - start < sizeof(struct block_record);
}

// An earlier handler may have raised the signal again, which loses the address.
static bool is_cut_short(const siginfo_t *info) {
    struct stat found;
    if (info->si_code > 0 || !LOAD(&guarded.start) || LOAD(&guarded.is_replaced)) return false;
    return !stat(guarded.path, &found) && found.st_size < (off_t)sizeof(struct block_record);
}

static void replace_block(void) {
    static const char line[] = "counterpoint: the control block was cut short; no plan is applied here any more.\n";
    if (__atomic_exchange_n(&guarded.is_replaced, true, __ATOMIC_ACQ_REL)) return;  // another thread is doing it
    void *start = (void *)LOAD(&guarded.start);
    if (mmap(start, sizeof(struct block_record), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) ==
        MAP_FAILED)
        sigaction(SIGBUS, &before, NULL);  // without memory the process cannot continue
    const ssize_t written = write(STDERR_FILENO, line, sizeof line - 1);
    (void)written;
}

static void pass_on(int signal, siginfo_t *info, void *context) {
    if (before.sa_flags & SA_SIGINFO) {
        before.sa_sigaction(signal, info, context);
    } else if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN) {
        before.sa_handler(signal);
    } else if (before.sa_handler == SIG_DFL || info->si_code > 0) {  // a fault ends the process even if it ignores the signal
        const struct sigaction end = {.sa_handler = SIG_DFL};
        sigaction(SIGBUS, &end, NULL);
        if (info->si_code <= 0) raise(signal);  // a fault happens again by itself
    }
}

static void handle(int signal, siginfo_t *info, void *context) {
    const int error = errno;
    if (is_in_block(info) || is_cut_short(info)) {
        replace_block();
    } else {
        pass_on(signal, info, context);
    }
    errno = error;
}

HIDDEN void guard_block(const struct block_record *block, const char *path) {
    STORE(&guarded.start, 0);
    snprintf(guarded.path, sizeof guarded.path, "%s", path);
    STORE(&guarded.is_replaced, false);
    STORE(&guarded.start, (uintptr_t)block);
    if (is_installed) return;  // also in a forked child
    struct sigaction ours = {.sa_sigaction = handle, .sa_flags = SA_SIGINFO | SA_ONSTACK | SA_RESTART};
    sigemptyset(&ours.sa_mask);
    is_installed = !sigaction(SIGBUS, NULL, &before) && !sigaction(SIGBUS, &ours, NULL);
}
