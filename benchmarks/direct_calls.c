// Copies issued in a loop of C, for benchmarks/graph_launches.py: what the driver takes without Python between its calls.
// The driver's function is handed over, so nothing of CUDA is needed to compile this.
#include <stddef.h>
#include <stdint.h>

typedef int (*copy_function)(uint64_t target, uint64_t source, size_t num_bytes, void *stream);

// The first error, or 0.
int issue_copies(copy_function copy, const uint64_t *targets, const uint64_t *sources, size_t num_bytes, int count, void *stream) {
    for (int number = 0; number < count; number++) {
        int error = copy(targets[number], sources[number], num_bytes, stream);
        if (error) return error;
    }
    return 0;
}
