"""Builds C++ sources into a library of torch operators, keeps it in the cache, and loads it.

A library is kept as `<cache>/native/<name>-<key>.so`, where the key covers all that the machine code depends on: the sources
and the headers beside them, the flags, the compiler, torch, and the instruction sets of this CPU. The file ends with a digest
of what precedes it (a loader ignores what follows an ELF image), so that a damaged file is seen before it is mapped, and built
anew. A build happens in a folder of its own and is put in place by one rename, under a lock that the kernel takes back from a
process that dies: whoever is killed, and however many build at once, a file in the cache is whole.

Sources name their operators' namespace LAB_NAMESPACE; it is defined as the name that the library is loaded by.
"""

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType

from lab.cache import cache_dir
from lab.errors import UserError

COMPILERS = ("c++", "g++", "clang++")
FLAGS = (
    *("-O3", "-std=c++20", "-fPIC", "-march=native", "-fvisibility=hidden", "-fno-math-errno"),
    *("-fno-trapping-math", "-Wall"),
    *("--param", "ggc-min-heapsize=400000"),  # KiB below which g++ collects no garbage: a tenth of its time on torch's headers
)
DIGEST_BYTES = 32
INCLUDE = Path(__file__).parent / "include"  # our own headers, for all extensions: #include "lab/..."
MESSAGE_LINES = 12  # of a failed compiler's output

_loaded: dict[str, str] = {}  # name of a loaded library: its key
_loading = threading.Lock()


class BuildError(UserError):
    """The library cannot be built on this machine; the message says why."""


def find_compiler() -> str | None:
    """The C++ compiler that torch would use: that of CXX, or the first one found."""
    return next((found for name in (os.environ.get("CXX"), *COMPILERS) if name and (found := shutil.which(name))), None)


def has_python_headers() -> bool:
    """Whether Python.h is installed, which torch's compiled CPU code includes. Extensions of this package do without."""
    return (Path(sysconfig.get_path("include")) / "Python.h").exists()


def available() -> str | None:
    """Why nothing can be built here, and what to install; None when building is possible."""
    if find_compiler() is None:
        return "no C++ compiler was found; install g++ (or clang++), or set CXX to one"
    return None


def load(name: str, sources: Sequence[Path], *, flags: Sequence[str] = ()) -> None:
    """Make the operators of `torch.ops.<name>` that the C++ files define; built when the cache has none for this machine.

    `flags` are given to the compiler after the usual ones, and so override them. To load the same thing again does nothing.
    Raises BuildError when no compiler is found or it fails.
    """
    with _loading:
        if reason := available():
            raise BuildError(f"cannot build {name}: {reason}.")
        key = _key(name, sources, flags)
        if name in _loaded:
            assert _loaded[name] == key, f"{name} is loaded, but of other sources or flags"
            return
        import torch

        torch.ops.load_library(_library(name, key, sources, flags))
        _loaded[name] = key


def build_ahead(libraries: Mapping[str, Sequence[Path]], flags: Mapping[str, Sequence[str]] = MappingProxyType({})) -> None:
    """Begin to build what `load` will ask for and return: as many libraries side by side as there are cores, those named first
    before the others, so that what is asked for first is not kept waiting by what can come later. `flags` are those that
    `load` will be given, of the libraries that have any.

    Does nothing for what is there. What fails here is tried again by `load`, which says why.
    """
    if available() is None:
        gate = threading.Semaphore(os.cpu_count() or 1)
        for name, sources in libraries.items():
            what = name, sources, flags.get(name, ())
            threading.Thread(target=_build_quietly, args=(*what, gate), name=f"lab-build-{name}", daemon=True).start()


def _build_quietly(name: str, sources: Sequence[Path], flags: Sequence[str], gate: threading.Semaphore) -> None:
    with gate, suppress(BuildError):
        _library(name, _key(name, sources, flags), sources, flags)


