"""The simulated hardware of a Gluon kernel: partitions of a block, shared memory, barriers, copies and products.

Partitions of warps run by turns, and copies complete late and in any order, drawn from a seed. Every read and write of
shared memory is an event. An access must be ordered after earlier events by barriers that the partition waited for
(happens-before). A missing barrier raises for every seed, even where a GPU would happen to give the right result. An
asynchronous operation without a wait raises as well, and so does one that accesses a thread's writes without a fence.
Time, registers and the threads within a partition are not simulated.
"""

import functools
import itertools
import linecache
import random
import sys
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from gluon_interpreter.tiles import (
    DotOperandLayout,
    Hazard,
    MBarrierLayout,
    NVMMADistributedLayout,
    NVMMASharedLayout,
    Pointer,
    SwizzledSharedLayout,
    TensorDescriptor,
    Value,
    number,
)

SHARED_BYTES = 232_448  # per block on Hopper
_THREADS = 128  # of a partition that copies


class Block:
    """One program: its partitions, its copies in flight, and the partition that runs."""

    def __init__(self, program: tuple[int, ...], grid: tuple[int, ...], order: random.Random) -> None:
        self.program, self.grid, self.order = program, grid, order
        self.events = itertools.count()
        self.shared_bytes = 0
        self.partitions: list[Partition] = []
        self.copies: list[Copy | CopiesByThreads] = []
        self.copied: set[int] = set()
        self.failure: BaseException | None = None
        self.current: Partition
        self.turn_is_over = threading.Lock()
        self.turn_is_over.acquire()

    def run(self, call: Callable[[], None]) -> None:
        whole = self.start(call, set(), "the whole")
        while self.partitions and not self.failure:
            ready = [partition for partition in self.partitions if partition.ready()] + self.copies
            if not ready:
                waiting = "; ".join(f"{one.name} waits for {one.waits_for}" for one in self.partitions)
                self.failure = Hazard(f"deadlock: {waiting}")
                break
            # The first one keeps running for a while, because mistakes show when one partition is far ahead.
            turn = max(ready, key=lambda one: one.priority)
            if self.order.random() < 0.1:
                turn.priority = self.order.random()
            turn.go_on()
        for partition in list(self.partitions):  # they see the failure and end
            partition.go_on()
        if self.failure:
            raise self.failure
        if not self.copied <= whole.knows:
            raise Hazard("ends without having waited for all its copies")

    def start(self, call: Callable[[], None], knows: set[int], name: str) -> "Partition":
        self.partitions.append(Partition(call, knows, name, self.order.random()))
        return self.partitions[-1]

    def pause(self, ready: Callable[[], bool] = lambda: True, waits_for: str = "its turn") -> None:
        partition = self.current
        partition.ready, partition.waits_for = ready, waits_for
        self.turn_is_over.release()
        partition.turn.acquire()
        if self.failure:
            raise SystemExit


block: Block  # the running one


def run_block(program: tuple[int, ...], grid: tuple[int, ...], order: random.Random, call: Callable[[], None]) -> None:
    global block
    block = Block(program, grid, order)
    block.run(call)


class Partition:
    """Warps that run one function, simulated by a thread that waits for its turn at every barrier and copy."""

    def __init__(self, call: Callable[[], None], knows: set[int], name: str, priority: float) -> None:
        self.knows = set(knows)  # events that happened before the next operation
        self.unfenced: list[Chunk | Barrier] = []
        self.fenced: set[int] = set()  # events that happened before its last fence
        self.products: deque[Product] = deque()
        self.group: list[tuple[SharedTile, Pointer, Value | None, int]] = []  # copies by threads
        self.groups: deque[list[tuple[SharedTile, Pointer, Value | None, int]]] = deque()
        self.landed: set[int] = set()  # copies that each thread has waited for, not yet known to the other threads
        self.stores: deque[tuple[TensorDescriptor, list[int], SharedTile]] = deque()
        self.name, self.waits_for, self.priority = name, "its turn", priority
        self.ready: Callable[[], bool] = lambda: True
        self.turn = threading.Lock()
        self.turn.acquire()
        threading.Thread(target=self.run, args=(call,), daemon=True).start()

    def run(self, call: Callable[[], None]) -> None:
        self.turn.acquire()
        try:
            if not block.failure:
                call()
                if self.products or self.stores:
                    raise Hazard("ends before its products and stores are complete")
                if self.group or any(self.groups):
                    raise Hazard("ends before its copies are complete")
        except BaseException as error:
            block.failure = block.failure or error
        block.partitions.remove(self)
        block.turn_is_over.release()

    def go_on(self) -> None:
        block.current = self
        self.turn.release()
        block.turn_is_over.acquire()


