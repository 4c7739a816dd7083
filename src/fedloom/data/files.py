"""Where data files are: `$FEDLOOM_DATA`, then the user's cache, then a checked download; else a sentence that helps.

A data set is looked for in a sub-folder of its name (case and punctuation do not matter: `fashion_mnist`,
`FashionMNIST`), up to two folders deeper, then flat in the root; the usual raw files first, then `<name>.npz`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedloom.data.dataset import Arrays
from fedloom.data.npz import read_npz
from fedloom.errors import InputError

__all__ = ["Download", "Finder", "cache_folder", "damaged", "gather", "search"]


@dataclass(frozen=True)
class Download:
    """A file on the web with its checksum; without a known checksum nothing is downloaded."""

    url: str
    md5: str

    @property
    def file(self) -> str:
        """The file's own name."""
        return self.url.rpartition("/")[2]


@dataclass(frozen=True)
class Finder:
    """Looks for the files of one data set below one root."""

    root: Path
    names: tuple[str, ...]
    flat: bool = True
    """Whether raw files may lie in the root itself; not so where two data sets use the same file names."""

    def folders(self) -> list[Path]:
        """Sub-folders of the root that carry one of the names."""
        wanted = [_squeeze(name) for name in self.names]
        if not self.root.is_dir():
            return []
        own = [path for path in sorted(self.root.iterdir()) if path.is_dir() and _squeeze(path.name) in wanted]
        return sorted(own, key=lambda path: wanted.index(_squeeze(path.name)))

    def find(self, *names: str) -> Path | None:
        """The first file of one of these names."""
        for folder in self.folders():
            for depth in ("", "*/", "*/*/"):
                for name in names:
                    for path in sorted(folder.glob(depth + name)):
                        if path.is_file():
                            return path
        for name in names if self.flat else ():
            if (self.root / name).is_file():
                return self.root / name
        return None


def gather(
    name: str,
    read: Callable[[Finder], Arrays | None],
    *,
    wanted: str,
    names: Sequence[str] = (),
    flat: bool = True,
    downloads: Sequence[Download] = (),
) -> Arrays:
    """Find and read a data set; `read` gives None where its files are not, and raises where they are damaged."""
    found = search(name, read, names=names, flat=flat)
    if found is not None:
        return found
    failure = _fetch(name, downloads) if downloads else "it cannot be downloaded"
    found = None if failure else _in(cache_folder(), name, read, names, flat)
    if found is None:
        folder = os.environ.get("FEDLOOM_DATA")
        where = f"{Path(folder) / name}" if folder else f"$FEDLOOM_DATA/{name} (FEDLOOM_DATA is not set)"
        raise InputError(f"data set '{name}' is not here and {failure}: put {wanted}, or {name}.npz, into {where}")
    return found


def search(
    name: str, read: Callable[[Finder], Arrays | None], *, names: Sequence[str] = (), flat: bool = True
) -> Arrays | None:
    """What is on this machine, in `$FEDLOOM_DATA` before the cache; None when it is in neither."""
    found = (_in(root, name, read, names, flat) for root in _roots())
    return next((arrays for arrays in found if arrays is not None), None)


def _in(
    root: Path, name: str, read: Callable[[Finder], Arrays | None], names: Sequence[str], flat: bool
) -> Arrays | None:
    found = read(Finder(root, (name, *names), flat))
    packed = Finder(root, (name, *names)).find(f"{name}.npz") if found is None else None
    return read_npz(packed) if packed else found


def _roots() -> Iterator[Path]:
    folder = os.environ.get("FEDLOOM_DATA")
    if folder:
        root = Path(folder).expanduser()
        if not root.is_dir():
            raise InputError(f"FEDLOOM_DATA is '{folder}', which is not a folder")
        yield root
    yield cache_folder()


def cache_folder() -> Path:
    """The user's cache for downloads and rendered data."""
    import pooch

    return Path(pooch.os_cache("fedloom"))


def _fetch(name: str, downloads: Sequence[Download]) -> str:
    """Download into the cache; the reason when it does not work, else an empty text."""
    import pooch

    pooch.get_logger().setLevel("WARNING")
    for download in downloads:
        try:
            pooch.retrieve(
                download.url,
                known_hash=f"md5:{download.md5}",
                fname=download.file,
                path=cache_folder() / name,
                downloader=pooch.HTTPDownloader(timeout=10),
            )
        except OSError:  # requests' errors are OSErrors too
            return f"its download from {download.url} failed"
        except ValueError:
            return f"its download from {download.url} does not have the known checksum"
    return ""


def damaged(path: Path, why: object) -> InputError:
    """The error for a file that cannot be what its name says."""
    return InputError(f"{path} is damaged or of another kind: {str(why) or type(why).__name__}")


def _squeeze(name: str) -> str:
    return re.sub("[^a-z0-9]", "", name.lower())
