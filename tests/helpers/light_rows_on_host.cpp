// The light kernel for rows of experts on the host: every thread of every CTA is a thread here. ROWS_CU is the part of light.cu that
// holds the kernel.
#include <atomic>
#include <barrier>
#include <memory>
#include <thread>
#include <vector>

typedef unsigned long long u64;
#define MAX_PEERS 7
#define THREADS 128
#define UNROLL 4
#define __device__
#define __forceinline__ inline
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)

struct uint4 { unsigned x, y, z, w; };
struct Index { unsigned x; };
struct Cta { std::barrier<> meeting{THREADS}; std::atomic<int> any{0}; };
static thread_local Index blockIdx, threadIdx;
static thread_local Cta* cta;
static Index gridDim;

static void __syncthreads() { cta->meeting.arrive_and_wait(); }
static int __syncthreads_or(int value) {
    if (value) cta->any = 1;
    __syncthreads();
    return cta->any;
}
static void __threadfence_system() { std::atomic_thread_fence(std::memory_order_seq_cst); }
static unsigned atomicAdd(unsigned* at, unsigned value) { return std::atomic_ref<unsigned>(*at).fetch_add(value); }
static void __nanosleep(unsigned) { std::this_thread::yield(); }
static uint4 __ldcs(const uint4* at) { return *at; }
static unsigned read_flag(u64 flag) { return std::atomic_ref<unsigned>(*(unsigned*)flag).load(); }
static void raise_flag(u64 flag, unsigned value) { std::atomic_ref<unsigned>(*(unsigned*)flag).store(value); }

#include ROWS_CU

extern "C" void run(const LightRows* rows, unsigned num_ctas) {
    gridDim.x = num_ctas;
    std::vector<std::unique_ptr<Cta>> ctas;
    std::vector<std::thread> threads;
    for (unsigned block = 0; block < num_ctas; ++block) {
        ctas.push_back(std::make_unique<Cta>());
        for (unsigned thread = 0; thread < THREADS; ++thread)
            threads.emplace_back([=, own = ctas.back().get()] {
                blockIdx.x = block, threadIdx.x = thread, cta = own;
                counterpoint_light_rows(*rows);
            });
    }
    for (auto& thread : threads) thread.join();
}
