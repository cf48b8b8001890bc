"""DDP with its buckets on copy engines, and what of the memory comes back."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from counterpoint import ops
from counterpoint.integrations import ddp
from integration_sections.comparing import ROUNDING, assert_close, assert_equal, refused
from integration_sections.layered import deep_model, given_to, gradients


def ddp_gradients() -> None:
    """Stock gradients within rounding, the same bits twice, whatever the buckets and however many are in flight."""
    given = given_to(dist.get_rank())
    wanted = gradients(DistributedDataParallel(deep_model()), given)
    for bucket_mb, in_flight in ((0.001, 1), (0.001, 3), (0.003, 8), (25, 3)):
        model = DistributedDataParallel(deep_model(), bucket_cap_mb=bucket_mb, gradient_as_bucket_view=in_flight > 1)
        averages = ddp.register(model, in_flight=in_flight, least_part_bytes=0, max_buffer_bytes=4096)
        results = [gradients(model, given) for _ in range(3)]
        assert_close(results[0], wanted, 1e-5)
        assert_equal(results[1], results[2])
        assert averages.num_by_copies > 2 or bucket_mb == 25
        assert averages.num_by_library == 0


def ddp_types() -> None:
    for dtype in (torch.float64, torch.bfloat16):
        given = given_to(dist.get_rank(), dtype)
        wanted = gradients(DistributedDataParallel(deep_model(dtype)), given)
        model = DistributedDataParallel(deep_model(dtype))
        ddp.register(model, least_part_bytes=0)
        assert_close(gradients(model, given), wanted, ROUNDING[dtype])


def ddp_among_ignored_parameters() -> None:
    """Parameters that the job told DDP to ignore may be anywhere, and of any type."""
    given = given_to(dist.get_rank())
    wanted = gradients(DistributedDataParallel(deep_model()), given)
    model = nn.Module()
    model.table, model.deep = nn.Embedding(3, 3, dtype=torch.complex64, device="meta"), deep_model()
    model.forward = model.deep.forward
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["table.weight"])
    wrapped = DistributedDataParallel(model)
    state = ddp.register(wrapped, least_part_bytes=0)
    wrapped(given).pow(2).sum().backward()
    assert_close([each.grad for each in model.deep.parameters()], wanted, 1e-5)
    assert state.num_by_copies > 0


def ddp_compression() -> None:
    given = given_to(dist.get_rank())
    wanted = gradients(DistributedDataParallel(deep_model()), given)
    for compression, limit in (("bf16", 2**-7), ("fp8", 0.15)):
        model = DistributedDataParallel(deep_model(), bucket_cap_mb=0.01)
        ddp.register(model, compression=compression, least_part_bytes=0)
        found = gradients(model, given)
        assert_close(found, wanted, limit)
        assert not all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


def ddp_falls_back() -> None:
    """Small buckets are the library's, and nothing is lost."""
    given = given_to(dist.get_rank())
    wanted = gradients(DistributedDataParallel(deep_model()), given)
    model = DistributedDataParallel(deep_model())
    averages = ddp.register(model)
    assert_close(gradients(model, given), wanted, 1e-6)
    assert averages.num_by_copies == 0
    assert averages.num_by_library == 1


def ddp_refuses() -> None:
    wide, narrow = DistributedDataParallel(deep_model()), DistributedDataParallel(deep_model(torch.bfloat16))
    refused(lambda: ddp.register(wide, in_flight=0), "in_flight")
    refused(lambda: ddp.register(wide, in_flight="3"), "in_flight must be from 1 to 8; found '3'")
    refused(lambda: ddp.register(wide, least_part_bytes=-1), "least_part_bytes .* 0 or more; found -1")
    refused(lambda: ddp.register(wide, max_buffer_bytes="1 MiB"), "max_buffer_bytes must be .*; found '1 MiB'")
    refused(lambda: ddp.register(wide, compression="zip"), "compression")
    refused(lambda: ddp.register(wide, compression=["fp8"]), "compression")
    refused(lambda: ddp.register(wide, max_buffer_bytes=1), "max_buffer_bytes")
    refused(lambda: ddp.register(narrow, compression="bf16"), "saves nothing")


def memory_is_reported_and_given_back() -> None:
    model = DistributedDataParallel(deep_model())
    ddp.register(model, least_part_bytes=0)
    given = given_to(dist.get_rank())
    wanted = gradients(model, given)
    num_bytes = sum(report.num_bytes for report in ops.pool_report())
    assert num_bytes > 0
    ops.release()
    assert not ops.pool_report()
    assert_equal(gradients(model, given), wanted)
    ops.release()
