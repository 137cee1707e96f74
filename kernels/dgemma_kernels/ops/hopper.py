"""Gluon code that kernels of several operations use on Hopper: barriers, slots of a ring, descriptors, and functions
that Triton 3.9 renamed.
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier, tma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

async_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
async_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
copy_by_threads = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared
thread_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier

LINE = gl.constexpr(128)  # bytes per row in shared memory, and the swizzle width


def describe_lines(tensor: Tensor, block: list[int]) -> TensorDescriptor:
    """Describe blocks of LINE bytes in the last dimension. block: their sizes in the other dimensions."""
    layout = gl.NVMMASharedLayout(
        swizzle_byte_width=LINE.value, element_bitwidth=8 * tensor.element_size(), rank=tensor.ndim
    )
    return TensorDescriptor.from_tensor(tensor, [*block, LINE.value // tensor.element_size()], layout)


@gluon.jit
def make_barriers(NUM: gl.constexpr, ARRIVALS: gl.constexpr) -> gl.tensor:
    barriers = gl.allocate_shared_memory(gl.int64, [NUM, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUM):
        mbarrier.init(barriers.index(i), count=ARRIVALS)
    return barriers


@gluon.jit
def next_slot(slot: gl.tensor, phase: gl.tensor, STAGES: gl.constexpr) -> tuple[gl.tensor, gl.tensor]:
    """Return the slot after this one in a ring of STAGES, and the phase of its barriers."""
    last = slot == STAGES - 1
    return gl.where(last, 0, slot + 1), gl.where(last, phase ^ 1, phase)


@gluon.jit
def slot_before(slot: gl.tensor, STAGES: gl.constexpr) -> gl.tensor:
    # Computed, not carried through the loop: of two variables that are equal before a loop, Triton 3.6 loses one.
    return gl.where(slot == 0, STAGES - 1, slot - 1)


@gluon.jit
def wait_for_products(sums: gl.tuple, RUNNING: gl.constexpr, MORE: gl.constexpr, PARTS: gl.constexpr) -> gl.tuple:
    """Wait until at most RUNNING products run, and return all sums.

    sums: two parts for the first block of rows, then two for the second block. MORE: rows of the second block.
    """
    low, high, more_low, more_high = sums
    if MORE > 0 and PARTS == 2:
        low, high, more_low, more_high = warpgroup_mma_wait(RUNNING, deps=(low, high, more_low, more_high))
    elif MORE > 0:
        low, more_low = warpgroup_mma_wait(RUNNING, deps=(low, more_low))
    elif PARTS == 2:
        low, high = warpgroup_mma_wait(RUNNING, deps=(low, high))
    else:
        low = warpgroup_mma_wait(RUNNING, deps=(low,))
    return low, high, more_low, more_high
