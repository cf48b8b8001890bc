"""NCCL variables that make communication too slow to hide, or take SMs from it; and peer access."""

from counterpoint.doctor.job_context import Finding, JobContext, is_nonzero, whole_number

DOCUMENTATION = "NCCL documentation, environment variables"
HOPPER = (9,)
# 256 MiB all-reduce on 2 H200s over NVLink, NCCL 2.28.9, ms by CTAs: 24: 0.895, 16: 1.014, 8: 1.665, 4: 3.244
SLOW_CTAS = 8
# NCCL's default is 24 on 2 to 4 H200s; its documentation names 32 as the former limit
MANY_CTAS = 32
THREADS = ("64", "128", "256", "512")
USUAL_THREADS = 512


def peer_to_peer_off(context: JobContext) -> Finding | None:
    """Peer access switched off between GPUs of one host."""
    if is_nonzero(context.value("NCCL_P2P_DISABLE")):
        name = "NCCL_P2P_DISABLE"
    elif context.value("NCCL_P2P_LEVEL").upper() in ("LOC", "0"):
        name = "NCCL_P2P_LEVEL"
    else:
        return None
    if len(context.gpus) == 1 or _are_all_blocked(context):  # one GPU has no peers
        return None
    return Finding(
        severity="may defeat overlap",
        setting=name,
        found=context.found(name),
        fact="GPUs of one host then exchange all data through host memory, many times slower than NVLink: too slow "
        "to hide behind computation.",
        source=f"{DOCUMENTATION}, {name} (for debugging, not for production)",
        remedy=f"Unset {name}.",
    )


def no_peer_access(context: JobContext) -> Finding | None:
    """GPUs that cannot reach each other."""
    if not context.blocked_peers:
        return None
    one, other = context.blocked_peers[0]
    count = len(context.blocked_peers)
    return Finding(
        severity="note",
        setting="peer access",
        found=f"none from GPU {one} to GPU {other}" + (f" and in {count - 1} other directions" if count > 1 else ""),
        fact="Between them, NCCL uses host memory; symmetric memory and peer-to-peer copies by copy engines are impossible.",
        source="asked of the driver (cuDeviceCanAccessPeer)",
        remedy="If the GPUs have NVLink or share a PCIe switch, check nvidia-smi topo -p2p r and the container's and "
        "IOMMU's settings.",
    )


def _are_all_blocked(context: JobContext) -> bool:
    count = len(context.gpus)
    return count > 1 and len(context.blocked_peers or ()) == count * (count - 1)


def few_ctas(context: JobContext) -> Finding | None:
    """A limit of CTAs that slows large collectives more than it frees SMs."""
    name, number = _extreme(context, ("NCCL_MAX_CTAS", "NCCL_MAX_NCHANNELS"), is_least=True)
    if number is None or not 1 <= number <= SLOW_CTAS:
        return None
    return Finding(
        severity="may defeat overlap",
        setting=name,
        found=context.found(name),
        fact="A 256 MiB all-reduce takes 1.1 times as long with 16 CTAs as with NCCL's default of 24, 1.9 times "
        "with 8, 3.6 times with 4.",
        source="measured: 2 H200s over NVLink, NCCL 2.28.9; over PCIe the default is lower",
        remedy="Leave it out, or measure 16: `counterpoint tune` tries numbers of CTAs and keeps one only if it pays.",
    )


def many_ctas(context: JobContext) -> Finding | None:
    """More CTAs than NCCL's default."""
    name, number = _extreme(context, ("NCCL_MIN_CTAS", "NCCL_MIN_NCHANNELS"), is_least=False)
    if number is None or number <= MANY_CTAS:
        return None
    share = f" That is {number} of {context.gpus[0].num_sms} SMs." if context.gpus and context.gpus[0].num_sms else ""
    return Finding(
        severity="may defeat overlap",
        setting=name,
        found=context.found(name),
        fact="A CTA of NCCL takes 52,224 of an SM's 65,536 registers (H200), so a GEMM finds no room on an SM that "
        f"holds one.{share}",
        source=f"{DOCUMENTATION}, {name}; read from NCCL 2.28.9's kernels for sm_90",
        remedy="Leave it out: NCCL's default is 24 CTAs on 2 to 4 H200s.",
    )