def warp_specialize(
    partitions: list[tuple[Callable[..., None], tuple[Any, ...]]], worker_num_warps: list[int], num_regs: list[int]
) -> None:
    if not len(partitions) - 1 == len(worker_num_warps) == len(num_regs):
        raise ValueError("every partition but the first must have a number of warps and a number of registers")
    whole = block.current
    parts = [
        block.start(functools.partial(function, *arguments), whole.knows, f"partition {i}")
        for i, (function, arguments) in enumerate(partitions)
    ]
    block.pause(lambda: not any(part in block.partitions for part in parts), "its partitions")
    whole.knows.update(*(part.knows for part in parts))


@dataclass(eq=False)
class Chunk:
    """Shared memory under one index of an allocation, and the events there."""

    written: int | None = None
    read: set[int] = field(default_factory=set)  # since the last write
    readers: int = 0  # operations in flight
    fenced: bool = True

    def begin_read(self, asynchronous: bool) -> None:
        if self.written is None:
            raise Hazard("reads shared memory that was never written")
        if self.written not in block.current.knows:
            raise Hazard("reads shared memory without having waited for the write")
        self._check_fence(asynchronous)
        self.readers += 1

    def end_read(self) -> None:
        event = next(block.events)
        self.readers -= 1
        self.read.add(event)
        block.current.knows.add(event)

    def write(self, asynchronous: bool) -> int:
        if self.readers:
            raise Hazard("overwrites shared memory that an operation in flight reads")
        if not (self.read | {self.written} - {None}) <= block.current.knows:
            raise Hazard("overwrites shared memory without having waited for its readers and its writer")
        self._check_fence(asynchronous)
        self.fenced |= asynchronous  # an asynchronous write replaces writes by threads, and needs no fence
        self.written, self.read = next(block.events), set()
        return self.written

    def _check_fence(self, asynchronous: bool) -> None:
        if asynchronous and not self.fenced and self.written not in block.current.fenced:
            raise Hazard("accesses a thread's writes asynchronously without fence_async_shared()")


@dataclass
class SharedTile:
    """A view of a chunk with a shape and a layout."""

    chunk: Chunk
    data: Tensor
    layout: NVMMASharedLayout
    shape = property(lambda self: list(self.data.shape))
    dtype = property(lambda self: self.data.dtype)
    chunks = property(lambda self: [self.chunk])

    def reshape(self, shape: tuple[int, ...]) -> "SharedTile":
        return SharedTile(self.chunk, self.data.view(shape), replace(self.layout, rank=len(shape)))

    def permute(self, order: tuple[int, int]) -> "SharedTile":
        if isinstance(self.layout, SwizzledSharedLayout):
            return SharedTile(self.chunk, self.data.permute(order), replace(self.layout, order=self.layout.order[::-1]))
        return SharedTile(self.chunk, self.data.permute(order), replace(self.layout, transposed=order == (1, 0)))

    def _reinterpret(self, dtype: torch.dtype, shape: tuple[int, ...], layout: NVMMASharedLayout) -> "SharedTile":
        data = self.data.reshape(-1).view(torch.uint8)[: torch.Size(shape).numel() * dtype.itemsize]
        return SharedTile(self.chunk, data.view(dtype).view(shape), layout)

    def slice(self, start: int, length: int, dim: int = 0) -> "SharedTile":
        if start < 0 or start + length > self.shape[dim]:
            raise ValueError(f"{start} to {start + length} of dimension {dim} are not inside {self.shape}")
        return SharedTile(self.chunk, self.data.narrow(dim, start, length), self.layout)

    def load(self, layout: Any) -> Value:
        self.chunk.begin_read(asynchronous=False)
        self.chunk.end_read()
        return Value(self.data.clone(), layout)

    def store(self, value: Value) -> None:
        if (list(value.data.shape), value.data.dtype) != (self.shape, self.dtype):
            raise ValueError(f"{tuple(value.data.shape)} {value.data.dtype} does not fit {self.shape} {self.dtype}")
        block.current.knows.add(self.chunk.write(asynchronous=False))
        self.chunk.fenced = False
        block.current.unfenced.append(self.chunk)
        self.data.copy_(value.data)


