"""Compiles every kernel for sm_90 without a GPU, at production shapes, and prints its resources as JSON.

Run it in a separate process, without TRITON_INTERPRET. Every `compile_cases_*.py` next to this file has CALLS, calls of
public functions on uninitialised CPU tensors, and WGMMA, the kernels that must use warpgroup instructions.
"""

import json
import os
import re
import runpy
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import triton
from absent_gpu import absent_gpu

from dgemma_kernels.engine.graphs import only_compiling
from dgemma_kernels.ops import configs
from running_products import overwritten

TABLES: dict[str, dict[str, Any]] = {}  # by name
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


def resources(cubin: bytes) -> dict[str, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [CUOBJDUMP, "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    return {name.lower(): int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}


def compile_case(table: str, case: str) -> list[tuple[dict[str, Any], bytes | None]]:
    """Compile a case and return the resources of each kernel, with its machine code if that must be disassembled."""
    calls, wgmma = TABLES[table]["CALLS"], TABLES[table]["WGMMA"]
    with only_compiling() as kernels:
        calls[case]()
    found = []
    for kernel in {kernel.hash: kernel for kernel in kernels}.values():
        used = re.findall(r"(wgmma\.mma_async\S+)\s*\{[^}]*\},\s*(\{?)", kernel.asm["ptx"])  # sums, left operand
        row = {"case": f"{table}: {case}: {kernel.name}", "shared": kernel.metadata.shared}
        row |= {"wgmma": sorted({name for name, _ in used}), "wants_wgmma": kernel.name in wgmma}
        row["left_in_registers"] = all(brace for _, brace in used)
        # Only kernels with a left operand in registers are disassembled. For all kernels it would take 10 seconds.
        cubin = kernel.asm["cubin"] if any(brace for _, brace in used) else None
        found.append((row | resources(kernel.asm["cubin"]), cubin))
    return found


def main() -> None:
    triton.runtime.driver.set_active(absent_gpu())
    configs.gpu_name = lambda device: "NVIDIA H200"
    for path in sorted(Path(__file__).parent.glob("compile_cases_*.py")):
        if not sys.argv[1:] or path.stem.removeprefix("compile_cases_") in sys.argv[1:]:
            TABLES[path.stem] = runpy.run_path(str(path))
    cases = [(table, case) for table, content in TABLES.items() for case in content["CALLS"]]
    # Forks share the imports and the tables. A process that dies raises an error here.
    with ProcessPoolExecutor(min(4, len(os.sched_getaffinity(0))), get_context("fork")) as processes:
        found = [kernel for kernels in processes.map(compile_case, *zip(*cases, strict=True)) for kernel in kernels]
    cubins = [cubin for _, cubin in found if cubin]
    writes = iter(overwritten(cubins) if cubins else [])
    print(json.dumps([row | {"overwritten": next(writes) if cubin else []} for row, cubin in found]))


if __name__ == "__main__":
    main()
