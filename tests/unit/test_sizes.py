"""Sizes of modules, classes, functions and fields."""

from pathlib import Path

from autoshard.tools.sizes import sizes

SOURCE = """\
class Pair:
    first: int

    def set(self, value: int) -> None:
        def inner() -> None:
            pass

        self.first = self.second = value
"""


def test_sizes(tmp_path: Path) -> None:
    """In a folder that is a link, too, as in a checkout."""
    (tmp_path / "package").mkdir()
    (tmp_path / "elsewhere" / "room").mkdir(parents=True)
    (tmp_path / "package" / "linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "package" / "top.py").write_text("value = 1\n")
    (tmp_path / "elsewhere" / "room" / "pair.py").write_text(SOURCE)
    assert [tuple(each) for each in sizes(tmp_path / "package")] == [
        ("module", "linked.room.pair", 8),
        ("module", "top", 1),
        ("class", "linked.room.pair.Pair", 8),
        ("function", "linked.room.pair.Pair.set", 5),
        ("function", "linked.room.pair.Pair.set.inner", 2),
        ("fields", "linked.room.pair.Pair", 2),
    ]