@dataclass
class JoinedTile:
    """A view of the columns of several tiles, one after the other."""

    tiles: list[SharedTile]
    layout: NVMMASharedLayout
    data = property(lambda self: torch.cat([tile.data for tile in self.tiles], dim=-1))
    chunks = property(lambda self: [tile.chunk for tile in self.tiles])

    def store(self, value: Value) -> None:
        widths = [tile.shape[-1] for tile in self.tiles]
        for tile, columns in zip(self.tiles, value.data.split(widths, dim=-1), strict=True):
            tile.store(Value(columns, value.layout))


@dataclass(eq=False)
class Barrier:
    """An mbarrier: a phase ends after `count` arrivals and all expected bytes."""

    MBarrierLayout: ClassVar[type] = MBarrierLayout
    name: str
    count: int = 0
    missing: int = 0
    bytes: int = 0
    phase: int = 0
    fenced: bool = False
    arriving: set[int] = field(default_factory=set)  # events before the arrivals of this phase
    arrived: set[int] = field(default_factory=set)  # events before the end of earlier phases

    def init(self, count: int) -> None:
        self.count = self.missing = count
        block.current.unfenced.append(self)

    def arrive(self, *, count: int = 1) -> None:
        self._arrive(count, 0)

    def expect(self, bytes: int) -> None:
        self._arrive(1, bytes)

    def _arrive(self, count: int, bytes: int) -> None:
        block.pause()
        self.count_arrivals(count, bytes, block.current.knows)

    def count_arrivals(self, count: int, bytes: int, before: set[int]) -> None:
        if self.missing < count:
            raise Hazard(f"arrives at {self.name}, which expects no more arrivals in phase {self.phase}")
        self.missing -= count
        self.bytes += bytes
        self.arriving |= before
        self.end_phase()

    def wait(self, phase: Any) -> None:
        parity, caller = number(phase), sys._getframe(1)
        line = linecache.getline(caller.f_code.co_filename, caller.f_lineno).strip()
        waits_for = f"{self.name}, which is in phase {self.phase}, to end a phase of parity {parity}: {line}"
        block.pause(lambda: self.phase & 1 != parity, waits_for)
        block.current.knows |= self.arrived

    def end_phase(self) -> None:
        if self.missing == self.bytes == 0:
            self.phase, self.missing = self.phase + 1, self.count
            self.arrived |= self.arriving


def fence_async_shared() -> None:
    for one in block.current.unfenced:
        one.fenced = True
    block.current.unfenced.clear()
    block.current.fenced |= block.current.knows


