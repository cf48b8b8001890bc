"""A torchrun job on CPUs that launches on the double of libcuda: each step, long kernels beside NCCL's, then the optimizer.

FOLDER is where `libcuda.so.1` lies. What reached the double decides how long a step "took" on a clock that stands in for the
GPU's: 800 us where NCCL's launch carried a priority, else 1000. So a plan that gives it one is faster, on any machine.
"""

import argparse
import ctypes
import os
import sys

import torch
import torch.distributed as dist

NCCL = b"ncclDevKernel_AllReduce_Sum_f32_RING_LL"
LONG = b"_Z11long_kernelPf"


class Reached(ctypes.Structure):
    """`struct double_launch` of libcuda_double.h."""

    _fields_ = (
        ("api", ctypes.c_char_p),
        ("name", ctypes.c_char * 96),
        ("shared_bytes", ctypes.c_uint),
        ("num_attributes", ctypes.c_uint),
        ("grid_x", ctypes.c_uint),
        ("block_x", ctypes.c_uint),
        ("stream", ctypes.c_int),
        ("priority", ctypes.c_int),
        ("argument", ctypes.c_int),
        ("hold_ns", ctypes.c_uint64),
    )


class Driver:
    """Launches through the names that a program finds in libcuda, so through the filter where one is preloaded."""

    def __init__(self, folder: str) -> None:
        self._library = ctypes.CDLL(os.path.join(folder, "libcuda.so.1"))
        self._library.double_make.restype = ctypes.c_void_p
        self._long = self._library.double_make(LONG, 0, 32, 0)
        self._nccl = self._library.double_make(NCCL, 0, 96, 0)

    def step(self) -> int:
        """A collective on its stream and a long kernel on another; the priority of the collective as the driver got it."""
        self._launch(self._nccl, 24, 544, stream=8)
        self._launch(self._long, 4096, 128, stream=7)
        reached = (Reached * 16)()
        count = self._library.double_take_launches(reached, 16)
        found = {launch.name: launch for launch in reached[:count]}
        return 0 if found[NCCL].priority == 1 else found[NCCL].priority

    def _launch(self, function: int, ctas: int, threads: int, stream: int) -> None:
        value = ctypes.c_int(0)
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(value))
        shape = [ctypes.c_uint(number) for number in (ctas, 1, 1, threads, 1, 1, 0)]
        result = self._library.cuLaunchKernel(ctypes.c_void_p(function), *shape, ctypes.c_void_p(stream), parameters, None)
        assert result == 0, result


def stand_in(clock: object, absence_s: float | None = None) -> None:
    """Let the agent take this process for one that computes on an H200, and wait no longer for ranks that never report."""
    from counterpoint.supervised import handshake, torch_job  # noqa: PLC0415  the job itself does not know us
    from counterpoint.supervised.running_job import JobGpu  # noqa: PLC0415

    handshake.ABSENCE_LIMIT_S = absence_s or handshake.ABSENCE_LIMIT_S
    torch_job.job_clock = lambda: clock
    torch_job.job_gpu = lambda: JobGpu(name="NVIDIA H200", num_sms=132, greatest_priority=-3)


class Descent(torch.optim.Optimizer):
    """Gradient descent without torch._dynamo, which torch.optim.SGD imports and which takes longer than all else here."""

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        adding = torch.optim.Optimizer.add_param_group.__wrapped__
        setattr(adding, "__dynamo_disable", adding)
        super().__init__(parameters, {})

    def step(self, closure: object = None) -> None:
        with torch.no_grad():
            for parameter in (each for group in self.param_groups for each in group["params"]):
                parameter.sub_(parameter.grad, alpha=0.1)
                parameter.grad = None


class StepClock:
    """Known at once, and moved on by the job."""

    def __init__(self) -> None:
        self.now_us = 0.0

    def mark(self) -> float:
        return self.now_us

    def elapsed_us(self, start: float, end: float) -> float:
        return end - start


def tell(path: str, text: str) -> None:
    """A file that is there as a whole or not at all."""
    with open(f"{path}.part", "x") as file:
        file.write(text)
    os.rename(f"{path}.part", path)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--by-hand", action="store_true")
    parser.add_argument(
        "--began", default="", help="a file that this process makes, with its rank, after 20 steps: the priority"
    )
    parser.add_argument(
        "--fails-once", default="", help="rank 1 makes this file and ends after 30 steps; not if it is there"
    )
    parser.add_argument("--absence-s", type=float, help="how long ranks wait for one that never reports")
    parser.add_argument("--exit", type=int, default=0)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    driver, clock = Driver(options.folder), StepClock()
    stand_in(clock, options.absence_s)
    torch.manual_seed(0)
    model = torch.nn.Linear(16, 16)
    optimizers = [Descent([parameter]) for parameter in model.parameters()]
    least_priority = 0
    for number in range(options.steps):
        if options.fails_once and number == 30 and dist.get_rank() == 1 and not os.path.exists(options.fails_once):
            open(options.fails_once, "x").close()
            os._exit(7)
        loss = model(torch.ones(4, 16)).square().mean()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        priority = driver.step()
        least_priority = min(priority, least_priority)
        if options.began and number == 20:
            tell(f"{options.began}{dist.get_rank()}", str(least_priority))
        clock.now_us += 800 if priority < 0 else 1000
        for optimizer in optimizers:
            optimizer.step()
        if options.by_hand:
            import counterpoint  # noqa: PLC0415

            counterpoint.step()
    if dist.get_rank() == 0:
        print(f"loss {loss.item()!r} at {clock.now_us:.0f} us")
    dist.barrier()
    sys.stdout.flush()
    os._exit(options.exit)  # torch 2.13 aborts now and then when a process with gloo threads ends by itself


if __name__ == "__main__":
    main()
