"""Pickled bytes read as plain values: nothing that they name is imported, called, constructed or changed.

torch pickles the index of a checkpoint, and what torch's, Megatron's and vLLM's object collectives say to peers. Python
reads a pickle by calling whatever it names, with whatever arguments. Here a value is made of numbers, texts, bytes,
lists, tuples and dictionaries alone; a call in it becomes a `Record` of the name, the arguments and the state, if the
caller has listed that name. The reader of a Record decides its meaning, key by key.

A list of harmless classes given to Python's own unpickler would not do: a pickle can set attributes of classes, too.
So of its opcodes only those are left that make plain values; those that act on a value look at its type first.
Elsewhere: what the files and the peers say (stored_index.py in megatron/, patches.py).
"""

import io
import pickle
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

Name = tuple[str, str]
Names = frozenset[Name]

NO_NAMES: Names = frozenset()
BROKEN = (pickle.UnpicklingError, struct.error, EOFError)
KEYS = (str, int, float, bytes)
# Opcodes that Python's own steps handle: they push plain values, collect and memoise them.
PLAIN = (
    *("PROTO", "FRAME", "STOP", "MARK", "MEMOIZE", "BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET"),
    *("NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT"),
    *("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "SHORT_BINBYTES", "BINBYTES", "BINBYTES8"),
    *("EMPTY_LIST", "EMPTY_DICT", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "GLOBAL", "STACK_GLOBAL"),
)


@dataclass(eq=False)
class Record:
    """A pickled object left unmade: its class or function, the arguments, and its state if it had one.

    Equal to itself alone, so that it can be the key of a dictionary. `is_made` is false for the class itself.
    """

    name: Name
    arguments: tuple[Any, ...] = ()
    state: Any = None
    is_made: bool = True


def as_is(record: Record) -> Any:
    """The record itself."""
    return record


def read_plain(data: bytes, names: Names = NO_NAMES, meaning: Callable[[Record], Any] = as_is) -> Any:
    """The value of a pickle that names nothing but `names`, as pairs (module, name).

    `meaning` gives the value that replaces a Record, at the moment at which it would have been made. ValueError, in a
    few words, for any other name, for opcodes that no plain value needs, and for bytes that are no pickle.
    """
    reader = _Reader(data, names, meaning)
    try:
        value = reader.load()
    except (*BROKEN, LookupError, TypeError, OverflowError, MemoryError) as error:
        raise ValueError(f"it is no whole pickle of plain values: {type(error).__name__}") from error
    if reader.stack or reader.metastack or reader.read(1):
        raise ValueError("it is no whole pickle")
    return value


class _Reader(pickle._Unpickler):
    """Python's unpickler without the opcodes that reach outside of it."""

    def __init__(self, data: bytes, names: Names, meaning: Callable[[Record], Any]) -> None:
        super().__init__(io.BytesIO(data))
        self.names, self.meaning = names, meaning

    def find_class(self, module: str, name: str) -> Record:
        """A record of the class or function, which is not imported."""
        if (module, name) not in self.names:
            raise ValueError(f"it names {module[:80]}.{name[:80]}".encode("unicode_escape").decode())
        return Record((module, name), is_made=False)

    def make(self) -> None:
        arguments, called = self.stack.pop(), self.stack.pop()
        if type(called) is not Record or called.is_made or type(arguments) is not tuple:
            raise ValueError("it calls what is no class")
        self.append(self.meaning(Record(called.name, arguments)))

    def build(self) -> None:
        state = self.stack.pop()
        record = self._top(Record)
        if not record.is_made or record.state is not None:
            raise ValueError(f"it changes {'.'.join(record.name)}")
        record.state = state

    def append_item(self) -> None:
        item = self.stack.pop()
        self._top(list).append(item)

    def extend(self) -> None:
        items = self.pop_mark()
        self._top(list).extend(items)

    def set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set(self._top(dict), key, value)

    def set_items(self) -> None:
        items = self.pop_mark()
        table = self._top(dict)
        for key, value in zip(items[::2], items[1::2], strict=True):
            self._set(table, key, value)

    def _top(self, kind: type) -> Any:
        if type(self.stack[-1]) is not kind:
            raise TypeError
        return self.stack[-1]

    def _set(self, table: dict, key: Any, value: Any) -> None:
        # A tuple would be hashed through all that is in it, however deep that is.
        if type(key) not in KEYS and not (type(key) is Record and key.is_made):
            raise TypeError
        table[key] = value

    dispatch: ClassVar = {
        **{getattr(pickle, name)[0]: pickle._Unpickler.dispatch[getattr(pickle, name)[0]] for name in PLAIN},
        **{pickle.REDUCE[0]: make, pickle.NEWOBJ[0]: make, pickle.BUILD[0]: build},
        **{pickle.APPEND[0]: append_item, pickle.APPENDS[0]: extend},
        **{pickle.SETITEM[0]: set_item, pickle.SETITEMS[0]: set_items},
    }
