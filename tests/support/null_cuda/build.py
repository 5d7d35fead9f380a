"""Build the null CUDA device for the CUDA build of torch in this environment.

    python build.py FOLDER    # prints the path of the library; LD_PRELOAD it

It needs a C compiler, `nm`, and the headers that torch's wheels for CUDA bring.
"""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
from pathlib import Path

SOURCE = Path(__file__).with_name("driver.c")
STUBBED = re.compile(r"cuda[A-Z]|cublas|cu[A-Z]")  # of whose functions torch gets stubs


def build(folder: Path) -> Path:
    """Compile `driver.c`, with stubs for all else that torch's libraries import, into `folder`.

    Returns the path of the library. Raises RuntimeError if torch here has no CUDA.
    """
    site = Path(sysconfig.get_path("purelib"))
    libraries = sorted((site / "torch/lib").glob("lib*.so"))
    headers = next(site.glob("nvidia/*/include/cuda_runtime_api.h"), None)
    if headers is None or not any(each.name == "libtorch_cuda.so" for each in libraries):
        raise RuntimeError(f"torch in {site} is no CUDA build, or its wheels bring no headers")
    folder.mkdir(parents=True, exist_ok=True)
    driver, stubs = folder / "driver.o", folder / "stubs.c"
    compiler = ["gcc", "-O1", "-fPIC", "-w"]
    folders = [f"-I{headers.parent}", f"-I{SOURCE.parent}"]
    _run([*compiler, "-c", str(SOURCE), *folders, "-o", str(driver)])
    written = _symbols(["--defined-only", str(driver)])
    wanted: set[str] = set()
    for each in libraries:
        wanted |= _symbols(["-D", "--undefined-only", str(each)])
    for each in site.glob("triton/backends/nvidia/driver.c"):  # compiled where Triton is used
        wanted.update(re.findall(r"\bcu[A-Z]\w+(?=\()", each.read_text()))
    names = sorted(name for name in wanted - written if STUBBED.match(name))
    stubs.write_text("".join(f"int {name}(void) {{ return 0; }}\n" for name in names))
    library = folder / "libcuda.so.1"
    # By its own name the loader takes it for the driver, too, that others ask for.
    named = f"-Wl,-soname,{library.name}"
    _run([*compiler, "-shared", named, str(driver), str(stubs), "-o", str(library), "-lpthread"])
    return library


def _symbols(arguments: list[str]) -> set[str]:
    """Names that `nm` lists, without versions."""
    lines = _run(["nm", *arguments]).splitlines()
    return {line.split()[-1].partition("@")[0] for line in lines if line.strip()}


def _run(command: list[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    print(build(Path(sys.argv[1])))
