"""How Triton compiles the paper's matmuls for each shipped GPU: registers and shared memory. Needs Triton, and no GPU.

`--write` renews `src/counterpoint/paper/launches.toml`. NVIDIA's registers are what the ptxas that comes with Triton says,
AMD's are the VGPRs in the metadata of the code. On AMD a warp has 64 threads, so half as many warps make the same CTA.
"""

import argparse
import re
import subprocess
import tempfile
from datetime import date
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from counterpoint.machine import load_machine, machine_names
from counterpoint.paper import cases, workloads
from counterpoint.workloads.description import Gemm

FILE = Path(cases.__file__).with_name("launches.toml")
POINTERS = {"bf16": ("*bf16", "*bf16"), "fp16": ("*fp16", "*fp16"), "fp8": ("*fp8e4nv", "*bf16")}
KERNELS = (workloads.matmul_kernel, workloads.persistent_matmul_kernel)
BLACKWELL = 100


def target_of(compute_capability: str) -> GPUTarget:
    if compute_capability.startswith("gfx"):
        return GPUTarget("hip", compute_capability, 64)
    return GPUTarget("cuda", int(compute_capability.replace(".", "")), 32)


def compiled(kernel: object, gemm: Gemm, target: GPUTarget) -> tuple[int, int]:
    """Registers per thread, and bytes of shared memory."""
    operands, output = POINTERS.get(gemm.dtype, ("*fp32", "*fp32"))
    signature = {"a": operands, "b": operands, "c": output, "m": "i32", "n": "i32", "k": "i32"}
    constants = dict(zip(("tm", "tn", "tk", "precision"), (*gemm.tile_sizes, workloads.TYPES[gemm.dtype][2]), strict=True))
    aligned = {(place,): [["tt.divisibility", 16]] for place in range(len(signature))}
    source = ASTSource(
        fn=kernel, signature=signature | dict.fromkeys(constants, "constexpr"), constexprs=constants, attrs=aligned
    )
    options = {"num_warps": gemm.threads_per_cta // target.warp_size, "num_stages": gemm.stages}
    binary = triton.compile(source, target=target, options=options)
    return registers(binary.asm, target), int(binary.metadata.shared)


def registers(code: dict[str, str], target: GPUTarget) -> int:
    if target.backend == "hip":
        found = re.search(r"\.vgpr_count:\s+(\d+)", code["amdgcn"])
    else:
        found = re.search(r"Used (\d+) registers", assembled(code["ptx"], target.arch))
    if found is None:
        raise RuntimeError(f"no registers were told for {target}")
    return int(found[1])


def assembled(ptx: str, architecture: int) -> str:
    """What ptxas says while it assembles."""
    name = "ptxas-blackwell" if architecture >= BLACKWELL else "ptxas"
    ptxas = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    gpu = f"sm_{architecture}a" if architecture >= 90 else f"sm_{architecture}"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "matmul.ptx"
        file.write_text(ptx)
        command = [ptxas, "-v", f"--gpu-name={gpu}", file, "-o", Path(folder) / "matmul.cubin"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stderr


def rows_for(compute_capability: str) -> list[str]:
    """One line of the file for each type and tile that Triton compiles for this GPU."""
    target, rows = target_of(compute_capability), []
    (gemm,) = cases.paper_description("cb_ar_opt2").gemms
    for dtype in cases.TYPES:
        for tile in cases.DEFAULTS["tiles"]:
            retiled = cases.retiled(gemm, tile, dtype)
            try:
                (usual, shared), (persistent, _) = (compiled(kernel, retiled, target) for kernel in KERNELS)
            except (triton.CompilationError, RuntimeError, subprocess.CalledProcessError) as problem:
                print(f"{compute_capability} {dtype} {tile}: left out ({str(problem).splitlines()[-1][:80]})")
                continue
            rows.append(f'  ["{dtype}", "{tile}", {usual}, {persistent}, {shared}],')
            print(compute_capability, rows[-1].strip(), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"renew {FILE.name}")
    is_written = parser.parse_args().write
    capabilities = sorted({load_machine(name).gpu.compute_capability for name in machine_names(variants=False)})
    lines = [
        "# How Triton compiles the paper's matmuls (paper/workloads.py) for each GPU; made by benchmarks/paper_launches.py.",
        f'source = "Triton {triton.__version__} and its ptxas, without a GPU, {date.today().isoformat()}; '
        '64 and 72 registers of bf16 in 64x64x32 and 64x64x64 are also what an H200 ran"',
        "",
        "# by compute capability: type, tile, registers per thread, those of the persistent kernel, bytes of shared memory",
        "[launches]",
    ]
    for capability in capabilities:
        lines += [f'"{capability}" = [', *rows_for(capability), "]"]
    if is_written:
        FILE.write_text("\n".join(lines) + "\n")
        print(f"written to {FILE}")


if __name__ == "__main__":
    main()
