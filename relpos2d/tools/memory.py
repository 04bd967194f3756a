"""What a call costs in memory: bytes allocated at its highest point, and a limit that turns too much into an error."""

from __future__ import annotations

import gc
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch


def peak_bytes(function: Callable[[], object], device: torch.device | str = "cpu") -> int:
    """Bytes newly allocated at the highest point of a call, its result among them, what was there before it not.

    On a CPU the allocations and frees that torch's allocator reports are added up in their order: exact, and the same in
    every run, so that a test may assert it. Not seen is what a library (MKL, oneDNN) allocates behind torch's back. Memory
    that was there before the call and is freed by it counts as negative. On CUDA it is the allocator's own maximum.

    Call `function` once before, if its first call compiles or fills caches and that is not what you ask about.

    Args:
        function: called once, without arguments.
        device: where it computes; "cpu" or a CUDA device.

    Returns:
        Bytes, at least 0.

    Raises:
        ValueError: a device of another type.
    """
    device = torch.device(device)
    # garbage of others, collected in the middle, would count as freed
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        if device.type == "cpu":
            return _cpu_peak(function)
        if device.type == "cuda":
            return _cuda_peak(function, device)
    finally:
        if was_enabled:
            gc.enable()
    raise ValueError(f"peak_bytes: device={str(device)!r} must be of the type cpu or cuda")


def available_bytes() -> int | None:
    """Memory of the machine that may still be taken without swapping; None where the system does not tell."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    fields = dict(line.split(":", 1) for line in lines)
    free = int(fields["MemAvailable"].split()[0]) * 1024
    try:  # a container may have less than its machine
        group = Path("/sys/fs/cgroup")
        free = min(free, int((group / "memory.max").read_text()) - int((group / "memory.current").read_text()))
    except (OSError, ValueError):
        pass
    return max(free, 0)


@contextmanager
def limited_memory(share: float = 0.9) -> Iterator[int | None]:
    """Let allocations on the CPU beyond a share of the available memory raise, where else the system would end the process.

    The limit holds for the process and for what it starts meanwhile. Only on Linux; elsewhere nothing is limited. Not for
    use with CUDA, which reserves addresses by the terabyte.

    Yields:
        The limit in bytes above what the process has at the start; None where there is none.

    Raises:
        ValueError: a share outside of 0..1.
    """
    if not 0.0 <= share <= 1.0:
        raise ValueError(f"limited_memory: share={share} must be between 0 and 1")
    free = available_bytes()
    if free is None or not sys.platform.startswith("linux"):
        yield None
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    own = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    allowed = math.floor(share * free)
    limits = [own + allowed, *(limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY)]
    resource.setrlimit(resource.RLIMIT_AS, (min(limits), hard))
    try:
        yield min(limits) - own
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _cpu_peak(function: Callable[[], object]) -> int:
    # torch.profiler gives the same sums, and writes lines of its own to stderr each time
    profiling = torch._C._profiler
    config = profiling.ProfilerConfig(
        profiling.ProfilerState.CPU, False, True, False, False, False, profiling._ExperimentalConfig()
    )
    torch._C._autograd._enable_profiler_legacy(config)
    result = None
    try:
        result = function()
    finally:
        threads = torch._C._autograd._disable_profiler_legacy()
    del result
    held = peak = 0
    for records in threads:
        for record in records:
            if record.kind() == "memory_alloc":
                held += record.cpu_memory_usage()
                peak = max(peak, held)
    return peak


def _cuda_peak(function: Callable[[], object], device: torch.device) -> int:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    result = function()
    torch.cuda.synchronize(device)
    del result
    return max(0, torch.cuda.max_memory_allocated(device) - before)