def _key(name: str, sources: Sequence[Path], flags: Sequence[str]) -> str:
    """A digest of everything that the machine code depends on."""
    import torch

    headers = sorted({header for source in sources for header in source.parent.glob("*.h")}) + sorted(INCLUDE.glob("lab/*.h"))
    parts = [name, *FLAGS, *flags, torch.__version__, _compiler_version(), *_instruction_sets()]
    parts += [f"{file.name}\n{file.read_text(encoding='utf-8')}" for file in (*sources, *headers)]
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=12).hexdigest()


def _compiler_version() -> str:
    path = find_compiler()
    done = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
    return f"{path}\n{done.stdout}"


def _instruction_sets() -> list[str]:
    """What this CPU can do, since the code is compiled for it alone."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return [platform.machine(), platform.processor()]
    lines = cpuinfo.read_text(encoding="utf-8", errors="replace").partition("\n\n")[0].splitlines()
    wanted = ("flags", "features", "vendor_id", "cpu family", "model\t")
    return [platform.machine(), *(line for line in lines if line.lower().startswith(wanted))]


def _library(name: str, key: str, sources: Sequence[Path], flags: Sequence[str]) -> Path:
    """The built library, from the cache when it is there and whole."""
    folder = cache_dir("native")
    library = folder / f"{name}-{key}.so"
    if _is_whole(library):
        return library
    with _locked(folder / f"{name}-{key}.lock"):
        if not _is_whole(library):
            _build(name, library, sources, flags)
    return library


def _is_whole(library: Path) -> bool:
    """Whether the file is there and ends with the digest of the rest."""
    if not library.is_file():
        return False
    data = library.read_bytes()
    return len(data) > DIGEST_BYTES and _digest(data[:-DIGEST_BYTES]) == data[-DIGEST_BYTES:]


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest()


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Alone with the file among all processes. The lock ends with its holder, and the empty file stays."""
    with file.open("w") as opened:
        fcntl.flock(opened, fcntl.LOCK_EX)
        yield


def _build(name: str, library: Path, sources: Sequence[Path], flags: Sequence[str]) -> None:
    """Compile the sources side by side, link them and put the library in its place. The caller holds the lock."""
    print(f"lab: compiling the C++ kernels of {name} (once on this machine, some 10 to 30 s)", file=sys.stderr, flush=True)
    scratch = library.with_suffix(".build")
    shutil.rmtree(scratch, ignore_errors=True)  # left by a process that was killed
    scratch.mkdir()
    try:
        # A folder of its own in there: a compiler that outlived its killed parent can then write into no later build.
        folder = Path(tempfile.mkdtemp(dir=scratch))
        objects = [folder / f"{source.stem}.o" for source in sources]
        pairs = zip(sources, objects, strict=True)
        _run(name, [[*_compile(name, flags), "-c", str(source), "-o", str(target)] for source, target in pairs])
        linked = folder / library.name
        _run(name, [[find_compiler(), "-shared", *map(str, objects), "-o", str(linked), *_libraries()]])
        with linked.open("ab") as file:
            file.write(_digest(linked.read_bytes()))
        linked.replace(library)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _compile(name: str, flags: Sequence[str]) -> list[str]:
    include = _torch_folder() / "include"
    return [find_compiler(), *FLAGS, f"-DLAB_NAMESPACE={name}", f"-I{INCLUDE}", f"-isystem{include}", *flags]


def _libraries() -> list[str]:
    """What to link with."""
    return [f"-L{_torch_folder() / 'lib'}", "-ltorch_cpu", "-lc10"]


def _torch_folder() -> Path:
    import torch

    return Path(torch.__file__).parent


def _run(name: str, commands: list[list[str]]) -> None:
    """Run the commands side by side. Raises BuildError with the end of what the first failing one printed."""
    running = [subprocess.Popen(c, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for c in commands]
    outputs = [process.communicate()[0] for process in running]
    for command, process, output in zip(commands, running, outputs, strict=True):
        if process.returncode:
            end = "\n".join(output.strip().splitlines()[-MESSAGE_LINES:])
            raise BuildError(f"cannot build {name}: {command[0]} failed with status {process.returncode}:\n{end}")
