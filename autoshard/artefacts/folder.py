"""Folder of an artefact: graphs as text, and a manifest with a digest of each file and of itself.

    manifest.json       what it depends on, how calls are made, the digest of each file
    train.forward.txt   a planned graph, as text
    train.backward.txt

No file is pickled, and none has a path, a time or a rank in it: made twice, it is the same bytes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from autoshard.artefacts.entry import Entry
from autoshard.options import CompileOptions
from autoshard.plan_cache import write_whole
from autoshard.runtime.comm.mesh import hybrid_mesh

MANIFEST = "manifest.json"
FORMAT = 1


class ArtefactError(RuntimeError):
    """Error for an artefact that can't be made, is spoiled, or is not for what is at hand."""


@dataclass(frozen=True)
class Artefact:
    """Compiled calls of a model, as they lie in a folder.

    facts:   what they depend on, by name; see `facts.py`.
    options: of the backend, as they were given.
    mesh:    replicas and shards, for a model that is sharded as it is loaded; or None.
    sources: (module, qualified name) of what was traced.
    entries: one for each way to call the model.
    texts:   graphs by the name of their file.
    """

    facts: Mapping[str, str]
    options: Mapping[str, object]
    mesh: tuple[int, int] | None
    sources: list[tuple[str, str]]
    entries: list[Entry]
    texts: Mapping[str, str]

    def write(self, folder: Path) -> str:
        """Write it to `folder`, the manifest last; return its digest. Raises OSError."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in self.texts.items():
            write_whole(folder / name, text)
        described = {
            "facts": dict(sorted(self.facts.items())),
            "options": dict(sorted(self.options.items())),
            "mesh": self.mesh,
            "sources": [list(each) for each in self.sources],
            "entries": [each.to_json() for each in self.entries],
            "files": {name: _digest(text) for name, text in sorted(self.texts.items())},
        }
        write_whole(folder / MANIFEST, _with_digest(described))
        return _digest(_with_digest(described))

    @staticmethod
    def read(folder: Path) -> tuple[Artefact, str]:
        """Read the artefact in `folder`: (it, its digest), after all files were compared.

        Raises ArtefactError if there is none, or if a file is missing or was changed.
        """
        try:
            text = (folder / MANIFEST).read_bytes().decode()
        except FileNotFoundError:
            raise ArtefactError(
                f"{folder} has no {MANIFEST}: make it with `autoshard compile --out {folder}`"
            ) from None
        except (OSError, UnicodeDecodeError) as error:
            raise ArtefactError(f"{folder / MANIFEST} can't be read: {error}. {_ANEW}") from None
        try:
            found = json.loads(text)
            format_ = found.pop("format")
            found.pop("sha256")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ArtefactError(f"{folder / MANIFEST} is spoiled: {error}. {_ANEW}") from None
        if format_ != FORMAT:
            raise ArtefactError(
                f"{folder / MANIFEST} has format {format_!r}, and this version of autoshard reads "
                f"{FORMAT}. {_ANEW}"
            )
        if _with_digest(found) != text:
            raise ArtefactError(f"{folder / MANIFEST} is spoiled: its digest is another. {_ANEW}")
        texts = {}
        for name, digest in found["files"].items():
            try:
                texts[name] = (folder / name).read_bytes().decode()
            except (OSError, UnicodeDecodeError) as error:
                raise ArtefactError(f"{folder / name} can't be read: {error}. {_ANEW}") from None
            if Path(name).name != name or _digest(texts[name]) != digest:
                raise ArtefactError(f"{folder / name} is spoiled: its digest is another. {_ANEW}")
        artefact = Artefact(
            found["facts"],
            found["options"],
            None if found["mesh"] is None else (found["mesh"][0], found["mesh"][1]),
            [(module, name) for module, name in found["sources"]],
            [Entry.from_json(each) for each in found["entries"]],
            texts,
        )
        return artefact, _digest(text)


def here(options: Mapping[str, object], mesh: tuple[int, int] | None) -> dict[str, object]:
    """Return `options` of the backend, with `mesh` over this process's ranks; all ranks call this.

    Raises ValueError for a mesh that the ranks can't be divided into.
    """
    return dict(options) if mesh is None else {**options, "mesh": hybrid_mesh(mesh[1])}


def given_options(options: Mapping[str, object], mesh: tuple[int, int] | None) -> CompileOptions:
    """Read options as `here` gives them. Raises ValueError for a wrong one, and as `here`."""
    return CompileOptions.read(here(options, mesh))


_ANEW = "Make it anew with `autoshard compile`"


def _with_digest(described: Mapping[str, object]) -> str:
    """Write `described` as JSON, with a digest of it."""
    said = json.dumps(described, indent=1)  # in their order, as that of outputs
    return json.dumps({"format": FORMAT, "sha256": _digest(said), **described}, indent=1)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
