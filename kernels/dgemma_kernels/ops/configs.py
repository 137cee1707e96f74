"""Tile shapes as data: what was measured best on a GPU, and a choice that fits any GPU of the last ten years."""

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True, kw_only=True)
class Tile:
    """One program's share of a matrix product: `cols` outputs of as many rows as the routing has a tile, `depth` at a
    time, on `warps` warps with `stages` loads in flight, in at most `registers` a thread."""

    cols: int
    depth: int
    warps: int
    stages: int
    registers: int | None = None

    def __post_init__(self) -> None:
        for field in ("cols", "depth", "warps"):
            value = getattr(self, field)
            if value < 1 or value & (value - 1):
                raise ValueError(f"Tile.{field} must be a power of two, got {value}.")
        if self.stages < 1:
            raise ValueError(f"Tile.stages must be >= 1, got {self.stages}.")


@dataclass(frozen=True, kw_only=True)
class ExpertConfig:
    """How the experts run for batches of up to `max_tokens` tokens: rows of a tile, and the two products' tiles.

    Rows are a power of two or the sum of two, which are two blocks over the same weights: 96 is 64 and 32.
    """

    max_tokens: int
    rows: int
    gate_up: Tile
    down: Tile

    def __post_init__(self) -> None:
        if self.rows < 16 or self.rows % 16 or self.rows.bit_count() > 2:
            raise ValueError(f"ExpertConfig.rows must be a power of two >= 16 or the sum of two, got {self.rows}.")


@dataclass(frozen=True, kw_only=True)
class DenseConfig:
    """How the dense MLP runs beside the experts at `min_tokens` to `max_tokens` tokens: `programs` programs, each alone
    on a multiprocessor, over tiles of `rows` tokens."""

    min_tokens: int
    max_tokens: int
    programs: int
    rows: int
    gate_up_cols: int
    down_cols: int
    depth: int
    warps: int
    stages: int

    def __post_init__(self) -> None:
        for field in ("rows", "gate_up_cols", "down_cols", "depth", "warps"):
            value, least = getattr(self, field), 1 if field == "warps" else 16  # tensor cores take no less
            if value < least or value & (value - 1):
                raise ValueError(f"DenseConfig.{field} must be a power of two >= {least}, got {value}.")
        if self.min_tokens > self.max_tokens:
            raise ValueError(
                f"DenseConfig.min_tokens must be at most max_tokens = {self.max_tokens}, got {self.min_tokens}."
            )
        if self.programs < 1 or self.stages < 1:
            raise ValueError(f"DenseConfig.programs and stages must be >= 1, got {self.programs} and {self.stages}.")


_ANY = 1 << 62

EXPERTS: dict[str, tuple[ExpertConfig, ...]] = {
    # Fits the 99 KiB of shared memory a block gets on consumer Ampere and Ada.
    "default": (
        ExpertConfig(
            max_tokens=512,
            rows=32,
            gate_up=Tile(cols=64, depth=64, warps=4, stages=3),
            down=Tile(cols=64, depth=64, warps=4, stages=3),
        ),
        ExpertConfig(
            max_tokens=_ANY,
            rows=64,
            gate_up=Tile(cols=64, depth=64, warps=4, stages=3),
            down=Tile(cols=64, depth=64, warps=4, stages=3),
        ),
    ),
    "NVIDIA H200": (
        ExpertConfig(
            max_tokens=64,
            rows=16,
            gate_up=Tile(cols=64, depth=128, warps=4, stages=4),
            down=Tile(cols=64, depth=64, warps=4, stages=3),
        ),
        ExpertConfig(
            max_tokens=320,
            rows=32,
            gate_up=Tile(cols=64, depth=128, warps=4, stages=5),
            down=Tile(cols=64, depth=64, warps=4, stages=3),
        ),
        ExpertConfig(
            max_tokens=768,
            rows=64,
            gate_up=Tile(cols=64, depth=64, warps=4, stages=8),
            down=Tile(cols=128, depth=64, warps=8, stages=3),
        ),
        ExpertConfig(
            max_tokens=1152,
            rows=80,
            gate_up=Tile(cols=64, depth=64, warps=4, stages=4),
            down=Tile(cols=128, depth=64, warps=8, stages=4),
        ),
        ExpertConfig(
            max_tokens=1536,
            rows=64,
            gate_up=Tile(cols=64, depth=64, warps=4, stages=4),
            down=Tile(cols=128, depth=64, warps=8, stages=4),
        ),
        ExpertConfig(
            max_tokens=_ANY,
            rows=128,
            gate_up=Tile(cols=128, depth=64, warps=8, stages=4),
            down=Tile(cols=128, depth=64, warps=8, stages=3),
        ),
    ),
}

