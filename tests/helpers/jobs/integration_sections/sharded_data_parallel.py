"""FSDP2 with its all-gathers and reduce-scatters on copy engines."""

from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from counterpoint.integrations import fsdp2
from integration_sections.comparing import assert_close, assert_equal, refused
from integration_sections.layered import Deep, deep_model, given_to, gradients


def sharded(width: int = 33, **options: object) -> Deep:
    model = deep_model(width=width)
    for layer in model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    return model


def fsdp2_steps() -> None:
    """Gradients and trained parameters are stock FSDP2's; the same bits twice; undone, its own again."""
    given = given_to(dist.get_rank())
    for options in (
        {},
        {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
        {"reshard_after_forward": False},
    ):
        results = []
        for is_ours in (False, True, True):
            model = sharded(**options)
            in_use = fsdp2.use_copy_engines(model, least_part_bytes=0) if is_ours else None
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            found = []
            for _ in range(3):
                found += gradients(model, given)
                optimizer.step()
            found += [parameter.full_tensor() for parameter in model.parameters()]
            results.append(found)
        assert_close(results[1], results[0], 1e-5)
        assert_equal(results[1], results[2])
        assert in_use is not None
        assert in_use.num_by_copies > 9
        assert in_use.num_by_library == 0
        copies_before = in_use.num_by_copies
        in_use.undo()
        gradients(model, given)
        assert in_use.num_by_copies == copies_before


def fsdp2_of_a_newer_torch() -> None:
    """Nothing is in place with a torch that nobody tested: its FSDP may use flat buffers in another way."""
    given, wanted = given_to(dist.get_rank()), gradients(sharded(), given_to(dist.get_rank()))
    for is_newer in (False, True):
        with mock.patch.object(fsdp2, "is_newer", lambda is_newer=is_newer: is_newer):
            model = sharded()
            in_use = fsdp2.use_copy_engines(model, least_part_bytes=0, least_piece_bytes=0)
            assert_close(gradients(model, given), wanted, 1e-6)
            tallies = [*in_use.gather_tallies, *in_use.reduce_tallies]
            assert in_use.num_by_copies > 0
            assert in_use.num_by_library == 0
            assert any(tally.num_in_place for tally in tallies) != is_newer
            in_use.undo()


def fsdp2_small_groups_stay() -> None:
    given, model = given_to(dist.get_rank()), sharded()
    wanted = gradients(sharded(), given)
    in_use = fsdp2.use_copy_engines(model)
    assert_close(gradients(model, given), wanted, 1e-6)
    assert in_use.num_by_copies == 0
    assert in_use.num_by_library > 0


def fsdp2_refuses_a_buffer_in_use() -> None:
    """Prefetching more groups than there are buffers is refused, and enough buffers serve it."""
    given, model = given_to(dist.get_rank()), sharded()
    refused(lambda: fsdp2.use_copy_engines(None), "sharded by FSDP2; found one of type NoneType")
    refused(lambda: fsdp2.use_copy_engines(model, num_buffers="3"), "num_buffers must be from 2 to 16, .* found '3'")
    refused(lambda: fsdp2.use_copy_engines(model, least_part_bytes=-1), "least_part_bytes .* 0 or more; found -1")
    wanted = gradients(sharded(), given)
    model.set_modules_to_forward_prefetch(list(model.layers))
    in_use = fsdp2.use_copy_engines(model, least_part_bytes=0, num_buffers=2)
    refused(lambda: model(given), "num_buffers=3")
    in_use.undo()
    model = sharded()
    model.set_modules_to_forward_prefetch(list(model.layers))
    fsdp2.use_copy_engines(model, least_part_bytes=0, num_buffers=6)
    assert_close(gradients(model, given), wanted, 1e-6)
