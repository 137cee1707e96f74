"""Tile shapes, read from `tiles.toml`: the fastest measured ones for a GPU, and default ones for consumer GPUs."""

import tomllib
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import triton


@dataclass(frozen=True)
class TileShape:
    """The part of a matrix product that one program computes.

    It has `cols` outputs for each row of the tile and reads `depth` inputs at a time; both are powers of two. It runs
    on `warps` warps with `stages` loads in flight, in at most `registers` registers per thread.
    """

    cols: int
    depth: int
    warps: int
    stages: int
    registers: int | None = None


@dataclass(frozen=True)
class ExpertConfig:
    """Tiles of the experts for batches of up to `max_tokens` tokens: rows per tile, and one shape per product.

    `rows` is a power of two >= 16 or the sum of two. In the second case, a tile has two blocks that share the weights:
    96 rows are 64 + 32. With `one_scale`, float8 hidden values have one scale per row, and tensor cores add all
    products (in at least 14 bits). If `one_launch` is not 0, int4 weights with `FourBit.float8_rows` use
    `experts.hopper`, with that many rows per tile. With `persistent`, plain and float8 weights whose sizes allow it use
    `experts.hopper_many`, and only other weights use `gate_up` and `down`.
    """

    max_tokens: int
    rows: int
    gate_up: TileShape
    down: TileShape
    one_scale: bool = False
    one_launch: int = 0
    persistent: bool = False


@dataclass(frozen=True, kw_only=True)
class DenseConfig:
    """Tiles of the dense MLP for batches of `min_tokens` to `max_tokens` tokens.

    `programs` programs, each alone on a multiprocessor, work through tiles of `rows` tokens. Rows, columns and depth
    are powers of two >= 16.
    """

    min_tokens: int
    max_tokens: int
    programs: int
    rows: int
    gate_up_cols: int
    down_cols: int
    depth: int
    warps: int
    stages: int


_ANY = 1 << 62
# Triton versions with which kernels in Gluon ran on a GPU. This language changes with every version.
GLUON_RAN_WITH = ("3.6.",)
TORCH_OF_GLUON = "2.11.*"  # comes with this version of Triton


def _expert_config(row: dict[str, Any]) -> ExpertConfig:
    """Return a config from its row in `tiles.toml`."""
    shapes = {name: TileShape(*row[name]) for name in ("gate_up", "down")}
    return ExpertConfig(**{"max_tokens": _ANY, **row, **shapes})


_TILES = tomllib.loads(Path(__file__).with_name("tiles.toml").read_text(encoding="utf-8"))
# By storage format of the weights (`formats.format_of`), then by GPU.
EXPERTS: dict[str, dict[str, tuple[ExpertConfig, ...]]] = {
    format: {gpu: tuple(map(_expert_config, rows)) for gpu, rows in tables.items()}
    for format, tables in _TILES["experts"].items()
}
EXPERTS["int4"] = EXPERTS["nvfp4"] = EXPERTS.pop("four_bit")
DENSE = {gpu: tuple(DenseConfig(**row) for row in rows) for gpu, rows in _TILES["dense"].items()}
_ALL = 132  # one program per multiprocessor, for many tokens with `one_order`; without it, library products are used

# Largest output of the experts, in bytes, to keep in L2 until `norms.layer_tail` reads it.
KEPT_OUTPUT = 16 << 20

# GPUs with programmatic dependent launch (Hopper and later): a kernel starts while the last programs of the previous
# kernel still run, and waits for them itself.
DEPENDENT_LAUNCH: set[str] = {"NVIDIA H200"}

# GPUs whose memory unit loads whole blocks of the experts' weights (TMA, Hopper and later). On other GPUs Triton turns
# a descriptor into loads that wait for each other.
TENSOR_DESCRIPTORS: set[str] = {"NVIDIA H200"}


@cache
def gpu_name(device: torch.device) -> str:
    """Return the key into these tables: the GPU's name, or "default" for CPU tensors (Triton's interpreter).

    A Hopper GPU without measured tiles uses those of the H200. It has the same multiprocessors, but not always as many.

    Example: `gpu_name(torch.device("cuda"))` is "NVIDIA H200" on an H100.
    """
    if device.type != "cuda":
        return "default"
    name = torch.cuda.get_device_name(device)
    is_hopper = torch.cuda.get_device_capability(device) == (9, 0)
    return "NVIDIA H200" if is_hopper and name not in EXPERTS["bf16"] else name


