"""The kernels of a transformer layer as launches with work: matmuls, attention, and what only moves bytes.

Tiles and launches are those of libraries in common use: on compute capability 9.0 and later cuBLAS's persistent kernels (384
threads x 168 registers, measured on an H200), before that one CTA of 256 threads for each tile (cuBLAS on A100; assumed).
Pipeline stages, and the launches of attention before 9.0, are assumed, too.
"""

from counterpoint.machine import ElementType, Gpu
from counterpoint.step import Footprint, Kernel
from counterpoint.workloads.gemm import matmul_flops, matmul_hbm_bytes, matmul_l2_bytes, stage_bytes, tile_count

PERSISTENT_FROM = (9, 0)
TILE = (128, 256, 64)  # of both families for large products
SMALL_TILES = ((128, 128, 64), (128, 64, 64), (64, 64, 64))
ELEMENTWISE_BYTES_PER_CTA = 16_384  # 128 threads, 4 vectors of 16 bytes each read and written; PyTorch's usual launch
# what a CTA spends before and after its main loop, in steps of K: cuBLAS in bf16 on an H200 reaches 0.755 of the peak at K =
# 2,048 and 0.795 from 8,192 on, in calls under 2 ms (benchmarks/results/ops_seeded_2x_h200.json); elsewhere assumed the same
EDGE_STEPS = 140
CALIBRATED_INNER = 8192  # the K of the matmuls that the calibration measured
LEAST_FILL = 0.75  # a smaller tile is taken where the larger ones keep fewer of the SMs busy


def matmul(gpu: Gpu, name: str, sizes: tuple[int, int, int], element_type: ElementType, batch: int = 1) -> Kernel:
    """Return one launch that multiplies `batch` pairs of matrices of `sizes` M, K and N."""
    m, k, n = (max(1, size) for size in sizes)
    tile = _tile(gpu, m, n, batch)
    tiles = batch * tile_count(m, n, tile)
    is_persistent = _is_persistent(gpu)
    stages = 4 if is_persistent else 3
    shared = min(gpu.max_shared_bytes_per_cta, stages * stage_bytes(element_type, tile))
    return Kernel(
        name=name,
        stream=0,
        footprint=Footprint(
            num_ctas=min(tiles, gpu.num_sms) if is_persistent else tiles,
            threads_per_cta=384 if is_persistent else 256,
            registers_per_thread=168 if is_persistent else 192,
            dynamic_shared_bytes=shared,
        ),
        character="matmul",
        flops=batch * matmul_flops(m, n, k) * (1 + EDGE_STEPS / k) / (1 + EDGE_STEPS / CALIBRATED_INNER),
        hbm_bytes=batch * matmul_hbm_bytes(m, n, k, element_type, tile),
        l2_bytes=batch * matmul_l2_bytes(m, n, k, element_type, tile),
        matmul_sizes=(m, k, n) if batch == 1 else None,
        stage_bytes=stage_bytes(element_type, tile),
        element_type=element_type,
        is_work_sharing=is_persistent,
    )


def fused_attention(gpu: Gpu, name: str, flops: float, num_bytes: float, element_type: ElementType) -> Kernel:
    """Return an attention that keeps its scores on the SM. It has a CTA for each SM, as cuDNN's on an H200."""
    return Kernel(
        name=name,
        stream=0,
        footprint=Footprint(
            num_ctas=gpu.num_sms,
            threads_per_cta=384 if _is_persistent(gpu) else 256,
            registers_per_thread=168 if _is_persistent(gpu) else 224,
            dynamic_shared_bytes=min(gpu.max_shared_bytes_per_cta, 200_000 if _is_persistent(gpu) else 100_000),
        ),
        character="attention",
        flops=flops,
        hbm_bytes=num_bytes,
        element_type=element_type,
        is_work_sharing=True,
    )


def memory_pass(name: str, num_bytes: float, flops: float | None = None) -> Kernel:
    """Return a kernel that reads and writes `num_bytes` in all, as norms, activations and optimizers do."""
    return Kernel(
        name=name,
        stream=0,
        footprint=Footprint(
            num_ctas=max(1, round(num_bytes / ELEMENTWISE_BYTES_PER_CTA)), threads_per_cta=128, registers_per_thread=32
        ),
        character="streaming",
        flops=flops,
        hbm_bytes=max(num_bytes, 1.0),
    )


def _is_persistent(gpu: Gpu) -> bool:
    if gpu.vendor != "nvidia":
        return False
    major, minor = (int(part) for part in gpu.compute_capability.split(".")[:2])
    return (major, minor) >= PERSISTENT_FROM


def _tile(gpu: Gpu, m: int, n: int, batch: int) -> tuple[int, int, int]:
    """Return the largest tile that fills the last wave well, else the one that fills it best."""
    best, best_fill = TILE, 0.0
    for tile in (TILE, *SMALL_TILES):
        tiles = batch * tile_count(m, n, tile)
        waves = -(-tiles // gpu.num_sms)
        padded = (tile[0] * -(-m // tile[0])) * (tile[1] * -(-n // tile[1]))
        fill = tiles / (waves * gpu.num_sms) * (m * n) / padded
        if fill >= LEAST_FILL:
            return tile
        if fill > best_fill:
            best, best_fill = tile, fill
    return best