class Allocation:
    """Shared memory by its first index: chunks or barriers."""

    def __init__(self, dtype: torch.dtype, shape: list[int], layout: Any) -> None:
        if len(shape) != layout.rank + 1:
            raise ValueError(f"shared memory of shape {shape} cannot have the layout {layout}")
        block.shared_bytes += torch.Size(shape).numel() * dtype.itemsize
        if block.shared_bytes > SHARED_BYTES:
            raise Hazard(f"allocates {block.shared_bytes} bytes of shared memory, but a block has {SHARED_BYTES}")
        self.dtype, self.shape, self.layout = dtype, shape, layout
        self.parts: list[Any]
        if isinstance(layout, NVMMASharedLayout | SwizzledSharedLayout):
            empty = torch.nan if dtype.is_floating_point else torch.iinfo(dtype).min
            nans = (torch.full(shape[1:], empty).to(dtype) for _ in range(shape[0]))
            self.parts = [SharedTile(Chunk(), data, layout) for data in nans]
        else:
            self.parts = [Barrier(f"barrier {i} of {shape[0]}") for i in range(shape[0])]

    def _reinterpret(self, dtype: torch.dtype, shape: list[int], layout: Any) -> "Allocation":
        """Return the same memory in other parts: single rows, or tiles with another number of columns.

        The copy engine's layout stores a tile in blocks of 128 bytes of columns. So tiles are split, and joined, along
        their columns.
        """
        view = Allocation.__new__(Allocation)
        view.dtype, view.shape, view.layout = dtype, shape, layout
        if layout.rank == 1:
            view.parts = [
                SharedTile(part.chunk, row, layout) for part in self.parts for row in part.data.view(-1, shape[1])
            ]
            return view
        _, rows, width = shape
        tiles = [
            SharedTile(part.chunk, columns, layout)
            for part in self.parts
            for columns in part.data.view(rows, -1).view(dtype).split(width, dim=-1)
        ]
        joined = width // tiles[0].shape[-1]
        groups = [tiles[i : i + joined] for i in range(0, len(tiles), joined)]
        view.parts = tiles if joined == 1 else [JoinedTile(group, layout) for group in groups]
        if len(view.parts) != shape[0]:
            raise ValueError(f"shared memory of {self.shape} {self.dtype} does not have {shape} {dtype}")
        return view

    def index(self, i: Any) -> Any:
        if not 0 <= number(i) < len(self.parts):
            raise Hazard(f"indexes part {number(i)} of shared memory of {len(self.parts)} parts")
        return self.parts[number(i)]


@dataclass(eq=False)
class CopiesByThreads:
    """Copies in flight by a partition's threads. Each thread arrives at a barrier when its own copies are complete."""

    copies: list[tuple[SharedTile, Pointer, Value | None, int]]
    barrier: Barrier
    before: set[int]  # events
    priority: float

    def go_on(self) -> None:
        block.copies.remove(self)
        for target, source, mask, event in self.copies:
            target.data.copy_(source.load(mask).data)
            self.before.add(event)
        self.barrier.count_arrivals(_THREADS, 0, self.before)


@dataclass(eq=False)
class Copy:
    """A copy in flight from a tensor to shared memory."""

    desc: TensorDescriptor
    at: list[int]
    barrier: Barrier
    target: SharedTile
    event: int
    priority: float

    def go_on(self) -> None:
        block.copies.remove(self)
        there, here = self.desc.overlap(self.at)
        self.target.data.zero_()[here] = self.desc.base[there]
        self.barrier.bytes -= self.target.data.nbytes
        self.barrier.arriving.add(self.event)
        self.barrier.end_phase()


def copy_to_shared(desc: TensorDescriptor, at: list[Any], barrier: Barrier, target: SharedTile) -> None:
    block.pause()
    _check_copy(desc, target)
    if not barrier.fenced:
        raise Hazard(f"copies with {barrier.name} without a fence_async_shared() after its init")
    others = (copy for copy in block.copies if isinstance(copy, Copy) and copy.barrier is barrier)
    under_way = sum(copy.target.data.nbytes for copy in others)
    if barrier.bytes < under_way + target.data.nbytes:
        raise Hazard(f"copies bytes that {barrier.name} does not expect")
    event = target.chunk.write(asynchronous=True)
    block.copied.add(event)
    block.copies.append(Copy(desc, [number(x) for x in at], barrier, target, event, block.order.random()))


def copy_by_threads(target: SharedTile, source: Pointer, mask: Value | None = None) -> None:
    """Start a copy by the threads of a partition; it is complete after `wait_group`. Masked elements become zero."""
    if list(source.offset.data.shape) != target.shape or source.memory.dtype != target.dtype:
        raise ValueError(f"{tuple(source.offset.data.shape)} {source.memory.dtype} does not fit {target.shape}")
    event = target.chunk.write(asynchronous=False)
    target.data.fill_(torch.nan if target.dtype.is_floating_point else -1)  # not yet there
    target.chunk.fenced = False
    block.current.group.append((target, source, mask, event))


