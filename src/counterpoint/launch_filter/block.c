// The control block of this process: a copy of the run's template, made when the process first looks up a launch.
//
// If the variable, the template or disk space is missing, the process runs as if the filter were not there. If the user can repair
// the cause, one line on stderr names it. A forked child makes its own block when it needs one.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "filter.h"

#define DIRECTORY_VARIABLE "COUNTERPOINT_FILTER_DIRECTORY"
#define MAX_SAME_PID 1000  // after exec a process keeps its pid; its earlier blocks stay readable

enum { NEW, ON, OFF };

HIDDEN pthread_mutex_t filter_lock = PTHREAD_MUTEX_INITIALIZER;
HIDDEN struct block_record *filter_block;
HIDDEN uint32_t filter_epoch = 1;
static int state = NEW;
static struct block_record *mapped_block;  // in a forked child this is the parent's until the child makes its own
static bool is_watching_forks;
static bool is_problem_told;

HIDDEN void say(const char *text) {
    char line[MAX_PROBLEM_BYTES + 32];
    const int size = snprintf(line, sizeof line, "counterpoint: %s\n", text);
    const ssize_t written = write(STDERR_FILENO, line, size < (int)sizeof line ? (size_t)size : sizeof line - 1);
    (void)written;  // a closed stderr is the user's choice
}

HIDDEN void report_problem(const char *text) {
    if (__atomic_exchange_n(&is_problem_told, true, __ATOMIC_ACQ_REL)) return;
    say(text);
    struct block_record *block = LOAD(&filter_block);
    if (!block) return;
    const size_t size = strnlen(text, MAX_PROBLEM_BYTES);
    for (size_t i = 0; i < size; i++) STORE_RELAXED(&block->problem[i], text[i]);
    STORE(&block->problem_bytes, (uint32_t)size);
}

static void report_file(const char *what, const char *path, int error) {
    char text[MAX_PROBLEM_BYTES];
    snprintf(text, sizeof text, "%s %.60s: %.50s; no plan is applied here.", what, path, strerror(error));
    report_problem(text);
}

HIDDEN void forget_handles(void) { __atomic_fetch_add(&filter_epoch, 1, __ATOMIC_ACQ_REL); }

// --- the file -------------------------------------------------------------------------------------------------------------------

// Creates and opens a new file of this process.
static int create_block(const char *directory, char *path, size_t size) {
    for (int attempt = 0; attempt < MAX_SAME_PID; attempt++) {
        if (attempt == 0) snprintf(path, size, "%s/%d.block", directory, (int)getpid());
        if (attempt > 0) snprintf(path, size, "%s/%d-%d.block", directory, (int)getpid(), attempt);
        const int file = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
        if (file >= 0 || errno != EEXIST) return file;
    }
    return -1;
}

// Reserves the whole file now: if the disk were full at the first access to a mapped page, the process would end.
static int reserve(int file) {
    struct rlimit limit;
    if (!getrlimit(RLIMIT_FSIZE, &limit) && limit.rlim_cur < sizeof(struct block_record))
        return EFBIG;  // a larger request would raise SIGXFSZ
    return posix_fallocate(file, 0, sizeof(struct block_record));
}

static bool copy_template(const char *directory, struct block_record *block) {
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/initial.block", directory);
    const int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0) {
        if (errno != ENOENT) report_file("cannot read", path, errno);
        return false;
    }
    size_t done = 0;
    ssize_t part = 1;
    while (done < sizeof *block && part > 0) {
        part = read(file, (char *)block + done, sizeof *block - done);
        if (part > 0) done += (size_t)part;
        if (part < 0 && errno == EINTR) part = 1;
    }
    close(file);
    if (done == sizeof *block && block->magic == BLOCK_MAGIC && block->layout_version == LAYOUT_VERSION) return true;
    report_problem("initial.block is not of this filter's version; start the job again. No plan is applied here.");
    return false;
}

static struct block_record *map_block(const char *directory) {
    char path[PATH_MAX];
    struct stat template_found;
    snprintf(path, sizeof path, "%s/initial.block", directory);
    if (stat(path, &template_found)) return NULL;
    const int file = create_block(directory, path, sizeof path);
    if (file < 0) {
        report_file("cannot create", path, errno);
        return NULL;
    }
    const int error = reserve(file);
    void *memory = error ? MAP_FAILED : mmap(NULL, sizeof(struct block_record), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (memory == MAP_FAILED) report_file("cannot reserve", path, error ? error : errno);
    close(file);
    if (memory != MAP_FAILED) guard_block(memory, path);
    if (memory != MAP_FAILED && copy_template(directory, memory)) return memory;
    if (memory != MAP_FAILED) munmap(memory, sizeof(struct block_record));
    unlink(path);
    return NULL;
}

// --- start, once per process -----------------------------------------------------------------------------------------------------

static void before_fork(void) { pthread_mutex_lock(&filter_lock); }

static void in_parent(void) { pthread_mutex_unlock(&filter_lock); }

static void in_child(void) {
    STORE(&filter_block, NULL);  // the parent's: the child must not count in it
    STORE(&state, NEW);
    STORE(&is_problem_told, false);
    pthread_mutex_unlock(&filter_lock);
}

// Returns the rank that a launcher gave this process, or -1. The names are RANK_VARIABLES of ranks.py, in the same order.
static int32_t launched_rank(void) {
    static const char *const names[] = {"RANK",     "OMPI_COMM_WORLD_RANK", "PMIX_RANK",
                                        "PMI_RANK", "MV2_COMM_WORLD_RANK",  "SLURM_PROCID"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        const char *rank = getenv(names[i]);
        if (rank && *rank >= '0' && *rank <= '9') return (int32_t)strtol(rank, NULL, 10);
    }
    return -1;
}

static int start(void) {
    const char *directory = getenv(DIRECTORY_VARIABLE);
    if (!directory || !*directory) return OFF;
    if (!is_watching_forks && pthread_atfork(before_fork, in_parent, in_child)) return OFF;
    is_watching_forks = true;
    if (mapped_block) munmap(mapped_block, sizeof *mapped_block);
    mapped_block = map_block(directory);
    if (!mapped_block) return OFF;
    mapped_block->pid = (int32_t)getpid();
    mapped_block->rank = launched_rank();
    filter_started();
    STORE(&filter_block, mapped_block);
    return ON;
}

HIDDEN bool filter_is_on(void) {
    int now = LOAD(&state);
    if (LIKELY(now != NEW)) return now == ON;
    const int error = errno;
    pthread_mutex_lock(&filter_lock);
    now = LOAD(&state);
    if (now == NEW) STORE(&state, now = start());
    pthread_mutex_unlock(&filter_lock);
    errno = error;
    return now == ON;
}