# The same for float8 weights. One scale of hidden values is for the columns of a tile of gate_up, which the depth of a
# tile of down divides; the published hidden width of 704 is 11 times 64.
EXPERTS_FLOAT8: dict[str, tuple[ExpertConfig, ...]] = {
    "default": (
        ExpertConfig(
            max_tokens=512,
            rows=32,
            gate_up=Tile(cols=64, depth=128, warps=4, stages=3),
            down=Tile(cols=64, depth=64, warps=4, stages=3),
        ),
        ExpertConfig(
            max_tokens=_ANY,
            rows=64,
            gate_up=Tile(cols=64, depth=128, warps=4, stages=3),
            down=Tile(cols=64, depth=64, warps=4, stages=3),
        ),
    ),
    "NVIDIA H200": (
        ExpertConfig(
            max_tokens=64,
            rows=16,
            gate_up=Tile(cols=64, depth=256, warps=4, stages=4),
            down=Tile(cols=64, depth=64, warps=4, stages=5),
        ),
        ExpertConfig(
            max_tokens=320,
            rows=32,
            gate_up=Tile(cols=64, depth=128, warps=4, stages=3),
            down=Tile(cols=128, depth=64, warps=4, stages=5),
        ),
        ExpertConfig(
            max_tokens=768,
            rows=64,
            gate_up=Tile(cols=64, depth=128, warps=4, stages=4),
            down=Tile(cols=128, depth=64, warps=4, stages=4),
        ),
        ExpertConfig(
            max_tokens=1152,
            rows=80,
            gate_up=Tile(cols=64, depth=128, warps=4, stages=4),
            down=Tile(cols=128, depth=64, warps=4, stages=4),
        ),
        ExpertConfig(
            max_tokens=1536,
            rows=64,
            gate_up=Tile(cols=64, depth=128, warps=4, stages=4),
            down=Tile(cols=128, depth=64, warps=4, stages=5),
        ),
        ExpertConfig(
            max_tokens=_ANY,
            rows=128,
            gate_up=Tile(cols=64, depth=128, warps=8, stages=4),
            down=Tile(cols=128, depth=64, warps=8, stages=4),
        ),
    ),
}

# The same for packed weights, of which a block is 128 rows, 64 of gate and of up each, and 128 deep. In 168 registers
# three programs of four warps share a multiprocessor.
EXPERTS_PACKED: dict[str, tuple[ExpertConfig, ...]] = {
    "default": (
        ExpertConfig(
            max_tokens=512,
            rows=32,
            gate_up=Tile(cols=64, depth=128, warps=4, stages=3),
            down=Tile(cols=128, depth=128, warps=4, stages=3),
        ),
        ExpertConfig(
            max_tokens=_ANY,
            rows=64,
            gate_up=Tile(cols=64, depth=128, warps=8, stages=2),
            down=Tile(cols=128, depth=128, warps=8, stages=2),
        ),
    ),
    "NVIDIA H200": (
        ExpertConfig(
            max_tokens=64,
            rows=16,
            gate_up=Tile(cols=64, depth=128, warps=4, stages=4),
            down=Tile(cols=128, depth=128, warps=4, stages=3),
        ),
        ExpertConfig(
            max_tokens=320,
            rows=32,
            gate_up=Tile(cols=64, depth=128, warps=4, stages=4),
            down=Tile(cols=128, depth=128, warps=4, stages=3, registers=168),
        ),
        ExpertConfig(
            max_tokens=1536,
            rows=64,
            gate_up=Tile(cols=64, depth=128, warps=4, stages=3),
            down=Tile(cols=128, depth=128, warps=8, stages=3),
        ),
        ExpertConfig(
            max_tokens=_ANY,
            rows=128,
            gate_up=Tile(cols=64, depth=128, warps=8, stages=3),
            down=Tile(cols=128, depth=128, warps=8, stages=3),
        ),
    ),
}