def commit_group() -> None:
    block.current.groups.append(block.current.group)
    block.current.group = []


def arrive_after_copies(barrier: Barrier, increment_count: bool) -> None:
    """Let every thread of four warps arrive at the barrier when the copies that it started are complete."""
    block.pause()
    if increment_count or block.current.groups:
        raise ValueError("copies must arrive with the count of the barrier, without groups")
    copies, block.current.group = block.current.group, []
    block.copied.update(event for *_, event in copies)
    block.copies.append(CopiesByThreads(copies, barrier, set(block.current.knows), block.order.random()))


def wait_group(num_outstanding: int) -> None:
    partition = block.current
    while len(partition.groups) > num_outstanding:
        for target, source, mask, event in partition.groups.popleft():
            target.data.copy_(source.load(mask).data)
            partition.landed.add(event)
            partition.unfenced.append(target.chunk)


def thread_barrier() -> None:
    block.current.knows |= block.current.landed
    block.current.landed.clear()


def copy_to_global(desc: TensorDescriptor, at: list[Any], source: SharedTile) -> None:
    _check_copy(desc, source)
    source.chunk.begin_read(asynchronous=True)
    block.current.stores.append((desc, [number(x) for x in at], source))


def store_wait(pendings: int) -> None:
    while len(block.current.stores) > pendings:
        desc, at, source = block.current.stores.popleft()
        there, here = desc.overlap(at)
        desc.base[there] = source.data[here]
        source.chunk.end_read()


def _check_copy(desc: TensorDescriptor, tile: SharedTile) -> None:
    if (desc.block_shape, desc.dtype, desc.layout) != (tile.shape, tile.dtype, tile.layout):
        raise ValueError(f"blocks of {desc.block_shape} in {desc.layout} do not fit {tile.shape} in {tile.layout}")


@dataclass(eq=False)
class Product:
    """acc + a·b in flight: until a wait, it reads its operands and has no value."""

    a: Value | SharedTile
    b: SharedTile | JoinedTile
    acc: "Value | Product"
    use_acc: bool
    result: Value | None = None

    def __getattr__(self, name: str) -> Any:
        raise Hazard("uses the result of a product that it has not waited for")

    def shared(self) -> list[Chunk]:
        return [chunk for x in (self.a, self.b) if not isinstance(x, Value) for chunk in x.chunks]

    def finish(self) -> None:
        acc = self.acc.result if isinstance(self.acc, Product) else self.acc
        product = self.a.data.float() @ self.b.data.float()
        self.result = Value(acc.data + product if self.use_acc else product, acc.layout)
        for chunk in self.shared():
            chunk.end_read()


def warpgroup_mma(
    a: Value | SharedTile, b: SharedTile | JoinedTile, acc: Value | Product, *, use_acc: bool = True, is_async: bool
) -> Product:
    sums = acc
    while isinstance(sums, Product):
        sums = sums.acc
    (m, k), n, layout = a.data.shape, b.data.shape[1], sums.layout
    fits = isinstance(layout, NVMMADistributedLayout) and m == 64 and n % layout.instr_shape[1] == 0
    if (
        not is_async
        or not fits
        or b.data.shape[0] != k
        or sums.data.shape != (m, n)
        or sums.data.dtype != torch.float32
    ):
        raise ValueError(f"no product of {a.data.shape} and {b.data.shape} into {sums.data.shape} with {layout}")
    if isinstance(a, Value) and a.layout != DotOperandLayout(0, layout, 4 // a.data.itemsize):
        raise ValueError(f"an operand in registers must have the operand layout of {layout}, got {a.layout}")
    product = Product(a, b, acc, use_acc)
    for chunk in product.shared():
        chunk.begin_read(asynchronous=True)
    block.current.products.append(product)
    return product


def warpgroup_mma_wait(num_outstanding: int, deps: tuple[Any, ...]) -> Any:
    while len(block.current.products) > num_outstanding:
        block.current.products.popleft().finish()
    results = tuple(dep.result if isinstance(dep, Product) and dep.result is not None else dep for dep in deps)
    return results if len(deps) > 1 else results[0]
