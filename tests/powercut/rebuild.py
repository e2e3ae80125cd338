"""What a power cut leaves of recorded changes. Pure: changes in, files out.

A `Disk` takes changes one by one. It knows what is safe (synced) and what is pending. `image` gives the files after a power
cut at that moment: all that is safe, and as much of the pending as the `Cut` lets through.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from enum import StrEnum
from typing import NamedTuple

from tests.powercut.record import Change

Image = dict[str, bytes]  # names (relative to the recorded directory) and contents of all files

_ROOT = 0  # the recorded directory itself; it was there before


class Names(StrEnum):
    """When a new, renamed or deleted directory entry is safe."""

    EXT4 = "ext4"
    """Entries are in one journal: any sync makes all earlier ones safe, and pending ones survive in order."""
    POSIX = "posix"
    """Only a sync of the directory makes its entries safe; any pending one may survive without the others."""
    POSIX_FILES = "posix, folders safe"
    """As POSIX, but a new folder is safe at once: shows what else is missing where folders are not synced."""


class Kept(StrEnum):
    """Which pending writes of a file survive."""

    NONE = "none"
    ALL = "all"
    FIRST = "the first"
    """In order, up to a random one, and a part of that one."""
    SOME = "some"
    """Random sectors of random writes, in no order; lost ones inside the file are zeros."""


class Cut(NamedTuple):
    """How a power cut treats what is pending. The same cut at the same moment gives the same image."""

    kept: Kept
    sector: int = 4096
    seed: int = 0


Write = tuple[int, bytes | None]  # offset and bytes, or a new size and None


class _File:
    def __init__(self) -> None:
        self.safe = bytearray()
        self.pending: list[Write] = []

    def sync(self) -> None:
        for write in self.pending:
            _apply(self.safe, write)
        self.pending.clear()

    def after(self, cut: Cut, dice: random.Random) -> bytes:
        if not self.pending or cut.kept is Kept.NONE:
            return bytes(self.safe)
        content = bytearray(self.safe)
        for write in _CHOICES[cut.kept](self.pending, cut.sector, dice):
            _apply(content, write)
        return bytes(content)


def _apply(content: bytearray, write: Write) -> None:
    at, data = write
    end = at if data is None else at + len(data)
    if len(content) < end:
        content.extend(bytes(end - len(content)))
    if data is None:
        del content[at:]
    else:
        content[at:end] = data


def _sectors(write: Write, size: int) -> list[Write]:
    """The parts of a write that reach the disk each by itself."""
    at, data = write
    if data is None:
        return [write]
    edges = [at, *range(at - at % size + size, at + len(data), size), at + len(data)]
    return [(a, data[a - at : b - at]) for a, b in zip(edges, edges[1:])]


def _first(pending: list[Write], sector: int, dice: random.Random) -> list[Write]:
    whole = dice.randrange(len(pending))
    torn = _sectors(pending[whole], sector)
    return pending[:whole] + torn[: dice.randrange(len(torn) + 1)]


def _some(pending: list[Write], sector: int, dice: random.Random) -> list[Write]:
    share = dice.choice((0.1, 0.5, 0.9))
    return [part for write in pending for part in _sectors(write, sector) if dice.random() < share]


_CHOICES: dict[Kept, Callable[[list[Write], int, random.Random], list[Write]]] = {
    Kept.ALL: lambda pending, sector, dice: pending,
    Kept.FIRST: _first,
    Kept.SOME: _some,
}


class Entry(NamedTuple):
    """A change of directory entries: `add` (folder, name, node) and `drop` (folder, name); a rename has both."""

    add: tuple[int, str, int] | None
    drop: tuple[int, str] | None
    folder: bool = False


Tree = dict[int, dict[str, int]]  # the entries of each folder: names and nodes


def _enter(tree: Tree, entry: Entry) -> None:
    if entry.drop:
        tree.setdefault(entry.drop[0], {}).pop(entry.drop[1], None)
    if entry.add:
        folder, name, node = entry.add
        tree.setdefault(folder, {})[name] = node


class Disk:
    """Files and folders below the recorded directory, as they are and as a power cut would leave them.

    `honoured(name)` says whether a sync of the file or folder with that name counts; by default each does.
    """

    def __init__(self, names: Names, honoured: Callable[[str], bool] = lambda name: True) -> None:
        self.names, self._honoured = names, honoured
        self._nodes: dict[int, int] = {}  # by inode; an inode is used again, a node never
        self._files: dict[int, _File] = {}
        self._folders: set[int] = {_ROOT}
        self._now: Tree = {_ROOT: {}}
        self._safe: Tree = {_ROOT: {}}
        self._pending: list[Entry] = []
        self._count = 0
        self._paths: dict[int, str] = {_ROOT: ""}  # the last name of each node

    def take(self, change: Change) -> None:
        match change.op:
            case "C" | "D":
                self._create(change)
            case "W" | "T":
                if file := self._files.get(self._nodes.get(change.inode, -1)):
                    file.pending.append((change.at, change.data if change.op == "W" else None))
            case "R":
                self._rename(change)
            case "L":
                self._add(Entry((*self._place(change.name), self._nodes[change.inode]), None))
            case "U":
                folder, name = self._place(change.name)
                if name in self._now[folder]:  # not so for sockets, which hold nothing
                    self._add(Entry(None, (folder, name)))
            case "F":
                self._sync(self._nodes.get(change.inode, _ROOT))

    def name(self, change: Change) -> str:
        """The last name of the file or folder that a change is about; "" for the recorded directory and for what is unknown."""
        return self._paths.get(self._nodes.get(change.inode, _ROOT), "")

    def image(self, cut: Cut) -> Image:
        dice = random.Random(f"{cut.kept} {cut.sector} {cut.seed}")
        tree = self._tree(cut, dice)
        return {name: self._files[node].after(cut, dice) for name, node in self._walk(tree, _ROOT, "")}

    # ---- entries

    def _place(self, path: str) -> tuple[int, str]:
        *folders, name = path.split("/")
        node = _ROOT
        for folder in folders:
            node = self._now[node][folder]
        return node, name

    def _create(self, change: Change) -> None:
        self._count += 1
        node = self._nodes[change.inode] = self._count
        if change.op == "D":
            self._folders.add(node)
            self._now[node] = {}
        else:
            self._files[node] = _File()
        self._paths[node] = change.name
        self._add(Entry((*self._place(change.name), node), None, folder=change.op == "D"))

    def _rename(self, change: Change) -> None:
        source, target = self._place(change.name), self._place(change.to)
        node = self._now[source[0]].get(source[1])
        if node is not None:
            self._paths[node] = change.to
            if self.names is Names.EXT4 or source[0] == target[0]:
                self._add(Entry((*target, node), source))
            else:  # two folders, each with a sync of its own
                self._add(Entry((*target, node), None))
                self._add(Entry(None, source))

    def _add(self, entry: Entry) -> None:
        _enter(self._now, entry)
        if entry.folder and self.names is Names.POSIX_FILES:
            _enter(self._safe, entry)
        else:
            self._pending.append(entry)

    def _sync(self, node: int) -> None:
        if not self._honoured(self._paths.get(node, "")):
            return
        if file := self._files.get(node):
            file.sync()
        waiting: list[Entry] = []
        for entry in self._pending:
            if self.names is Names.EXT4 or node in (entry.add and entry.add[0], entry.drop and entry.drop[0]):
                _enter(self._safe, entry)
            else:
                waiting.append(entry)
        self._pending = waiting

    def _tree(self, cut: Cut, dice: random.Random) -> Tree:
        tree = {folder: dict(entries) for folder, entries in self._safe.items()}
        for entry in self._surviving(cut, dice):
            _enter(tree, entry)
        return tree

    def _surviving(self, cut: Cut, dice: random.Random) -> Iterable[Entry]:
        if cut.kept is Kept.NONE:
            return []
        if cut.kept is Kept.ALL:
            return self._pending
        if self.names is Names.EXT4 or cut.kept is Kept.FIRST:
            return self._pending[: dice.randrange(len(self._pending) + 1)]
        return [entry for entry in self._pending if dice.random() < 0.5]

    def _walk(self, tree: Tree, folder: int, path: str) -> Iterable[tuple[str, int]]:
        for name, node in tree.get(folder, {}).items():
            if node in self._folders:
                yield from self._walk(tree, node, f"{path}{name}/")
            else:
                yield f"{path}{name}", node
