"""The collectives under the integrations, by themselves."""

import torch
import torch.distributed as dist

from counterpoint.integrations.compression import AsBfloat16, AsIs, AsScaledFloat8
from counterpoint.integrations.lane_collectives import all_reduce, reduce_scatter
from counterpoint.integrations.lanes import Lanes
from integration_sections.comparing import DEVICE, ROUNDING, assert_close, assert_equal, everyones, same_on_every_rank


def all_reduces() -> None:
    """Any size and type, more in flight than lanes, the same bits twice and on every rank."""
    lanes = Lanes((dist.group.WORLD, DEVICE, "job"), 3)
    rank = dist.get_rank()
    for dtype, limit in ROUNDING.items():
        cases = [everyones(size, dtype, seed) for seed, size in enumerate((1, 127, 128, 1000, 4097, 100_003, 64))]
        assert not lanes.obstacle
        for wire, rounding in ((AsIs(), limit), (AsBfloat16(), 2e-2), (AsScaledFloat8(), 0.15)):
            results = []
            for _ in range(2):
                buckets = [case[rank].clone() for case in cases]
                for bucket in buckets:
                    lane = lanes.next()
                    with lane.issuing():
                        all_reduce(lane, lanes.levels, bucket, wire)
                if DEVICE.type == "cuda":
                    torch.cuda.synchronize()
                results.append(buckets)
            assert_equal(*results)
            for bucket, case in zip(results[0], cases, strict=True):  # relative to what was sent: a mean may be near zero
                sent = torch.stack(case).double()
                assert_close([bucket.double() + sent.abs().max()], [sent.mean(0) + sent.abs().max()], rounding)
            assert all(same_on_every_rank(bucket) for bucket in results[0])


def reduce_scatters() -> None:
    lanes = Lanes((dist.group.WORLD, DEVICE, "job"), 2)
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    assert not lanes.obstacle
    for seed, size in enumerate((1, 100, 5000)):
        given = everyones(size * num_ranks, torch.float32, seed)
        wanted = torch.stack(given).double().sum(0).chunk(num_ranks)[rank]
        for is_mean in (False, True):
            output = torch.empty(size, device=DEVICE)
            blocks = given[rank].view(num_ranks, -1)
            reduce_scatter(lanes.next(), lanes.levels, output, blocks, num_ranks if is_mean else 1)
            assert_close([output], [wanted / num_ranks if is_mean else wanted], 1e-5)
