"""Gluon code that kernels of several operations use on Hopper: barriers, and functions that Triton 3.9 renamed."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier, tma

async_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
async_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
copy_by_threads = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared
thread_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier


@gluon.jit
def make_barriers(NUM: gl.constexpr, ARRIVALS: gl.constexpr) -> gl.tensor:
    barriers = gl.allocate_shared_memory(gl.int64, [NUM, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUM):
        mbarrier.init(barriers.index(i), count=ARRIVALS)
    return barriers