def _extreme(context: JobContext, names: tuple[str, str], is_least: bool) -> tuple[str, int | None]:
    """Return the variable that takes effect and its number: NCCL takes the more restrictive of the new variable and the
    old one.
    """
    numbers = [(number, name) for name in names if (number := whole_number(context.value(name))) is not None]
    if not numbers:
        return names[0], None
    number, name = min(numbers) if is_least else max(numbers)
    return name, number


def number_of_threads(context: JobContext) -> Finding | None:
    """Fewer threads in a CTA, or a number that NCCL rejects."""
    name = "NCCL_NTHREADS"
    value = context.value(name)
    if not value or value == str(USUAL_THREADS):
        return None
    fact = (
        "It lowers the threads of NCCL's CTAs and their bandwidth, not their shared memory: if shared memory "
        "is short, it makes no room."
        if value in THREADS
        else f"NCCL accepts {', '.join(THREADS[:-1])} or {THREADS[-1]}."
    )
    return Finding(
        severity="note",
        setting=name,
        found=context.found(name),
        fact=fact,
        source=f"{DOCUMENTATION}, {name}; read from NCCL 2.28.9's kernels for sm_90",
        remedy="Leave it out unless a measurement of the whole step shows a gain.",
    )


def nvlink_sharp_off(context: JobContext) -> Finding | None:
    """In-switch reductions, turned off although the GPUs could have them."""
    has_switch = all(gpu.has_multicast is not False for gpu in context.gpus)
    is_capable = has_switch and (context.architecture() or (0,)) >= HOPPER
    if context.value("NCCL_NVLS_ENABLE") != "0" or not is_capable or len(context.gpus) == 1:
        return None
    return Finding(
        severity="note",
        setting="NCCL_NVLS_ENABLE",
        found=context.found("NCCL_NVLS_ENABLE"),
        fact="Since Hopper an NVSwitch can reduce data (NVLink SHARP). With this off, SMs do all the work of an all-reduce.",
        source=f"{DOCUMENTATION}, NCCL_NVLS_ENABLE",
        remedy="Unset it, unless NCCL fails to start without it; then measure both.",
    )


def forced_algorithm(context: JobContext) -> Finding | None:
    """An algorithm or protocol chosen for all sizes."""
    name = context.first(bool, "NCCL_PROTO", "NCCL_ALGO")
    if name is None:
        return None
    return Finding(
        severity="note",
        setting=name,
        found=context.found(name),
        fact="One algorithm for all sizes and collectives replaces NCCL's own choice; the best for small messages "
        "is slow for large ones.",
        source=f"{DOCUMENTATION}, {name} (for debugging, not for production)",
        remedy="Leave it out, unless the job needs it to be deterministic.",
    )


def network_by_sockets(context: JobContext) -> Finding | None:
    """Several nodes without RDMA."""
    nodes = context.job.num_nodes if context.job else None
    if is_nonzero(context.value("NCCL_IB_DISABLE")):
        name = "NCCL_IB_DISABLE"
    elif context.value("NCCL_NET").lower() == "socket":
        name = "NCCL_NET"
    else:
        return None
    if nodes == 1:
        return None
    return Finding(
        severity="may defeat overlap" if nodes else "note",
        setting=name,
        found=context.found(name) + (f", {nodes} nodes" if nodes else ", an unknown number of nodes"),
        fact="Between nodes, data then goes through IP sockets and host memory instead of InfiniBand or RoCE, if "
        "the nodes have it.",
        source=f"{DOCUMENTATION}, {name}",
        remedy=f"Unset {name} if the nodes have InfiniBand or RoCE.",
    )


def serialized_communicators(context: JobContext) -> Finding | None:
    """An implicit order of communicators, which an old CUDA can keep only by running them one by one."""
    name = "NCCL_LAUNCH_ORDER_IMPLICIT"
    versions = (context.cuda_version, context.torch_cuda_version)
    old = next((version for version in versions if context.is_older_than(version, 12, 3)), None)
    if not is_nonzero(context.value(name)) or old is None:
        return None
    return Finding(
        severity="may defeat overlap",
        setting=name,
        found=f"{context.found(name)}, CUDA {old}",
        fact="Before CUDA 12.3 (runtime and driver), NCCL keeps this order by running the operations of different "
        "communicators one by one.",
        source=f"{DOCUMENTATION}, {name}",
        remedy="Use CUDA 12.3 or later, or unset it and order the communicators in the job.",
    )
