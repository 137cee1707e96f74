"""Tile shapes as data: what was measured best on a GPU, and a choice that fits any GPU of the last ten years."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class Tile:
    """One program's share of a matrix product: `cols` outputs of as many rows as the routing has a tile, `depth` at a
    time, on `warps` warps with `stages` loads in flight. `prefetch` asks for all its weights in L2 at the start."""

    cols: int
    depth: int
    warps: int
    stages: int
    prefetch: bool = False

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

    `dependent` starts the down product, and the layer's tail after it, while the last programs of the kernel in front
    still run (programmatic dependent launch, Hopper).
    """

    max_tokens: int
    rows: int
    gate_up: Tile
    down: Tile
    dependent: bool = False

    def __post_init__(self) -> None:
        if self.rows < 16 or self.rows & (self.rows - 1):
            raise ValueError(f"ExpertConfig.rows must be a power of two >= 16, got {self.rows}.")


@dataclass(frozen=True, kw_only=True)
class DenseConfig:
    """Tile of the dense gated product for batches of up to `max_tokens` tokens."""

    max_tokens: int
    rows: int
    tile: Tile


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
            down=Tile(cols=64, depth=64, warps=4, stages=4),
        ),
        ExpertConfig(
            max_tokens=512,
            rows=32,
            gate_up=Tile(cols=64, depth=128, warps=4, stages=4),
            down=Tile(cols=64, depth=64, warps=4, stages=4),
        ),
        ExpertConfig(
            max_tokens=1536,
            rows=64,
            gate_up=Tile(cols=64, depth=64, warps=4, stages=4),
            down=Tile(cols=128, depth=64, warps=4, stages=4),
        ),
        ExpertConfig(
            max_tokens=_ANY,
            rows=128,
            gate_up=Tile(cols=64, depth=64, warps=8, stages=4),
            down=Tile(cols=128, depth=64, warps=8, stages=4),
        ),
    ),
}

DENSE: dict[str, tuple[DenseConfig, ...]] = {
    "default": (DenseConfig(max_tokens=_ANY, rows=64, tile=Tile(cols=64, depth=64, warps=4, stages=3)),),
    "NVIDIA H200": (
        DenseConfig(max_tokens=16, rows=16, tile=Tile(cols=32, depth=128, warps=4, stages=4)),
        # 256 rows / 64 × 2112 columns / 64 is 132 programs: one for each of the chip's multiprocessors.
        DenseConfig(max_tokens=256, rows=64, tile=Tile(cols=64, depth=128, warps=4, stages=4)),
        DenseConfig(max_tokens=_ANY, rows=128, tile=Tile(cols=128, depth=64, warps=8, stages=3)),
    ),
}


def gpu_name(device: torch.device) -> str:
    """The key into the tables here: the GPU's name, or "default" for tensors on no GPU (Triton's interpreter)."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "default"


def expert_config(num_tokens: int, device: torch.device) -> ExpertConfig:
    """The experts' tiles for `num_tokens` tokens on this device.

    Example: `expert_config(256, torch.device("cuda")).rows` is 32 on an H200.
    """
    table = EXPERTS.get(gpu_name(device), EXPERTS["default"])
    return next(config for config in table if num_tokens <= config.max_tokens)


def dense_config(num_tokens: int, device: torch.device) -> DenseConfig:
    """The dense gated product's tile for `num_tokens` tokens on this device.

    Example: `dense_config(256, torch.device("cuda")).rows` is 64 on an H200.
    """
    table = DENSE.get(gpu_name(device), DENSE["default"])
    return next(config for config in table if num_tokens <= config.max_tokens)