@cache
def num_multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors; for the interpreter 4, so that sums are split into parts.

    Example: `num_multiprocessors(torch.device("cuda"))` is 132 on an H200.
    """
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def expert_config(
    num_tokens: int, device: torch.device, format: str = "bf16", *, one_order: bool = False
) -> ExpertConfig:
    """Return the experts' tiles for `num_tokens` tokens and weights of this format on this device.

    `format` is the result of `formats.format_of`. Weights of 4 bytes ("float32") run the default tiles with half the
    depth, so that a tile has as many bytes. `one_order` chooses only tiles that add in the order of those for 256
    tokens, so that a token's result does not depend on the number of tokens.

    Example: `expert_config(256, torch.device("cuda")).rows` is 32 on an H200.
    """
    tables = EXPERTS["bf16" if format == "float32" else format]
    table = tables.get(_tiles_of(device, format), tables["default"])
    if gluon_obstacle() is not None:
        table = tuple(config for config in table if not config.persistent)
    if one_order and format == "fp8":
        table = _of_one_order(table)
    config = next(config for config in table if num_tokens <= config.max_tokens)
    if format != "float32":
        return config
    gate_up, down = (replace(tile, depth=tile.depth // 2) for tile in (config.gate_up, config.down))
    return replace(config, gate_up=gate_up, down=down)


def _of_one_order(table: tuple[ExpertConfig, ...]) -> tuple[ExpertConfig, ...]:
    """Return the tiles of float8 experts that add in the order of those for 256 tokens.

    Sums of float8 products are added per block of depth, and hidden values are scaled per block of columns. All other
    formats add one column after another, whatever the tile.
    """

    def order(config: ExpertConfig) -> ExpertConfig:
        """Return the tiles without the settings that change no sum."""
        gate_up, down = (replace(tile, warps=1, stages=1, registers=None) for tile in (config.gate_up, config.down))
        return replace(config, max_tokens=0, rows=16, gate_up=gate_up, down=replace(down, cols=1))

    wanted = order(next(config for config in table if config.max_tokens >= 256))
    same = [config for config in table if order(config) == wanted]
    return (*same[:-1], replace(same[-1], max_tokens=_ANY))


def dense_config(
    num_tokens: int, device: torch.device, format: str = "bf16", *, one_order: bool = False
) -> DenseConfig | None:
    """Return the tiles of the dense MLP's own kernel for `num_tokens` tokens on this device.

    The result is None where library products are as fast, and for weights of 4 bytes ("float32"), whose tiles do not
    fit into shared memory. With `one_order`, whether the kernel is used does not depend on `num_tokens`.

    Example: `dense_config(256, torch.device("cuda")).programs` is 33 on an H200.
    """
    table = DENSE.get(_tiles_of(device, format), ())
    if one_order and table:
        table = (replace(table[0], min_tokens=0), *table[1:], replace(table[-1], max_tokens=_ANY, programs=_ALL))
    return next((config for config in table if config.min_tokens <= num_tokens <= config.max_tokens), None)


def _tiles_of(device: torch.device, format: str) -> str:
    """Return `gpu_name`, or "default" for weights of 4 bytes, which have no measured tiles."""
    return "default" if format == "float32" else gpu_name(device)


def gluon_obstacle() -> str | None:
    """Return the version of Triton that kernels in Gluon need, None if this version runs them.

    Example: with Triton 3.9, 'Triton 3.6.*, got 3.9.0 (pip install "torch==2.11.*" "triton==3.6.*")'.
    """
    if triton.__version__.startswith(GLUON_RAN_WITH):
        return None
    versions = ", ".join(f"{version}*" for version in GLUON_RAN_WITH)
    return f'Triton {versions}, got {triton.__version__} (pip install "torch=={TORCH_OF_GLUON}" "triton=={versions}")'


@cache
def is_hopper(device: torch.device) -> bool:
    """Tell if this is a GPU of compute capability 9.

    Example: `is_hopper(x.device)`.
    """
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def dependent_launch(device: torch.device) -> dict[str, bool]:
    """Return the launch arguments of kernels that call `blocks.wait_for_launches_before`.

    Example: `_kernel[grid](x, **dependent_launch(x.device))`.
    """
    return {"DEPENDENT": True, "launch_pdl": True} if gpu_name(device) in DEPENDENT_LAUNCH else {"DEPENDENT": False}


def tensor_descriptors(device: torch.device, format: str = "bf16") -> bool:
    """Return True if kernels read the experts' weights through tensor descriptors, False for pointers.

    Weights of 4 bytes always use pointers. Their products are not warpgroup instructions, and with descriptors they
    spill registers.

    Example: `tensor_descriptors(torch.device("cuda"))` is true on an H200.
    """
    return _tiles_of(device, format) in TENSOR_DESCRIPTORS