# Nearly all of a multiprocessor's shared memory, so that no program of another kernel shares it.
_DENSE_H200 = DenseConfig(
    min_tokens=65,
    max_tokens=256,
    programs=33,
    rows=256,
    gate_up_cols=64,
    down_cols=128,
    depth=64,
    warps=8,
    stages=4,
)
# The published model has 33 tiles of gate and up and 22 of down for every 256 tokens: at 256, 512 and 1,024 tokens
# these programs end together.
DENSE: dict[str, tuple[DenseConfig, ...]] = {
    "NVIDIA H200": (
        _DENSE_H200,
        replace(_DENSE_H200, min_tokens=257, max_tokens=512, programs=66),
        replace(_DENSE_H200, min_tokens=513, max_tokens=1152, programs=44),
    ),
}

# GPUs on which a kernel starts while the last programs of the kernel in front still run, and waits for them itself:
# programmatic dependent launch, Hopper and later.
DEPENDENT_LAUNCH: set[str] = {"NVIDIA H200"}

# GPUs whose memory unit fetches whole blocks of the experts' weights (TMA, Hopper and later). Elsewhere Triton turns a
# descriptor into loads that wait for each other.
TENSOR_DESCRIPTORS: set[str] = {"NVIDIA H200"}


def gpu_name(device: torch.device) -> str:
    """The key into the tables here: the GPU's name, or "default" for tensors on no GPU (Triton's interpreter).

    Hoppers that nobody measured are taken for the one that was: the same multiprocessors, more or fewer of them.

    Example: `gpu_name(torch.device("cuda"))` is "NVIDIA H200" on an H100.
    """
    if device.type != "cuda":
        return "default"
    name = torch.cuda.get_device_name(device)
    is_hopper = torch.cuda.get_device_capability(device) == (9, 0)
    return "NVIDIA H200" if is_hopper and name not in EXPERTS else name


def expert_config(num_tokens: int, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> ExpertConfig:
    """The experts' tiles for `num_tokens` tokens on this device; for weights wider than 2 bytes the default ones, as
    much less deep, so that a tile's bytes stay the same, for float8 and for packed ones, which are uint8, their own.

    Example: `expert_config(256, torch.device("cuda")).rows` is 32 on an H200.
    """
    tables = {torch.float8_e4m3fn: EXPERTS_FLOAT8, torch.uint8: EXPERTS_PACKED}.get(dtype, EXPERTS)
    table = tables.get(_tiles_of(device, dtype), tables["default"])
    config = next(config for config in table if num_tokens <= config.max_tokens)
    if dtype.itemsize <= 2:
        return config
    gate_up, down = (replace(tile, depth=tile.depth * 2 // dtype.itemsize) for tile in (config.gate_up, config.down))
    return replace(config, gate_up=gate_up, down=down)


def dense_config(num_tokens: int, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> DenseConfig | None:
    """The dense MLP's own kernel for `num_tokens` tokens on this device; None where library products are as good, and
    for weights wider than 2 bytes, of which its tiles do not fit into shared memory.

    Example: `dense_config(256, torch.device("cuda")).programs` is 33 on an H200.
    """
    table = DENSE.get(_tiles_of(device, dtype), ())
    return next((config for config in table if config.min_tokens <= num_tokens <= config.max_tokens), None)


def _tiles_of(device: torch.device, dtype: torch.dtype) -> str:
    """`gpu_name`, where a GPU's tiles were measured for weights of this size: 2 bytes and less."""
    return gpu_name(device) if dtype.itemsize <= 2 else "default"


def dependent_launch(device: torch.device) -> dict[str, bool]:
    """The launch arguments of kernels that call `blocks.wait_for_launches_before`.

    Example: `_kernel[grid](x, **dependent_launch(x.device))`.
    """
    return {"DEPENDENT": True, "launch_pdl": True} if gpu_name(device) in DEPENDENT_LAUNCH else {"DEPENDENT": False}


def tensor_descriptors(device: torch.device, dtype: torch.dtype = torch.bfloat16) -> bool:
    """Whether the experts' weights go to their kernels as tensor descriptors or, as all wider than 2 bytes do, as
    pointers: with descriptors the products of float32, which are no warpgroup instructions, spill registers.

    Example: `tensor_descriptors(torch.device("cuda"))` is true on an H200.
    """
    return _tiles_of(device, dtype) in TENSOR_DESCRIPTORS
