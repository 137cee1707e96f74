"""Compiles every kernel for sm_90 without a GPU, at production shapes, and prints its resources as JSON.

Run it in a separate process, without TRITON_INTERPRET. Every `compile_cases_*.py` next to this file has CALLS, calls of
public functions on uninitialised CPU tensors, and WGMMA, the kernels that must use warpgroup instructions.
"""

import json
import re
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget

from dgemma_kernels.ops import configs
from dgemma_kernels.ops.ahead import AbsentGPU, only_compiling
from running_products import overwritten

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


def resources(cubin: bytes) -> dict[str, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [CUOBJDUMP, "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    return {name.lower(): int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}


def main() -> None:
    triton.runtime.driver.set_active(AbsentGPU(GPUTarget("cuda", 90, 32)))
    configs.gpu_name = lambda device: "NVIDIA H200"
    rows, cubins = [], {}
    for path in sorted(Path(__file__).parent.glob("compile_cases_*.py")):
        if sys.argv[1:] and path.stem.removeprefix("compile_cases_") not in sys.argv[1:]:
            continue
        table = runpy.run_path(str(path))
        for case, call in table["CALLS"].items():
            with only_compiling() as kernels:
                call()
            for kernel in {kernel.hash: kernel for kernel in kernels}.values():
                row = {"case": f"{path.stem}: {case}: {kernel.name}", "shared": kernel.metadata.shared}
                used = re.findall(
                    r"(wgmma\.mma_async\S+)\s*\{[^}]*\},\s*(\{?)", kernel.asm["ptx"]
                )  # sums, left operand
                row |= {"wgmma": sorted({name for name, _ in used}), "wants_wgmma": kernel.name in table["WGMMA"]}
                row["left_in_registers"] = all(brace for _, brace in used)
                rows.append(row | resources(kernel.asm["cubin"]))
                if any(brace for _, brace in used):
                    cubins[len(rows) - 1] = kernel.asm["cubin"]
    # Other kernels have no left operand in registers, and disassembling all takes 10 seconds.
    writes = dict(zip(cubins, overwritten(list(cubins.values())) if cubins else [], strict=True))
    rows = [row | {"overwritten": writes.get(i, [])} for i, row in enumerate(rows)]
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
